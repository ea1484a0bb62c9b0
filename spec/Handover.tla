------------------------------ MODULE Handover -------------------------------
(* Pages, bytes and step ids: what a step holds on to, and until when.       *)
(*                                                                           *)
(* Rows have no values here. The environment is that of VllmEnv, seen from   *)
(* further off: a step computes some rows of some running requests, and a    *)
(* request may finish or be aborted between any two steps. Each request of a *)
(* step has one byte of deferred rows in it.                                 *)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANTS
    Requests,
    MaxSteps,   \* steps in one behaviour
    Pages,      \* the staging pages
    Budget,     \* device bytes that clones may take
    Narrate,    \* whether `event` is kept; without it there are fewer states, and no story
    Deadlines,  \* whether a wait of the engine thread may run out
    Mutants

VARIABLES
    running,    \* requests that may be in a step
    pc,         \* the engine thread: "idle", "page", "budget", "save", "open"
    batch,      \* the requests of the step being saved
    id,         \* its id
    page,       \* its page, or none
    step,       \* the last id issued
    steps,      \* [step id -> page]: opened and not yet taken
    building,   \* [step id -> page]: taken, and its builder not yet done
    pages,      \* [page -> holders]
    content,    \* [page -> the step whose rows are in it]
    tasks,      \* [task id -> [kind, req, step, page, state]]
    next_task,
    open_write, \* [request -> task id, 0 for none]
    log,        \* [step id -> [bytes, holders]]: the step's chunk of deferred rows
    reads,      \* [step id -> step id]: a planned read of that step, and the chunk it names
    charged,
    reserved,
    opened,     \* [step id -> times opened]: ghosts, for StepConsumedOnce
    consumed,   \* [step id -> times materialized or discarded]
    event

vars == <<running, pc, batch, id, page, step, steps, building, pages, content, tasks, next_task,
          open_write, log, reads, charged, reserved, opened, consumed, event>>

On(mutant) == mutant \in Mutants
Drop(f, ids) == [x \in DOMAIN f \ ids |-> f[x]]
Did(thread, e) == event' = IF Narrate THEN [thread |-> thread] @@ e ELSE event
None == 0

Init ==
    /\ running = Requests
    /\ pc = "idle" /\ batch = {} /\ id = 0 /\ page = None
    /\ step = 0 /\ steps = <<>> /\ building = <<>>
    /\ pages = [p \in Pages |-> {}]
    /\ content = [p \in Pages |-> 0]
    /\ tasks = <<>> /\ next_task = 1
    /\ open_write = [r \in Requests |-> 0]
    /\ log = <<>> /\ reads = <<>> /\ charged = 0 /\ reserved = 0
    /\ opened = [s \in 1 .. MaxSteps |-> 0]
    /\ consumed = [s \in 1 .. MaxSteps |-> 0]
    /\ event = [thread |-> "engine", action |-> "Init"]

----------------------------------------------------------------------------
(* Holding and letting go.                                                   *)

LetGoPages(holder, held) == [p \in Pages |-> held[p] \ {holder}]

RECURSIVE Bytes(_)
Bytes(chunks) == IF chunks = {} THEN 0
                 ELSE LET c == CHOOSE c \in chunks : TRUE IN log[c].bytes + Bytes(chunks \ {c})

\* `holder` needs no chunk any more. A chunk that nobody holds is gone, and its charge with it.
LetGoChunks(holder) ==
    LET Held == {c \in DOMAIN log : holder \in log[c].holders}
        Gone == {c \in Held : log[c].holders = {holder}}
    IN /\ log' = [c \in DOMAIN log \ Gone |-> [log[c] EXCEPT !.holders = @ \ {holder}]]
       /\ charged' = charged - Bytes(IF On("uncharge_per_task") THEN Held ELSE Gone)

----------------------------------------------------------------------------
(* The engine thread.                                                        *)

\* The environment: which requests the step computes, and whether it reads a chunk of the log.
BeginStep ==
    /\ pc = "idle"
    /\ step < MaxSteps
    /\ \E b \in SUBSET running \ {{}} : \E hit \in {0} \cup DOMAIN log :
        /\ batch' = b
        /\ reads' = IF hit = 0 THEN reads ELSE reads @@ ((step + 1) :> hit)
        /\ log' = IF hit = 0 \/ On("chunk_freed_under_reader") THEN log
                  ELSE [log EXCEPT ![hit].holders = @ \cup {<<"read", step + 1>>}]
        /\ Did("engine", [action |-> "BeginStep", batch |-> b, hit |-> hit])
    /\ pc' = "page"
    /\ UNCHANGED <<running, id, page, step, steps, building, pages, content, tasks, next_task,
                   open_write, charged, reserved, opened, consumed>>

\* Finished or aborted: its open write takes no more rows.
FinishRequest(r) ==
    /\ pc = "idle"
    /\ r \in running
    /\ running' = running \ {r}
    /\ open_write' = [open_write EXCEPT ![r] = 0]
    /\ Did("engine", [action |-> "FinishRequest", req |-> r])
    /\ UNCHANGED <<pc, batch, id, page, step, steps, building, pages, content, tasks, next_task, log,
                   reads, charged, reserved, opened, consumed>>

Unconsumed == DOMAIN steps
NextId == IF On("reuse_step_id") /\ Unconsumed # {} THEN CHOOSE s \in Unconsumed : TRUE ELSE step + 1

ClaimPage ==
    /\ pc = "page"
    /\ \E p \in Pages :
        /\ pages[p] = {}
        /\ \A q \in Pages : q < p => pages[q] # {}
        /\ id' = NextId
        /\ step' = step + 1
        /\ page' = p
        /\ pages' = [pages EXCEPT ![p] = {<<"step", NextId>>}]
        /\ content' = [content EXCEPT ![p] = NextId]
    /\ pc' = "budget"
    /\ Did("engine", [action |-> "ClaimPage", step |-> NextId])
    /\ UNCHANGED <<running, batch, steps, building, tasks, next_task, open_write, log, reads, charged,
                   reserved, opened, consumed>>

Wanted == Cardinality(batch)
\* A chunk larger than the whole budget is not deferred: its rows join the immediate write.
Defers == Wanted <= Budget \/ On("oversized_chunk_deferred")
Fits == charged + Wanted <= Budget \/ On("budget_not_enforced")

ReserveBudget ==
    /\ pc = "budget"
    /\ Defers => Fits
    /\ reserved' = IF Defers THEN Wanted ELSE 0
    /\ charged' = charged + reserved'
    /\ pc' = "save"
    /\ Did("engine", [action |-> "ReserveBudget", bytes |-> reserved'])
    /\ UNCHANGED <<running, batch, id, page, step, steps, building, pages, content, tasks, next_task,
                   open_write, log, reads, opened, consumed>>

\* Under pressure: seal what views the oldest chunk, that of a running request too.
SealWrite ==
    /\ pc = "budget" /\ Defers /\ ~Fits
    /\ \E r \in Requests :
        /\ open_write[r] # 0
        /\ ~On("running_request_keeps_write") \/ r \notin running
        /\ \A q \in Requests : open_write[q] # 0 => open_write[r] <= open_write[q]
        /\ open_write' = [open_write EXCEPT ![r] = 0]
        /\ Did("engine", [action |-> "SealWrite", req |-> r])
    /\ UNCHANGED <<running, pc, batch, id, page, step, steps, building, pages, content, tasks, next_task,
                   log, reads, charged, reserved, opened, consumed>>

\* An error between the reservation and the claim: page and bytes are given back.
CancelStep ==
    /\ pc = "save"
    /\ pages' = LetGoPages(<<"step", id>>, pages)
    /\ charged' = IF On("reservation_leaks") THEN charged ELSE charged - reserved
    /\ reserved' = 0
    /\ pc' = "idle" /\ batch' = {} /\ id' = 0 /\ page' = None
    /\ Did("engine", [action |-> "CancelStep", step |-> id])
    /\ UNCHANGED <<running, step, steps, building, content, tasks, next_task, open_write, log, reads,
                   opened, consumed>>

\* The engine thread waited too long for a page or for bytes: the save raises.
TimeOut ==
    /\ Deadlines
    /\ \/ pc = "page" /\ \A p \in Pages : pages[p] # {}
       \/ pc = "budget" /\ Defers /\ ~Fits
    /\ pages' = IF pc = "budget" THEN LetGoPages(<<"step", id>>, pages) ELSE pages
    /\ pc' = "idle" /\ batch' = {} /\ id' = 0 /\ page' = None
    /\ step' = IF pc = "page" THEN step + 1 ELSE step
    /\ Did("engine", [action |-> "TimeOut", at |-> pc])
    /\ UNCHANGED <<running, steps, building, content, tasks, next_task, open_write, log, reads, charged,
                   reserved, opened, consumed>>

\* The immediate write holds the page; each request's open write holds the chunk.
Publish ==
    /\ pc = "save"
    /\ LET Opens == IF reserved = 0 THEN {} ELSE {r \in batch : open_write[r] = 0}
           Number(r) == next_task + 1 + Cardinality({q \in Opens : q < r})
           Views == IF reserved = 0 THEN {} ELSE batch
           Task(r) == IF r \in Opens THEN Number(r) ELSE open_write[r]
       IN /\ tasks' = tasks @@ (next_task :> [kind |-> "immediate", step |-> id, page |-> page])
                        @@ [t \in {Number(r) : r \in Opens} |-> [kind |-> "deferred", step |-> id, page |-> None]]
          /\ open_write' = [r \in Requests |-> IF r \in Opens THEN Number(r) ELSE open_write[r]]
          /\ log' = IF reserved = 0 THEN log
                    ELSE log @@ (step :> [bytes |-> reserved, holders |-> {<<"write", Task(r)>> : r \in Views}])
          /\ pages' = [pages EXCEPT ![page] = @ \cup {<<"write", next_task>>}]
          /\ next_task' = next_task + 1 + Cardinality(Opens)
    /\ reserved' = 0
    /\ pc' = "open"
    /\ Did("engine", [action |-> "RegisterWrite", step |-> id])
    /\ UNCHANGED <<running, batch, id, page, step, steps, building, content, reads, charged, opened, consumed>>

OpenStep ==
    /\ pc = "open"
    /\ steps' = (id :> page) @@ steps
    /\ opened' = [opened EXCEPT ![id] = @ + 1]
    /\ pc' = "idle" /\ batch' = {} /\ id' = 0 /\ page' = None
    /\ Did("engine", [action |-> "OpenStep", step |-> id])
    /\ UNCHANGED <<running, step, building, pages, content, tasks, next_task, open_write, log, reads,
                   charged, reserved, consumed>>

----------------------------------------------------------------------------
(* The committer, in order of registration among what is sealed.             *)

Sealed == {t \in DOMAIN tasks : \A r \in Requests : open_write[r] # t}
PageOf(t) == tasks[t].page
Taken == IF On("sealed_write_forgotten") THEN {t \in Sealed : tasks[t].kind = "immediate"} ELSE Sealed

WriteTask ==
    /\ Taken # {}
    /\ LET t == CHOOSE t \in Taken : \A u \in Taken : t <= u
       IN /\ tasks' = Drop(tasks, {t})
          /\ pages' = IF On("page_reused_before_taken") /\ PageOf(t) # None
                      THEN [pages EXCEPT ![PageOf(t)] = {}]
                      ELSE LetGoPages(<<"write", t>>, pages)
          /\ LetGoChunks(<<"write", t>>)
          /\ Did("committer", [action |-> "CommitTask", task |-> t])
    /\ UNCHANGED <<running, pc, batch, id, page, step, steps, building, content, next_task, open_write,
                   reads, reserved, opened, consumed>>

----------------------------------------------------------------------------
(* The output builder.                                                       *)

TakeStep ==
  \E s \in DOMAIN steps :
    /\ steps' = IF On("step_consumed_twice") /\ consumed[s] = 0 THEN steps ELSE Drop(steps, {s})
    /\ consumed' = [consumed EXCEPT ![s] = @ + 1]
    /\ \E how \in {"materialize", "discard"} :
        /\ building' = IF On("discard_keeps_page") /\ how = "discard" THEN building
                       ELSE (s :> steps[s]) @@ building
        /\ Did("builder", [action |-> "TakeStep", step |-> s, how |-> how])
    /\ UNCHANGED <<running, pc, batch, id, page, step, pages, content, tasks, next_task, open_write, log,
                   reads, charged, reserved, opened>>

\* A call with a wrong request is refused and consumes nothing.
RefuseTake ==
  \E s \in DOMAIN steps :
    /\ On("refused_call_consumes")
    /\ steps' = Drop(steps, {s})
    /\ Did("builder", [action |-> "RefuseTake", step |-> s])
    /\ UNCHANGED <<running, pc, batch, id, page, step, building, pages, content, tasks, next_task,
                   open_write, log, reads, charged, reserved, opened, consumed>>

FetchRead ==
  \E s \in DOMAIN reads :
    /\ reads' = Drop(reads, {s})
    /\ IF On("read_keeps_chunk") THEN UNCHANGED <<log, charged>> ELSE LetGoChunks(<<"read", s>>)
    /\ Did("builder", [action |-> "FetchRead", read |-> s])
    /\ UNCHANGED <<running, pc, batch, id, page, step, steps, building, pages, content, tasks, next_task,
                   open_write, reserved, opened, consumed>>

\* Built: the page is let go, but a write that views it still holds it.
ReleaseStep ==
  \E s \in DOMAIN building :
    /\ s \notin DOMAIN reads
    /\ building' = Drop(building, {s})
    /\ pages' = IF On("page_freed_at_materialize") THEN [pages EXCEPT ![building[s]] = {}]
                ELSE LetGoPages(<<"step", s>>, pages)
    /\ Did("builder", [action |-> "ReleaseStep", step |-> s])
    /\ UNCHANGED <<running, pc, batch, id, page, step, steps, content, tasks, next_task, open_write, log,
                   reads, charged, reserved, opened, consumed>>

----------------------------------------------------------------------------

Next ==
    \/ \E r \in Requests : FinishRequest(r)
    \/ BeginStep \/ ClaimPage \/ ReserveBudget \/ SealWrite \/ CancelStep \/ TimeOut \/ Publish \/ OpenStep
    \/ WriteTask
    \/ TakeStep \/ RefuseTake \/ FetchRead \/ ReleaseStep

EngineMoves == ClaimPage \/ ReserveBudget \/ SealWrite \/ TimeOut \/ Publish \/ OpenStep
CommitterMoves == WriteTask
BuilderMoves == TakeStep \/ FetchRead \/ ReleaseStep

Spec == Init /\ [][Next]_vars

\* Everybody does his part; no wait has a deadline.
FairSpec == Spec /\ WF_vars(EngineMoves) /\ WF_vars(CommitterMoves) /\ WF_vars(TakeStep)
                 /\ WF_vars(FetchRead) /\ WF_vars(ReleaseStep)

\* The builder may stop for ever, and so may the committer: then the deadlines have to do.
EngineFairSpec == Spec /\ WF_vars(EngineMoves)

----------------------------------------------------------------------------
(* The rules.                                                                *)

\* 9. Each step id is opened once, and materialized or discarded exactly once.
StepConsumedOnceInv ==
    \A s \in 1 .. MaxSteps :
        /\ opened[s] <= 1
        /\ consumed[s] <= opened[s]
        /\ opened[s] = 1 /\ s \notin DOMAIN steps => consumed[s] = 1

\* 10. Whoever reads a page finds in it the rows of his own step.
PageHeldWhileReadInv ==
    /\ \A s \in DOMAIN steps : content[steps[s]] = s
    /\ \A s \in DOMAIN building : content[building[s]] = s
    /\ \A t \in DOMAIN tasks : tasks[t].kind = "immediate" => content[tasks[t].page] = tasks[t].step

\* 11. Charged is what is reserved and what is held, neither less nor more, and it fits.
BudgetChargedOnceInv ==
    /\ charged = reserved + Bytes(DOMAIN log)
    /\ charged >= 0 /\ charged <= Budget
    /\ pc \in {"idle", "page"} => reserved = 0
    /\ \A c \in DOMAIN log : log[c].holders # {}
\* ... and a chunk outlives its holders by nothing: each of them still exists.
HoldersExistInv ==
    \A c \in DOMAIN log : \A h \in log[c].holders :
        IF h[1] = "read" THEN h[2] \in DOMAIN reads ELSE h[2] \in DOMAIN tasks

\* 4. A planned read finds its chunk.
PlannedReadNamesRowsInv == \A s \in DOMAIN reads : reads[s] \in DOMAIN log

\* A blocked save proceeds, or fails.
Blocked == pc \in {"page", "budget"}
SaveProceedsProp == Blocked ~> ~Blocked

\* 12. Whatever is sealed lands.
WritesLandProp == \A t \in 1 .. MaxSteps * (1 + Cardinality(Requests)) : (t \in Sealed) ~> (t \notin DOMAIN tasks)

DebugFullPoolInv == ~(pc = "page" /\ \A p \in Pages : pages[p] # {})
DebugFlushRunningInv == ~(event.action = "SealWrite" /\ event.req \in running)
DebugOversizedInv == ~(pc = "budget" /\ ~Defers)
DebugReadOutlivesWriteInv ==
    ~(\E c \in DOMAIN log : log[c].holders # {} /\ \A h \in log[c].holders : h[1] = "read")
DebugTimeOutInv == event.action # "TimeOut"
=============================================================================
