----------------------------- MODULE MCHandover ------------------------------
(* Requests are numbers here, so that they have an order. The event is left  *)
(* out of the view: it says how a state was reached, not what it is.         *)
EXTENDS Handover

View == <<running, pc, batch, id, page, step, steps, building, pages, content, tasks, next_task,
          open_write, log, reads, charged, reserved, opened, consumed, event = event>>
=============================================================================
