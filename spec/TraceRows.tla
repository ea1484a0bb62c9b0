------------------------------ MODULE TraceRows ------------------------------
(* PrefixCache along a recorded trace: Next, but only as the trace says.     *)
(*                                                                           *)
(* A generated module extends this one and gives the constants and Events.   *)
(* An event names what it knows of an action; a field that it leaves out may *)
(* be anything. The trace is accepted if all events can be taken, which is   *)
(* when TLC breaks TraceTakenInv. Otherwise the depth tells which one cannot.*)
EXTENDS Rules

CONSTANT Events

VARIABLE taken

Recorded == Events[taken + 1]

Says(e) == \A field \in DOMAIN e : field \in DOMAIN event' /\ event'[field] = e[field]

TraceInit == Init /\ taken = 0

TraceNext ==
    /\ taken < Len(Events)
    /\ Next
    /\ Says(Recorded)
    /\ taken' = taken + 1

TraceSpec == TraceInit /\ [][TraceNext]_<<vars, taken>>

TraceTakenInv == taken < Len(Events)

\* Stands in for VllmEnv!Allocations: the recorded blocks, not all that might have been chosen.
TraceAllocations(need, avail) ==
    IF ~TraceTakenInv \/ Recorded.action # "ScheduleRequest" THEN {}
    ELSE LET blocks == Recorded.blocks
             new == SubSeq(blocks, Len(blocks) - need + 1, Len(blocks))
         IN IF need <= Len(blocks) /\ Range(new) \subseteq avail /\ Cardinality(Range(new)) = need
            THEN {new} ELSE {}

TraceView == <<View, taken>>
=============================================================================
