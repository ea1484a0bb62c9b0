------------------------------- MODULE Writes --------------------------------
(* Write tasks: what moves rows into the pool.                               *)
(*                                                                           *)
(* An immediate task carries one step's rows of the whole batch. A deferred  *)
(* task carries one request's rows of the log, step after step, until it is  *)
(* sealed: at finish, at abort, or under budget pressure. A task remembers   *)
(* the version at which each of its rows was claimed, and writes only where  *)
(* that version is still the slot's.                                         *)
EXTENDS Slots

CONSTANT Fine   \* TRUE: every step of the chain is an action, and the committer moves at any
                \* time. FALSE: sealed means queued, and it moves only where it can be seen

VARIABLES
    tasks,      \* [id -> [kind, req, step, n, state, rows]]; rows is a sequence
    queue,      \* ids, first in first out
    open_write, \* [request -> id of its open deferred write, 0 for none]
    write_n,    \* [request -> deferred writes opened so far]
    next_task   \* the next id; ids are never used again

writeVars == <<tasks, queue, open_write, write_n, next_task>>

Chain == <<"PENDING", "QUEUED", "COPYING", "HOST_READY", "WRITTEN">>

WritesInit ==
    /\ tasks = <<>>
    /\ queue = <<>>
    /\ open_write = [r \in Requests |-> 0]
    /\ write_n = [r \in Requests |-> 0]
    /\ next_task = 1

Drop(f, ids) == [x \in DOMAIN f \ ids |-> f[x]]
IsOpen(id) == \E r \in Requests : open_write[r] = id
Open == {open_write[r] : r \in Requests} \ {0}

RECURSIVE InOrder(_)
InOrder(ids) ==
    IF ids = {} THEN <<>>
    ELSE LET first == CHOOSE x \in ids : \A y \in ids : x <= y
         IN <<first>> \o InOrder(ids \ {first})

\* No longer open. In a coarse model the sealed task is on the queue at once.
Seal(ids) ==
    /\ open_write' = [r \in Requests |-> IF open_write[r] \in ids THEN 0 ELSE open_write[r]]
    /\ IF Fine THEN UNCHANGED <<tasks, queue>>
       ELSE /\ tasks' = [t \in DOMAIN tasks |->
                IF t \in ids THEN [tasks[t] EXCEPT !.state = "QUEUED"] ELSE tasks[t]]
            /\ queue' = queue \o InOrder(ids)

Owns(row) == row.version = version[row.slot]

\* The task that still has to bring this row to the pool.
Carries(t, k, s, v) ==
    \E i \in DOMAIN tasks[t].rows :
        LET row == tasks[t].rows[i] IN row.key = k /\ row.slot = s /\ row.version = v
WriterDone(k, s, v) ==
    \A t \in DOMAIN tasks : tasks[t].state = "WRITTEN" \/ ~Carries(t, k, s, v)

\* The last row of a task for a slot: what a reader gets that asks the task by slot.
LastRow(t, k, s) ==
    LET at == {i \in DOMAIN tasks[t].rows :
                tasks[t].rows[i].key = k /\ tasks[t].rows[i].slot = s}
    IN tasks[t].rows[CHOOSE i \in at : \A j \in at : j <= i].row
=============================================================================
