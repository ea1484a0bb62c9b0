------------------------------ MODULE Failures -------------------------------
(* The chain of a write task, its failure, and who waits for it.             *)
(*                                                                           *)
(* Tasks carry no rows here. The environment is that of VllmEnv, seen from   *)
(* further off still: the engine registers writes, and the engine and the    *)
(* output builder join them and enter the cache at any time.                 *)
(* A failure has two halves: the record is published, then the task becomes  *)
(* FAILED, which wakes whoever waits for it.                                 *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Tasks,      \* 1 .. n: the writes that may be registered, in order
    Threads,    \* who joins and enters
    MaxFailures,
    Narrate,    \* whether `event` is kept
    Deadlines,  \* whether a wait may run out
    Mutants

VARIABLES
    state,      \* [task -> "none", "PENDING", ..., "WRITTEN", "FAILED"]
    queue,
    failing,    \* the task whose failure is being handled, 0 for none
    failures,   \* failures left
    record,     \* the first failed write, 0 for none
    at,         \* [thread -> what it is doing: [call, task]]
    returned,   \* [thread -> how its last call ended: [how, task, late]]
    event

vars == <<state, queue, failing, failures, record, at, returned, event>>

On(mutant) == mutant \in Mutants
Did(thread, e) == event' = IF Narrate THEN [thread |-> thread] @@ e ELSE event

Terminal == {"WRITTEN", "FAILED"}
Registered == {t \in Tasks : state[t] # "none"}
InHand == {t \in Tasks : state[t] \in {"COPYING", "HOST_READY"}}
Failed == {t \in Tasks : state[t] = "FAILED"}
Idle == [call |-> "none", task |-> 0]

Init ==
    /\ state = [t \in Tasks |-> "none"]
    /\ queue = <<>> /\ failing = 0 /\ failures = MaxFailures /\ record = 0
    /\ at = [th \in Threads |-> Idle]
    /\ returned = [th \in Threads |-> [how |-> "none", task |-> 0, late |-> FALSE]]
    /\ event = [thread |-> "engine", action |-> "Init"]

Move(t, from, to) == state[t] = from /\ state' = [state EXCEPT ![t] = to]

----------------------------------------------------------------------------
(* The engine registers a write: a public entry, so it raises after a failure. *)

RegisterWrite ==
    /\ record = 0
    /\ \E t \in Tasks :
        /\ \A u \in Tasks : u < t => state[u] # "none"
        /\ Move(t, "none", "PENDING")
        /\ Did("engine", [action |-> "RegisterWrite", task |-> t])
    /\ UNCHANGED <<queue, failing, failures, record, at, returned>>

----------------------------------------------------------------------------
(* The committer.                                                            *)

Busy == InHand # {} \/ failing # 0

QueueTask(t) ==
    /\ Move(t, "PENDING", "QUEUED")
    /\ queue' = Append(queue, t)
    /\ Did("engine", [action |-> "QueueTask", task |-> t])
    /\ UNCHANGED <<failing, failures, record, at, returned>>

\* The pop and the claim are one critical section.
ClaimCopy ==
    /\ queue # <<>>
    /\ ~Busy \/ On("two_writers")
    /\ On("committer_stops") => Failed = {}
    /\ Move(queue[1], "QUEUED", IF On("skip_chain_step") THEN "HOST_READY" ELSE "COPYING")
    /\ queue' = Tail(queue)
    /\ Did("committer", [action |-> "ClaimCopy", task |-> queue[1]])
    /\ UNCHANGED <<failing, failures, record, at, returned>>

\* The fault: a finish that forces a copy queues again what the committer has claimed.
RequeueTask(t) ==
    /\ On("claimed_task_requeued")
    /\ Move(t, "COPYING", "QUEUED")
    /\ queue' = Append(queue, t)
    /\ Did("engine", [action |-> "RequeueTask", task |-> t])
    /\ UNCHANGED <<failing, failures, record, at, returned>>

FinishCopy(t) ==
    /\ failing # t
    /\ Move(t, "COPYING", "HOST_READY")
    /\ Did("committer", [action |-> "FinishCopy", task |-> t])
    /\ UNCHANGED <<queue, failing, failures, record, at, returned>>

WritePool(t) ==
    /\ failing # t
    /\ Move(t, "HOST_READY", "WRITTEN")
    /\ Did("committer", [action |-> "WritePool", task |-> t])
    /\ UNCHANGED <<queue, failing, failures, record, at, returned>>

\* A copy or a pool write raises, or a task that waits is given up at shutdown.
WriteRaises(t) ==
    /\ failures > 0 /\ failing = 0
    /\ state[t] \notin Terminal \cup {"none"}
    /\ InHand \subseteq {t}
    /\ failing' = t
    /\ failures' = failures - 1
    /\ Did("committer", [action |-> "WriteRaises", task |-> t])
    /\ UNCHANGED <<state, queue, record, at, returned>>

\* The first record stays.
PublishFailure ==
    /\ failing # 0
    /\ On("wake_before_record") => state[failing] = "FAILED"
    /\ record' = IF On("failure_swallowed") THEN record
                 ELSE IF record = 0 \/ On("record_overwritten") THEN failing ELSE record
    /\ failing' = IF state[failing] = "FAILED" THEN 0 ELSE failing
    /\ record = 0 \/ On("wake_before_record") \/ On("record_overwritten")
    /\ record' # record \/ failing' # failing
    /\ Did("committer", [action |-> "PublishFailure", task |-> failing])
    /\ UNCHANGED <<state, queue, failures, at, returned>>

\* FAILED, from any state but WRITTEN; waiters wake.
FailTask ==
    /\ failing # 0
    /\ record # 0 \/ On("wake_before_record") \/ On("failure_swallowed")
    /\ state[failing] # "FAILED"
    /\ state' = [state EXCEPT ![failing] = "FAILED"]
    /\ queue' = SelectSeq(queue, LAMBDA t : t # failing)
    /\ failing' = IF On("wake_before_record") THEN failing ELSE 0
    /\ Did("committer", [action |-> "FailTask", task |-> failing])
    /\ UNCHANGED <<failures, record, at, returned>>

----------------------------------------------------------------------------
(* Threads that wait, and threads that enter.                                *)

\* `late` remembers whether a write had failed, for all to see, when the call began.
Return(th, how, task, late) ==
    /\ at' = [at EXCEPT ![th] = Idle]
    /\ returned' = [returned EXCEPT ![th] = [how |-> how, task |-> task, late |-> late]]

Outcome == IF record = 0 THEN "served" ELSE "raised"

JoinTask(th, t) ==
    /\ at[th] = Idle
    /\ t \in Registered
    /\ record = 0
    /\ at' = [at EXCEPT ![th] = [call |-> "join", task |-> t]]
    /\ Did(th, [action |-> "JoinTask", task |-> t])
    /\ UNCHANGED <<state, queue, failing, failures, record, returned>>

WakeJoiner(th) ==
    /\ at[th].call = "join"
    /\ state[at[th].task] \in Terminal
    /\ Return(th, Outcome, at[th].task, FALSE)
    /\ Did(th, [action |-> "WakeJoiner", task |-> at[th].task])
    /\ UNCHANGED <<state, queue, failing, failures, record>>

\* Its error names the task and its state.
TimeOut(th) ==
    /\ Deadlines
    /\ at[th].call = "join"
    /\ state[at[th].task] \notin Terminal
    /\ Return(th, "timed out", at[th].task, FALSE)
    /\ Did(th, [action |-> "TimeOut", task |-> at[th].task, state |-> state[at[th].task]])
    /\ UNCHANGED <<state, queue, failing, failures, record>>

EnterCache(th) ==
    /\ at[th] = Idle
    /\ Return(th, Outcome, 0, Failed # {})
    /\ Did(th, [action |-> "EnterCache"])
    /\ UNCHANGED <<state, queue, failing, failures, record>>

\* The fault: the next step starts as if nothing had failed.
ForgetFailure ==
    /\ On("failure_forgotten")
    /\ record # 0
    /\ record' = 0
    /\ Did("engine", [action |-> "ForgetFailure"])
    /\ UNCHANGED <<state, queue, failing, failures, at, returned>>

----------------------------------------------------------------------------

Committer == ClaimCopy \/ PublishFailure \/ FailTask
             \/ \E t \in Tasks : FinishCopy(t) \/ WritePool(t)

Next ==
    \/ RegisterWrite \/ ClaimCopy \/ PublishFailure \/ FailTask \/ ForgetFailure
    \/ \E t \in Tasks : QueueTask(t) \/ RequeueTask(t) \/ FinishCopy(t) \/ WritePool(t) \/ WriteRaises(t)
    \/ \E th \in Threads : WakeJoiner(th) \/ TimeOut(th) \/ EnterCache(th)
    \/ \E th \in Threads : \E t \in Tasks : JoinTask(th, t)

Queueing == \E t \in Tasks : QueueTask(t)
Waking == \E th \in Threads : WakeJoiner(th) \/ TimeOut(th)

Spec == Init /\ [][Next]_vars
\* The committer does its part; nobody needs a deadline.
FairSpec == Spec /\ WF_vars(Committer) /\ WF_vars(Queueing) /\ WF_vars(Waking)
\* The committer may hang in a copy for ever.
StuckSpec == Spec /\ WF_vars(Waking)

----------------------------------------------------------------------------
(* The rules.                                                                *)

Successor == [none |-> {"PENDING"}, PENDING |-> {"QUEUED", "FAILED"}, QUEUED |-> {"COPYING", "FAILED"},
              COPYING |-> {"HOST_READY", "FAILED"}, HOST_READY |-> {"WRITTEN", "FAILED"},
              WRITTEN |-> {}, FAILED |-> {}]
\* 7.
StrictChainProp == [][\A t \in Tasks : state'[t] = state[t] \/ state'[t] \in Successor[state[t]]]_vars
\* 8.
OneWriterInv == Cardinality(InHand) <= 1
\* 13. Nobody is served who joined a failed write, or who entered after one; the record stays.
FailureIsLoudAndStickyInv ==
    \A th \in Threads : returned[th].how = "served" =>
        ~returned[th].late /\ returned[th].task \notin Failed
FailureIsLoudAndStickyProp == [][record # 0 => record' = record]_vars
\* Every registered write ends WRITTEN or FAILED.
EveryWriteEndsProp == \A t \in Tasks : (state[t] # "none") ~> (state[t] \in Terminal)
\* 12. ... and if it fails, that is on record.
AbortStillLandsInv == Failed # {} /\ failing = 0 => record # 0
\* Nobody waits for ever.
NobodyWaitsForEverProp == \A th \in Threads : (at[th].call = "join") ~> (at[th].call # "join")

DebugJoinerOfFailedInv == ~(\E th \in Threads : at[th].call = "join" /\ at[th].task \in Failed)
DebugFailedFromEachStateInv == ~(failing # 0 /\ state[failing] = "HOST_READY" /\ queue # <<>>)
DebugWrittenAfterFailureInv == ~(record # 0 /\ \E t \in Tasks : t > record /\ state[t] = "WRITTEN")
DebugTimeOutInv == \A th \in Threads : returned[th].how # "timed out"
=============================================================================
