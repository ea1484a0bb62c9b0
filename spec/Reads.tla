-------------------------------- MODULE Reads --------------------------------
(* Hit reads: the rows of a span that the cache, not the forward, supplies.  *)
(*                                                                           *)
(* A plan resolves every (key, position) of the span to a *row*, under the   *)
(* lock: the pool row at one exact version, or one row of the log, or a      *)
(* hole. When the rows are gathered is then of no importance.                *)
EXTENDS Writes

VARIABLES
    reads,      \* [<<step, request>> -> [req, step, start, end, blocks, state, rows]]
    step,       \* the last step id issued
    steps,      \* [step id -> [request -> span]]: opened and not yet taken
    emitted,    \* [live request -> how far its rows have been offered]
    handed      \* [request -> how far its consumer has come]: a ghost, for the spans only

readVars == <<reads, step, steps, emitted, handed>>

ReadsInit ==
    /\ reads = <<>>
    /\ step = 0
    /\ steps = <<>>
    /\ emitted = <<>>
    /\ handed = [r \in Requests |-> 0]

Live == DOMAIN emitted

----------------------------------------------------------------------------
(* Resolving.                                                               *)

Names(kind, s, t, row) ==
    [kind |-> kind, slot |-> s, version |-> version[s], task |-> t, row |-> row]

Carrier(k, s) == CHOOSE t \in DOMAIN tasks : Carries(t, k, s, version[s])

Resolve(k, s) ==
    CASE occupancy[k][s] = "committed" -> Names("pool", s, 0, Zero)
      [] occupancy[k][s] = "in_transit" /\ k \notin Deferred -> Names("pool", s, Carrier(k, s), Zero)
      [] occupancy[k][s] = "in_transit" /\ k \in Deferred ->
            IF On("resolve_deferred_at_fetch") THEN Names("task", s, Carrier(k, s), Zero)
            ELSE Names("log", s, 0, log_row[k][s])
      [] occupancy[k][s] = "absent" -> Names("hole", s, 0, Zero)

\* The <<key, position>> pairs of a read that the model follows.
Owed(read) ==
    {<<k, p>> \in Keys \X (read.start .. read.end - 1) : SlotAt(read.blocks, p) \in Watched}

Resolution(read) == [x \in Owed(read) |-> Resolve(x[1], SlotAt(read.blocks, x[2]))]

NamesPool(read, s) ==
    read.state = "planned" /\ \E x \in DOMAIN read.rows :
        read.rows[x].kind = "pool" /\ read.rows[x].slot = s
Names1(read, s) == IF NamesPool(read, s) THEN 1 ELSE 0

\* Its rows if it were gathered now.
Value(k, e) ==
    CASE e.kind = "pool" -> pool[k][e.slot]
      [] e.kind \in {"log", "row"} -> e.row
      [] e.kind = "task" -> LastRow(e.task, k, e.slot)
      [] e.kind = "hole" -> IF On("hole_reads_buffer") THEN pool[k][e.slot] ELSE Zero

\* A pool row that was in transit when it was planned is gathered only after its writer is done.
Ready(k, e) ==
    e.kind = "pool" /\ e.task \in DOMAIN tasks =>
        On("fetch_before_done") \/ tasks[e.task].state = "WRITTEN"

ReadyToFetch(read) == \A x \in DOMAIN read.rows : Ready(x[1], read.rows[x])

Fetched(read) ==
    [read EXCEPT !.state = "fetched", !.rows = [x \in DOMAIN read.rows |->
        IF read.rows[x].kind = "hole" THEN read.rows[x]
        ELSE [read.rows[x] EXCEPT !.kind = "row", !.task = 0, !.row = Value(x[1], read.rows[x])]]]

HiddenHole(read) == \E x \in DOMAIN read.rows : x[1] \in Hidden /\ read.rows[x].kind = "hole"

RECURSIVE Sum(_, _)
Sum(ids, s) ==
    IF ids = {} THEN 0
    ELSE LET id == CHOOSE id \in ids : TRUE IN Names1(reads[id], s) + Sum(ids \ {id}, s)

\* Gather these reads together; each lets go of its pins.
Complete(ids) ==
    /\ reads' = [id \in DOMAIN reads |-> IF id \in ids THEN Fetched(reads[id]) ELSE reads[id]]
    /\ pins' = [s \in Watched |-> pins[s] - (IF On("unpinned_twice") THEN 2 ELSE 1) * Sum(ids, s)]

\* Reads whose step has been opened: their holes are final and they may be handed over.
Final(id) == id[1] < step \/ (id[1] = step /\ pc \in {"schedule", "start"})
=============================================================================
