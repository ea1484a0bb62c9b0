----------------------------- MODULE MCFailures ------------------------------
(* The event is left out of the view: it says how a state was reached.       *)
EXTENDS Failures

View == <<state, queue, failing, failures, record, at, returned, event = event>>
=============================================================================
