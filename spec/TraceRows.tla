------------------------------ MODULE TraceRows ------------------------------
(* PrefixCache along recorded traces: Next, but only as a trace says.        *)
(*                                                                           *)
(* A generated module extends this one and gives the constants and Traces.   *)
(* An event names what it knows of an action; a field that it leaves out may *)
(* be anything. A trace is accepted if all its events can be taken. TLC      *)
(* prints each that it takes, so the last one printed tells how far it came. *)
(*                                                                           *)
(* Between steps a trace may hold an event Inspect with the recorder's own   *)
(* tables: nothing happens, and they have to be those of this machine.       *)
EXTENDS Rules

CONSTANT Traces

VARIABLES
    which,  \* the trace that this behaviour follows
    trace,  \* its events: a variable, since TLC would evaluate all Traces at each look
    taken   \* how many of them have been taken

Left == taken < Len(trace)
Recorded == trace[taken + 1]

Says(e) == \A field \in DOMAIN e : field \in DOMAIN event' /\ event'[field] = e[field]

TraceInit ==
    /\ Init
    /\ which \in 1 .. Len(Traces)
    /\ trace = Traces[which]
    /\ taken = 0

Tables == [
    version |-> version, owner |-> owner, pins |-> pins, occupancy |-> occupancy, emitted |-> emitted,
    open_write |-> [r \in {q \in Requests : open_write[q] # 0} |-> <<open_write[r], write_n[r]>>],
    tasks |-> [t \in DOMAIN tasks |-> tasks[t].state],
    steps |-> DOMAIN steps,
    reads |-> [id \in {x \in DOMAIN reads : x[1] \in DOMAIN steps} |-> reads[id].state]]

Inspect == Quiet /\ Recorded.tables = Tables /\ UNCHANGED vars

TraceNext ==
    /\ Left
    /\ IF Recorded.action = "Inspect" THEN Inspect ELSE Next /\ Says(Recorded)
    /\ taken' = taken + 1
    /\ UNCHANGED <<which, trace>>
    /\ PrintT(<<"taken", which, taken'>>)

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, which, trace, taken>>

\* Stands in for VllmEnv!Allocations: the recorded blocks, not all that might have been chosen.
TraceAllocations(need, avail) ==
    IF ~Left \/ Recorded.action # "ScheduleRequest" THEN {}
    ELSE LET blocks == Recorded.blocks
             new == SubSeq(blocks, Len(blocks) - need + 1, Len(blocks))
         IN IF need <= Len(blocks) /\ Range(new) \subseteq avail /\ Cardinality(Range(new)) = need
            THEN {new} ELSE {}

TraceView == <<View, which, taken>>
=============================================================================
