----------------------------- MODULE PrefixCache -----------------------------
(* The machine: slot versions, write tasks and hit reads, driven by vLLM.    *)
(*                                                                           *)
(* The engine thread walks `pc` through one step at a time:                  *)
(*   schedule   the scheduler builds the batch (VllmEnv)                     *)
(*   start      new_step_starts: finish, start, plan                         *)
(*   budget     save_outputs: the step id is issued, bytes are reserved      *)
(*   unplan     reads whose producer is in this batch are dropped            *)
(*   preserve   planned reads that a claim would destroy are completed       *)
(*   claim, register, append, replan     publish, under the lock             *)
(* The committer and the output builder move at any time outside the lock;   *)
(* copies and the pool, which need no lock, at any time at all.              *)
EXTENDS Reads

CONSTANT Pressure   \* whether the device budget may ever force a seal

cacheVars == <<slotVars, writeVars, readVars>>
vars == <<schedulerVars, batch, layout, reported, pc, event, cacheVars>>

Init ==
    /\ EnvInit
    /\ SlotsInit
    /\ WritesInit
    /\ ReadsInit
    /\ event = [thread |-> "engine", action |-> "Init"]

EngineDid(e) == event' = [thread |-> "engine"] @@ e

----------------------------------------------------------------------------
(* The scheduler's moves leave the cache alone.                              *)

ScheduleRequest(r) == EnvScheduleRequest(r) /\ UNCHANGED cacheVars
PreemptRequest(r) == EnvPreemptRequest(r) /\ UNCHANGED cacheVars
FreeRequest(r) == EnvFreeRequest(r) /\ UNCHANGED cacheVars
WithdrawRequest(r) == EnvWithdrawRequest(r) /\ UNCHANGED cacheVars
LoadBlock(r) == EnvLoadBlock(r) /\ UNCHANGED cacheVars
EndSchedule == EnvEndSchedule /\ UNCHANGED cacheVars

----------------------------------------------------------------------------
(* new_step_starts. Finished ids come before new ones.                       *)

First(ids) == Order[CHOOSE i \in 1 .. Len(Order) :
                        Order[i] \in ids /\ \A j \in 1 .. i - 1 : Order[j] \notin ids]

\* Entries of the batch that still have to be started.
ToStart == {i \in 1 .. Len(batch) : batch[i].kind # "running" /\ ~batch[i].started}

FinishRequest(r) ==
    /\ pc = "start"
    /\ reported # {} /\ r = First(reported)
    /\ On("new_before_finished") => ToStart = {}
    /\ reported' = reported \ {r}
    /\ emitted' = IF On("finish_leaves_bookkeeping") THEN emitted ELSE Drop(emitted, {r})
    /\ LET id == open_write[r]
       IN IF On("drop_aborted_write") /\ id # 0
          THEN /\ tasks' = Drop(tasks, {id})
               /\ open_write' = [open_write EXCEPT ![r] = 0]
               /\ queue' = queue
          ELSE IF id # 0 THEN Seal({id}) ELSE UNCHANGED <<tasks, queue, open_write>>
    /\ write_n' = [write_n EXCEPT ![r] = 0]
    /\ pc' = IF batch = <<>> /\ reported' = {} THEN "schedule" ELSE pc
    /\ EngineDid([action |-> "FinishRequest", req |-> r])
    /\ UNCHANGED <<schedulerVars, batch, layout, slotVars, next_task, reads, step, steps, handed>>

\* The span rule: a request is owed the rows from min(emitted, computed) on, and those below
\* `computed` come from the cache.
OwedFrom(entry) ==
    IF entry.kind = "continued" /\ On("continuation_is_hit") THEN 0
    ELSE IF entry.kind = "resumed" /\ On("resume_gap_not_marked") THEN entry.start
    ELSE IF entry.req \in Live THEN emitted[entry.req] ELSE 0

StartRequest(r) ==
    /\ pc = "start"
    /\ reported = {} \/ On("new_before_finished")
    /\ ToStart # {}
    /\ LET i == CHOOSE i \in ToStart : \A j \in ToStart : i <= j
           entry == batch[i]
           from == OwedFrom(entry)
           id == <<step + 1, r>>
       IN /\ entry.req = r
          /\ batch' = [batch EXCEPT ![i].started = TRUE]
          /\ emitted' = IF r \in Live THEN emitted ELSE emitted @@ (r :> 0)
          /\ handed' = IF entry.kind = "new" THEN [handed EXCEPT ![r] = 0] ELSE handed
          /\ reads' = IF from >= entry.start THEN reads
                      ELSE reads @@ (id :> [req |-> r, step |-> step + 1, start |-> from,
                            end |-> entry.start, blocks |-> table[r], state |-> "unplanned",
                            rows |-> <<>>])
          /\ EngineDid([action |-> "StartRequest", req |-> r, computed |-> entry.start,
                        blocks |-> table[r]])
    /\ UNCHANGED <<schedulerVars, layout, reported, pc, slotVars, writeVars, step, steps>>

Unplanned == {id \in DOMAIN reads : reads[id].state = "unplanned"}

\* Once at step start, once more at publish for the reads that were unplanned in between.
MayPlan(id) ==
    \/ pc = "start" /\ id \in Unplanned
    \/ pc = "replan" /\ id \in Unplanned
    \/ /\ On("plan_at_materialize")
       /\ Quiet
       /\ reads[id].state = "planned"
       /\ \E x \in DOMAIN reads[id].rows : reads[id].rows[x].kind = "hole"

PlanRead ==
  \E id \in DOMAIN reads :
    /\ MayPlan(id)
    /\ LET planned == [reads[id] EXCEPT !.state = "planned", !.rows = Resolution(reads[id])]
       IN /\ reads' = [reads EXCEPT ![id] = planned]
          /\ pins' = IF On("plan_without_pin") THEN pins
                     ELSE [s \in Watched |-> pins[s] - Names1(reads[id], s) + Names1(planned, s)]
          /\ EngineDid([action |-> "PlanRead", read |-> id,
                        kinds |-> [x \in DOMAIN planned.rows |-> planned.rows[x].kind]])
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, pc, version, owner, occupancy, pool, log_row,
                   writeVars, step, steps, emitted, handed>>

----------------------------------------------------------------------------
(* save_outputs.                                                             *)

\* A stage with nothing to do is passed over, so that no state is spent on it.
Immediate == Keys \ Deferred
EmitsAny(keys) == \E k \in keys : \E s \in StepSlots : Emits(k, ComputedRow(s))
Touches(id) == id[1] = step' /\ \E p \in reads[id].start .. reads[id].end - 1 :
                                    SlotAt(reads[id].blocks, p) \in StepSlots
AfterBudget ==
    IF StepSlots = {} THEN "replan"
    ELSE IF ~On("plan_same_step_once") /\ \E id \in DOMAIN reads : Touches(id) THEN "unplan" ELSE "preserve"
AfterRegister == IF EmitsAny(Deferred) THEN "append" ELSE "replan"

\* The id is issued before anything else. Pages are the business of Handover.tla.
ClaimPage ==
    /\ pc = "start"
    /\ reported = {} /\ ToStart = {} /\ Unplanned = {} /\ batch # <<>>
    /\ step' = step + 1
    /\ pc' = IF Pressure /\ EmitsAny(Deferred) THEN "budget" ELSE AfterBudget
    /\ EngineDid([action |-> "ClaimPage", step |-> step'])
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, slotVars, writeVars, reads, steps, emitted, handed>>

\* How bytes are counted is the business of Handover.tla. What pressure does to the rows is seen
\* here: any open write, that of a running request too, may be sealed, and land before the next.
SealWrite ==
  \E t \in Open :
    /\ pc = "budget"
    /\ Seal({t})
    /\ EngineDid([action |-> "SealWrite", task |-> t])
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, pc, slotVars, write_n, next_task, readVars>>

ReserveBudget ==
    /\ pc = "budget"
    /\ step' = step
    /\ pc' = AfterBudget
    /\ EngineDid([action |-> "ReserveBudget", step |-> step])
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, slotVars, writeVars, reads, steps, emitted, handed>>

UnplanReads ==
    /\ pc = "unplan"
    /\ step' = step
    /\ LET Touched == {id \in DOMAIN reads : Touches(id)}
       IN /\ reads' = [id \in DOMAIN reads |-> IF id \notin Touched THEN reads[id]
                        ELSE [reads[id] EXCEPT !.state = "unplanned", !.rows = <<>>]]
          /\ pins' = [x \in Watched |-> pins[x] - Sum(Touched, x)]
    /\ pc' = "preserve"
    /\ EngineDid([action |-> "UnplanReads", step |-> step])
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, version, owner, occupancy, pool, log_row,
                   writeVars, steps, emitted, handed>>

\* Planned reads that name a row which this step's claim would destroy.
Endangered ==
    {id \in DOMAIN reads : \E s \in StepSlots :
        /\ pins[s] > 0
        /\ NamesPool(reads[id], s)
        /\ ~On("no_preserve")
        /\ On("preserve_only_committed") =>
            \E k \in Keys : occupancy[k][s] = "committed"}

PreserveReads ==
    /\ pc = "preserve"
    /\ \A id \in Endangered : ReadyToFetch(reads[id])
    /\ Complete(Endangered)
    /\ pc' = "claim"
    /\ EngineDid([action |-> "PreserveReads", slots |-> StepSlots])
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, version, owner, occupancy, pool, log_row,
                   writeVars, step, steps, emitted, handed>>

ClaimSlots ==
    /\ pc = "claim"
    /\ Claim(step)
    /\ pc' = IF EmitsAny(Immediate) THEN "register" ELSE AfterRegister
    /\ EngineDid([action |-> "ClaimSlots", slots |-> StepSlots,
                  versions |-> [s \in StepSlots |-> version'[s]],
                  emits |-> [k \in Keys |-> {s \in StepSlots : Emits(k, ComputedRow(s))}]])
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, pins, writeVars, readVars>>

\* What this step emits for a key set, as task rows in slot order.
RowsOf(keys, i) ==
    LET at == {<<k, s>> \in keys \X StepSlots : Emits(k, ComputedRow(s)) /\ (i = 0 \/ ComputedBy(s) = i)}
        RECURSIVE List(_)
        List(left) == IF left = {} THEN <<>>
            ELSE LET x == CHOOSE x \in left : \A y \in left : x[2] <= y[2]
                 IN <<[key |-> x[1], slot |-> x[2], version |-> version[x[2]],
                       row |-> ComputedRow(x[2])]>> \o List(left \ {x})
    IN List(at)

\* One immediate task covers the whole batch.
RegisterWrite ==
    /\ pc = "register"
    /\ LET rows == RowsOf(Immediate, 0)
       IN      /\ tasks' = tasks @@ (next_task :> [kind |-> "immediate", req |-> "", step |-> step,
                        n |-> 0, state |-> IF Fine THEN "PENDING" ELSE "QUEUED", rows |-> rows])
               /\ queue' = IF Fine THEN queue ELSE Append(queue, next_task)
               /\ next_task' = next_task + 1
    /\ pc' = AfterRegister
    /\ EngineDid([action |-> "RegisterWrite", step |-> step])
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, slotVars, open_write, write_n, readVars>>

\* One chunk a step holds the deferred rows of all requests; each request's open write views
\* its own, and a request that has none opens one.
DeferredRows(i) ==
    LET rows == RowsOf(Deferred, i)
        t == open_write[batch[i].req]
        Remembered(x) == IF t = 0 THEN {} ELSE {j \in DOMAIN tasks[t].rows : tasks[t].rows[j].slot = x}
    IN IF ~On("append_to_lost_task") THEN rows
       ELSE [j \in DOMAIN rows |-> IF Remembered(rows[j].slot) = {} THEN rows[j]
                ELSE [rows[j] EXCEPT !.version =
                    tasks[t].rows[CHOOSE m \in Remembered(rows[j].slot) : TRUE].version]]

AppendRows ==
    /\ pc = "append"
    /\ LET Appends == {i \in 1 .. Len(batch) : DeferredRows(i) # <<>>}
           Opens == {i \in Appends : open_write[batch[i].req] = 0}
           NewId(i) == next_task + Cardinality({j \in Opens : j < i})
           Entry(r) == CHOOSE i \in Appends : batch[i].req = r
           Reqs == {batch[i].req : i \in Appends}
           Opened == {batch[i].req : i \in Opens}
           Extended == [t \in DOMAIN tasks |->
                IF \E r \in Reqs : open_write[r] = t
                THEN [tasks[t] EXCEPT !.rows = @ \o DeferredRows(Entry(tasks[t].req))] ELSE tasks[t]]
           Fresh == [t \in {NewId(i) : i \in Opens} |->
                LET i == CHOOSE i \in Opens : NewId(i) = t
                IN [kind |-> "deferred", req |-> batch[i].req, step |-> step,
                    n |-> write_n[batch[i].req] + 1, state |-> "PENDING", rows |-> DeferredRows(i)]]
       IN /\ tasks' = Extended @@ Fresh
          /\ open_write' = [r \in Requests |-> IF r \in Opened THEN NewId(Entry(r)) ELSE open_write[r]]
          /\ write_n' = [r \in Requests |-> IF r \in Opened THEN write_n[r] + 1 ELSE write_n[r]]
          /\ next_task' = next_task + Cardinality(Opens)
    /\ log_row' = [k \in Keys |-> [s \in Watched |->
            IF k \in Deferred /\ s \in StepSlots /\ Emits(k, ComputedRow(s))
            THEN ComputedRow(s) ELSE log_row[k][s]]]
    /\ pc' = "replan"
    /\ EngineDid([action |-> "AppendRows", step |-> step])
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, version, owner, occupancy, pool, pins, queue, readVars>>

\* What the step hands over for one request.
Span(entry) ==
    LET id == <<step, entry.req>>
        hit == id \in DOMAIN reads
        Forward == {k \in Keys : \E p \in entry.start .. entry.start + entry.n - 1 :
                        Emits(k, Row(entry.req, p))}
        Cached == {k \in Keys : hit /\ \E x \in DOMAIN reads[id].rows :
                        x[1] = k /\ reads[id].rows[x].kind # "hole"}
    IN [kind |-> entry.kind,
        start |-> IF hit THEN reads[id].start ELSE entry.start,
        hit |-> entry.start,
        end |-> entry.start + entry.n,
        owed |-> handed[entry.req],
        keys |-> Forward \cup (IF On("unemitted_key_dropped") THEN {} ELSE Cached)]

EntryOf(r) == batch[CHOOSE i \in 1 .. Len(batch) : batch[i].req = r]

\* From here on holes are final: one in hidden rows fails the read.
OpenStep ==
    /\ pc = "replan"
    /\ Unplanned = {}
    /\ LET Fails == {id \in DOMAIN reads : id[1] = step /\ HiddenHole(reads[id])
                        /\ ~On("absent_hidden_is_miss")}
       IN /\ reads' = [id \in DOMAIN reads |-> IF id \notin Fails THEN reads[id]
                        ELSE [reads[id] EXCEPT !.state = "failed"]]
          /\ pins' = [x \in Watched |-> pins[x] - Sum(Fails, x)]
    /\ steps' = steps @@ (step :> [r \in {batch[i].req : i \in 1 .. Len(batch)} |-> Span(EntryOf(r))])
    /\ emitted' = [r \in Live |-> IF InBatch(r) THEN EntryOf(r).start + EntryOf(r).n ELSE emitted[r]]
    /\ handed' = [r \in Requests |-> IF InBatch(r) THEN EntryOf(r).start + EntryOf(r).n ELSE handed[r]]
    /\ ForwardDone
    /\ batch' = <<>>
    /\ layout' = <<>>
    /\ pc' = "schedule"
    /\ EngineDid([action |-> "OpenStep", step |-> step])
    /\ UNCHANGED <<status, computed, table, hash, preempts, life, reported,
                   version, owner, occupancy, pool, log_row, writeVars, step>>

----------------------------------------------------------------------------
(* The committer. One thread; it takes the queue in order.                   *)

\* From its claim to its opening a step is one table update: whoever needs the tables waits.
Elsewhere == IF Fine THEN pc \notin {"register", "append", "replan"} ELSE Quiet \/ pc = "preserve"
\* Copies and the pool need no table: they go on beside that update too.
Unlocked == IF Fine THEN TRUE ELSE Elsewhere
Move(t, state) == tasks' = [tasks EXCEPT ![t].state = state]
Did(action, t) == event' = [thread |-> "committer", action |-> action, task |-> t]
CommitterFrame == UNCHANGED <<schedulerVars, batch, layout, reported, pc, version, owner, pins, open_write,
                              write_n, next_task, readVars>>

QueueTask ==
  \E t \in DOMAIN tasks :
    /\ Fine /\ Elsewhere
    /\ tasks[t].state = "PENDING" /\ ~IsOpen(t)
    /\ Move(t, "QUEUED")
    /\ queue' = Append(queue, t)
    /\ Did("QueueTask", t)
    /\ CommitterFrame /\ UNCHANGED <<occupancy, pool, log_row>>

InHand == {t \in DOMAIN tasks : tasks[t].state \in {"COPYING", "HOST_READY"}}

\* The pop and the claim are one critical section.
ClaimCopy ==
    /\ Fine
    /\ queue # <<>>
    /\ InHand = {} \/ On("two_writers")
    /\ Move(queue[1], IF On("skip_chain_step") THEN "HOST_READY" ELSE "COPYING")
    /\ queue' = Tail(queue)
    /\ Did("ClaimCopy", queue[1])
    /\ CommitterFrame /\ UNCHANGED <<occupancy, pool, log_row>>

FinishCopy ==
  \E t \in DOMAIN tasks :
    /\ Fine
    /\ tasks[t].state = "COPYING"
    /\ Move(t, "HOST_READY")
    /\ Did("FinishCopy", t)
    /\ CommitterFrame /\ UNCHANGED <<occupancy, pool, log_row, queue>>

\* Only the rows whose slot still has the version that the task claimed.
WritePool ==
  \E t \in DOMAIN tasks :
    /\ Unlocked
    /\ IF Fine THEN tasks[t].state = "HOST_READY" ELSE queue # <<>> /\ queue[1] = t
    /\ Move(t, "WRITTEN")
    /\ queue' = IF Fine THEN queue ELSE Tail(queue)
    /\ LET rows == tasks[t].rows
           Lands(k, s) == {i \in DOMAIN rows : rows[i].key = k /\ rows[i].slot = s
                              /\ (Owns(rows[i]) \/ On("old_owner_writes"))}
       IN pool' = [k \in Keys |-> [s \in Watched |->
            IF Lands(k, s) = {} THEN pool[k][s]
            ELSE rows[CHOOSE i \in Lands(k, s) : \A j \in Lands(k, s) : j <= i].row]]
    /\ Did("WritePool", t)
    /\ CommitterFrame /\ UNCHANGED <<occupancy, log_row>>

\* In transit becomes committed, for the same rows. The task is forgotten.
CommitTask ==
  \E t \in DOMAIN tasks :
    /\ Elsewhere
    /\ tasks[t].state = "WRITTEN"
    /\ LET rows == tasks[t].rows
           Commits(k, s) ==
              /\ occupancy[k][s] = "in_transit"
              /\ \E i \in DOMAIN rows : rows[i].key = k /\ rows[i].slot = s
                              /\ (Owns(rows[i]) \/ On("commit_lost_slot"))
       IN /\ occupancy' = [k \in Keys |-> [s \in Watched |->
                IF Commits(k, s) THEN "committed" ELSE occupancy[k][s]]]
          /\ log_row' = [k \in Keys |-> [s \in Watched |->
                IF Commits(k, s) THEN Zero ELSE log_row[k][s]]]
    \* A reader that asks the task by slot keeps the task's last row for it.
    /\ reads' = [id \in DOMAIN reads |-> [reads[id] EXCEPT !.rows =
            [x \in DOMAIN reads[id].rows |->
                LET e == reads[id].rows[x]
                IN IF e.kind = "task" /\ e.task = t
                   THEN [e EXCEPT !.kind = "row", !.task = 0, !.row = LastRow(t, x[1], e.slot)] ELSE e]]]
    /\ tasks' = Drop(tasks, {t})
    /\ Did("CommitTask", t)
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, pc, version, owner, pins, pool, queue, open_write,
                   write_n, next_task, step, steps, emitted, handed>>

----------------------------------------------------------------------------
(* The output builder, and whoever fetches early.                            *)

\* A planned read may be gathered at any time, before its step is saved too.
FetchRead ==
  \E id \in DOMAIN reads :
    /\ Elsewhere
    /\ reads[id].state = "planned"
    /\ ReadyToFetch(reads[id])
    /\ Complete({id})
    /\ event' = [thread |-> "builder", action |-> "FetchRead", read |-> id]
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, pc, version, owner, occupancy, pool, log_row,
                   writeVars, step, steps, emitted, handed>>

ReadsOf(s) == {id \in DOMAIN reads : id[1] = s}

\* materialize needs every read of the step gathered (or failed: then it raises); discard does not.
\* A step without reads holds nothing in the tables, so it is taken without them.
TakeStep ==
  \E s \in DOMAIN steps : \E how \in {"materialize", "discard"} :
    /\ IF ReadsOf(s) = {} THEN Unlocked ELSE Elsewhere
    /\ how = "materialize" => \A id \in ReadsOf(s) : reads[id].state \in {"fetched", "failed"}
    /\ steps' = Drop(steps, {s})
    /\ reads' = Drop(reads, ReadsOf(s))
    /\ pins' = [x \in Watched |-> pins[x] - Sum(ReadsOf(s), x)]
    /\ event' = [thread |-> "builder", action |-> "TakeStep", step |-> s, how |-> how]
    /\ UNCHANGED <<schedulerVars, batch, layout, reported, pc, version, owner, occupancy, pool, log_row,
                   writeVars, step, emitted, handed>>

----------------------------------------------------------------------------

Next ==
    \/ \E r \in Requests :
        \/ ScheduleRequest(r) \/ PreemptRequest(r) \/ FreeRequest(r)
        \/ WithdrawRequest(r) \/ LoadBlock(r)
        \/ FinishRequest(r) \/ StartRequest(r)
    \/ EndSchedule
    \/ PlanRead \/ ClaimPage \/ SealWrite \/ ReserveBudget \/ UnplanReads \/ PreserveReads \/ ClaimSlots
    \/ RegisterWrite \/ AppendRows \/ OpenStep
    \/ QueueTask \/ ClaimCopy \/ FinishCopy \/ WritePool \/ CommitTask
    \/ FetchRead \/ TakeStep

Spec == Init /\ [][Next]_vars
=============================================================================
