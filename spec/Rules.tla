-------------------------------- MODULE Rules --------------------------------
(* What must hold of PrefixCache: the rules of the architecture, by name.    *)
(* Wrong rows and false alarms are told apart: RowsAreRightInv is broken by  *)
(* a wrong row only, NoFalseRaiseInv by an error that nobody earned only.    *)
EXTENDS PrefixCache

FinalReads == {id \in DOMAIN reads : Final(id)}
Plans(id) == {x \in DOMAIN reads[id].rows : reads[id].state \in {"planned", "fetched"}}

\* 1. Gathered now, every row is the one that is due. A late fetch is no action here: since this
\* holds in every state, it holds however late the gather is.
RowsAreRightInv ==
    \A id \in FinalReads : \A x \in Plans(id) :
        LET e == reads[id].rows[x]
        IN Ready(x[1], e) /\ ~(x[1] \in Hidden /\ e.kind = "hole")
           => Value(x[1], e) = Due(x[1], reads[id].req, x[2])

\* Each hashed block has the right rows, before anybody hits it. Checked between steps: within a
\* step, a block is published before it is computed.
HashedRowsAreRightInv ==
    Quiet => \A s \in Watched :
        LET h == hash[s \div BlockSize]
            row == SubSeq(h, 1, Len(h) - BlockSize + (s % BlockSize) + 1)
        IN h # <<>> => \A k \in Keys :
            IF ~Emits(k, row) THEN occupancy[k][s] = "absent"
            ELSE CASE occupancy[k][s] = "absent" -> FALSE
                   [] occupancy[k][s] = "committed" -> pool[k][s] = row
                   [] occupancy[k][s] = "in_transit" ->
                        \E t \in DOMAIN tasks : \E i \in DOMAIN tasks[t].rows :
                            tasks[t].rows[i] = [key |-> k, slot |-> s, version |-> version[s], row |-> row]

\* 2. A hole in hidden rows fails the read, a hole in an mm key does not.
HitIsWholeOrFatalInv ==
    \A id \in FinalReads : (reads[id].state = "failed") <=> HiddenHole(reads[id])

\* No error that nobody earned: the scheduler promised these rows and the cache has seen them.
RaisesWhenFetched(id) ==
    On("literal_version_check") /\ reads[id].state = "planned"
    /\ \E x \in DOMAIN reads[id].rows : LET e == reads[id].rows[x] IN e.version # version[e.slot]
NoFalseRaiseInv == \A id \in FinalReads : reads[id].state # "failed" /\ ~RaisesWhenFetched(id)

\* 3. A step claims what it computes, for every key; nothing else changes a version or an owner.
ClaimAllProp ==
    [][IF event'.action = "ClaimSlots"
       THEN \A s \in Watched :
              IF s \notin StepSlots THEN version'[s] = version[s] /\ owner'[s] = owner[s]
              ELSE /\ version'[s] = version[s] + 1
                   /\ owner'[s] = step
                   /\ \A k \in Keys : occupancy'[k][s] =
                        IF Emits(k, ComputedRow(s)) THEN "in_transit" ELSE "absent"
       ELSE UNCHANGED <<version, owner>>]_vars

\* 4. What a plan names stays what it named: nobody claims a slot under a planned pool row.
PlannedReadNamesRowsInv ==
    /\ \A id \in DOMAIN reads : reads[id].state = "planned" =>
        \A x \in DOMAIN reads[id].rows :
            LET e == reads[id].rows[x]
            IN /\ e.kind \in {"pool", "log", "hole"}
               /\ e.kind = "pool" => e.version = version[e.slot]
    /\ \A s \in Watched : pins[s] = Sum(DOMAIN reads, s)

\* 5. Once a step is open, its reads are never resolved again.
PlanOnceProp ==
    [][\A id \in FinalReads \cap DOMAIN reads' :
        \/ reads'[id] = reads[id]
        \/ reads[id].state = "planned" /\ reads'[id] = Fetched(reads[id])]_vars

\* 6. A hit's rows of a key, if any of them is there, are handed over even if this step does
\* not emit it.
SpanOwedUntilEmittedInv ==
    \A s \in DOMAIN steps : \A r \in DOMAIN steps[s] :
        LET span == steps[s][r]
            id == <<s, r>>
        IN \A k \in Keys :
            \/ k \in span.keys
            \/ /\ \A p \in span.hit .. span.end - 1 : ~Emits(k, Row(r, p))
               /\ id \in DOMAIN reads => \A x \in DOMAIN reads[id].rows :
                    x[1] = k => reads[id].rows[x].kind = "hole"

\* The span rule: a consumer never meets a gap, and sees a position twice only after a preemption.
SpansMeetInv ==
    \A s \in DOMAIN steps : \A r \in DOMAIN steps[s] :
        LET span == steps[s][r]
        IN IF span.kind = "resumed" THEN span.start <= span.owed ELSE span.start = span.owed

\* 7. One step at a time along the chain; a task appears PENDING and leaves WRITTEN.
Successor == [PENDING |-> "QUEUED", QUEUED |-> "COPYING", COPYING |-> "HOST_READY",
              HOST_READY |-> "WRITTEN"]
StrictChainProp ==
    [][/\ \A t \in DOMAIN tasks \cap DOMAIN tasks' :
            \/ tasks'[t].state = tasks[t].state
            \/ tasks[t].state # "WRITTEN" /\ tasks'[t].state = Successor[tasks[t].state]
       /\ \A t \in DOMAIN tasks \ DOMAIN tasks' : tasks[t].state = "WRITTEN"
       /\ \A t \in DOMAIN tasks' \ DOMAIN tasks : tasks'[t].state = "PENDING"]_vars

\* 8. One task is in the writer's hands at a time ...
OneWriterInv == Cardinality(InHand) <= 1
\* ... and only it changes pool rows, where it still owns the slot.
OneWriterProp ==
    [][\A k \in Keys : \A s \in Watched : pool'[k][s] # pool[k][s] =>
        /\ event'.action = "WritePool"
        /\ Carries(event'.task, k, s, version[s])]_vars

\* 12. Whatever is in transit is carried by a task that will land it, abort or not.
Publishing == pc \in {"register", "append"}
AbortStillLandsInv ==
    ~Publishing => \A k \in Keys : \A s \in Watched :
        occupancy[k][s] = "in_transit" => \E t \in DOMAIN tasks : Carries(t, k, s, version[s])

TypeOKInv ==
    /\ \A s \in Watched : version[s] \in Nat /\ owner[s] \in Nat /\ pins[s] \in Nat
    /\ \A k \in Keys : \A s \in Watched :
        /\ occupancy[k][s] \in {"absent", "in_transit", "committed"}
        /\ log_row[k][s] # Zero => k \in Deferred /\ occupancy[k][s] = "in_transit"
    /\ \A t \in DOMAIN tasks : tasks[t].state \in Range(Chain) /\ t < next_task
    /\ \A id \in DOMAIN reads : reads[id].state \in {"unplanned", "planned", "fetched", "failed"}
    /\ Range(queue) \subseteq DOMAIN tasks
    /\ Open \subseteq DOMAIN tasks

----------------------------------------------------------------------------
(* Goals that must be reachable: each is written as an invariant that TLC    *)
(* has to break. A model in which one holds never came near the hard case.   *)

DebugSameStepHitInv == ~(pc = "preserve" /\ Unplanned # {})
\* ... on a block whose former tenant's rows are still there.
DebugSameStepHitRecycledInv ==
    ~(pc = "preserve" /\ \E id \in Unplanned : \E s \in StepSlots :
        (\E k \in Keys : occupancy[k][s] # "absent") /\ \E p \in reads[id].start .. reads[id].end - 1 : SlotAt(reads[id].blocks, p) = s)
\* A claim that completes a planned read first: the copy-aside.
DebugPreserveInv == ~(pc = "preserve" /\ Endangered # {})
\* ... and has to wait for the writer of that row.
DebugPreserveWaitsInv == ~(pc = "preserve" /\ \E id \in Endangered : ~ReadyToFetch(reads[id]))
\* A running request's write is sealed and it opens another.
DebugFlushRunningInv ==
    ~(pc = "append" /\ \E i \in 1 .. Len(batch) :
        /\ DeferredRows(i) # <<>>
        /\ open_write[batch[i].req] = 0
        /\ \E t \in DOMAIN tasks : tasks[t].req = batch[i].req)
\* A plan that outlives its slot's tenant.
DebugLateMaterializeInv ==
    \A id \in FinalReads : reads[id].state = "planned" => \A x \in DOMAIN reads[id].rows :
        reads[id].rows[x].version = version[reads[id].rows[x].slot]
DebugAbortOpenWriteInv == ~(pc = "start" /\ \E r \in reported : open_write[r] # 0)
\* A request resumed onto a slot that its still open write holds rows of, an earlier reader of
\* those rows not having fetched yet.
DebugResumeSameBlockInv ==
    ~(pc = "claim" /\ \E s \in StepSlots : LET r == batch[ComputedBy(s)].req IN
        /\ open_write[r] # 0
        /\ \E i \in DOMAIN tasks[open_write[r]].rows :
            /\ tasks[open_write[r]].rows[i].slot = s
            /\ tasks[open_write[r]].rows[i].row # ComputedRow(s)
            /\ \E id \in FinalReads : reads[id].state = "planned" /\ \E x \in DOMAIN reads[id].rows :
                /\ reads[id].rows[x].kind = "log"
                /\ reads[id].rows[x].row = tasks[open_write[r]].rows[i].row)
DebugLostSlotInv == \A t \in DOMAIN tasks : \A i \in DOMAIN tasks[t].rows : Owns(tasks[t].rows[i])
DebugLargerHitOnResumeInv ==
    \A id \in DOMAIN reads : reads[id].start = 0
DebugHandedAgainInv ==
    ~(pc = "start" /\ \E i \in 1 .. Len(batch) :
        batch[i].kind = "resumed" /\ batch[i].started /\ batch[i].start < handed[batch[i].req])
DebugFatalReadInv == \A id \in DOMAIN reads : reads[id].state # "failed"

----------------------------------------------------------------------------
(* The view: two states that differ only in what no action and no invariant  *)
(* will ever look at again are one. Versions count only by being the slot's  *)
(* current one or not; ids only by their order; a final read only by what is *)
(* still to gather; a task only by the rows that it still owns.              *)
(* A seeded fault may look at more, so those that do keep more.              *)

LooksBack == Mutants \cap {"resolve_deferred_at_fetch", "plan_at_materialize", "hole_reads_buffer",
    "literal_version_check", "old_owner_writes", "commit_lost_slot", "append_to_lost_task",
    "zero_instead_of_absent", "fetch_before_done"} # {}

Counts(t) == LooksBack \/ \E i \in DOMAIN tasks[t].rows : Owns(tasks[t].rows[i])
RowView(row) == <<row.key, row.slot, Owns(row), row.row>>
TaskView(t) ==
    IF ~Counts(t) THEN <<>>
    ELSE IF LooksBack THEN <<tasks[t].state, [i \in DOMAIN tasks[t].rows |-> RowView(tasks[t].rows[i])]>>
    ELSE <<tasks[t].state, {<<row.key, row.slot, row.row>> : row \in {x \in Range(tasks[t].rows) : Owns(x)}}>>
TasksView ==
    LET Waits == SelectSeq(queue, Counts)
    IN <<[i \in DOMAIN Waits |-> TaskView(Waits[i])],
         [r \in Requests |-> IF open_write[r] = 0 THEN <<>> ELSE TaskView(open_write[r])],
         {TaskView(t) : t \in {u \in DOMAIN tasks : Counts(u) /\ u \notin Range(queue) /\ ~IsOpen(u)}}>>

EntryView(k, e) == <<e.kind, e.slot, e.version = version[e.slot], Ready(k, e),
                     IF LooksBack /\ e.task \in DOMAIN tasks THEN TaskView(e.task) ELSE <<>>, e.row>>
Settled(id, x) ==
    /\ ~LooksBack
    /\ reads[id].rows[x].kind # "pool"
    /\ Value(x[1], reads[id].rows[x]) = Due(x[1], reads[id].req, x[2])
ReadView(id) ==
    LET left == IF Final(id) THEN {x \in DOMAIN reads[id].rows : ~Settled(id, x)} ELSE DOMAIN reads[id].rows
    IN IF Final(id)
       THEN <<reads[id].state, {<<x[1], EntryView(x[1], reads[id].rows[x]), Due(x[1], reads[id].req, x[2])>> : x \in left}>>
       ELSE <<reads[id].state, reads[id].req, reads[id].start, [x \in left |-> EntryView(x[1], reads[id].rows[x])]>>
Matters(id) == ~Final(id) \/ reads[id].state = "failed" \/ \E x \in DOMAIN reads[id].rows : ~Settled(id, x)

PoolVisible(k, s) ==
    \/ LooksBack
    \/ occupancy[k][s] = "committed"
    \/ occupancy[k][s] = "in_transit" /\ k \notin Deferred /\ WriterDone(k, s, version[s])
    \/ \E t \in DOMAIN tasks : tasks[t].state = "WRITTEN" /\ Carries(t, k, s, version[s])
    \/ \E id \in DOMAIN reads : \E x \in DOMAIN reads[id].rows :
        /\ x[1] = k
        /\ reads[id].rows[x].kind = "pool"
        /\ reads[id].rows[x].slot = s
        /\ Ready(k, reads[id].rows[x])

\* TLC keeps functions unevaluated until somebody compares them, and cannot write such a value to
\* disk. A variable outside the view would never be compared.
Evaluated ==
    LET outside == <<version, owner, pool, pins, tasks, reads, steps, layout, event>> IN outside = outside

View ==
    <<schedulerVars, batch, reported, pc, emitted, handed, occupancy, log_row,
      [k \in Keys |-> [s \in Watched |-> IF PoolVisible(k, s) THEN pool[k][s] ELSE Zero]],
      TasksView,
      {ReadView(id) : id \in {i \in DOMAIN reads : Matters(i)}},
      SpanOwedUntilEmittedInv, SpansMeetInv, Evaluated>>
=============================================================================
