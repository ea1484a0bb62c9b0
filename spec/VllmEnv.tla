------------------------------- MODULE VllmEnv -------------------------------
(* What vLLM's scheduler and KV-cache manager do, as far as the cache of     *)
(* per-token outputs can see it. Nothing in this module knows the cache.     *)
(*                                                                           *)
(*  - A block is hashed when the tokens that fill it are *scheduled*, so a   *)
(*    later request of the same step may already hit it.                     *)
(*  - A finished or aborted request gives its blocks back at once; its id is *)
(*    reported in this step or a later one, and the blocks may be handed out *)
(*    before that. Their hashes stay: the blocks can be hit until reused.    *)
(*  - A preempted request starts over at 0 and comes back with whatever hit  *)
(*    is there: to other blocks, or to its own. It knows one token more than *)
(*    it computed, so the hit may cover everything that it had computed.     *)
(*  - Any free block may be chosen. That contains vLLM's LRU order.          *)
(*                                                                           *)
(* A token position p of request r has the row <<t0, ..., tp>>: its content  *)
(* prefix. A model is a function of content, so what is due at a position    *)
(* needs no state of its own.                                                *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Order,      \* the request ids, as a sequence
    Blocks,     \* the block numbers, 0 .. n-1
    BlockSize,
    Text,       \* [request -> sequence of tokens]: prompt, then output
    PromptLen,  \* [request -> Nat]
    MaxChunk,   \* most tokens of one request in one step
    MaxBatch,   \* most requests in one step
    MaxPreempt, \* preemptions in one behaviour
    MaxLives,   \* how often one request id may be used
    Watched,    \* the slots that the model follows in the cache: all, or a few
    Env,        \* switches: "streaming"; "withdraw", "unbacked" (engines that the gate refuses);
                \* "whole" (all tokens of a step are alike, so that a step emits a key whole)
    Mutants     \* seeded faults, by name; empty in the real machine

VARIABLES
    status,     \* [request -> "waiting", "running", "preempted", "freed", "gone"]
    known,      \* [request -> tokens known: the prompt and what was sampled]
    computed,   \* [request -> tokens computed or being computed]
    table,      \* [request -> sequence of blocks]
    hash,       \* [block -> content prefix that it is published under, or <<>>]
    batch,      \* the requests of the step being made, in order
    layout,     \* [slot that the step computes -> [entry, row]]; made once, when scheduling ends
    reported,   \* ids that this step reports as finished, not yet handled
    preempts,   \* preemptions left
    life,       \* [request -> times admitted as new]
    pc,         \* where the engine thread is
    event       \* the last action, with thread and arguments; never read by Next

schedulerVars == <<status, known, computed, table, hash, preempts, life>>

On(mutant) == mutant \in Mutants
Requests == {Order[i] : i \in 1 .. Len(Order)}
Min(a, b) == IF a < b THEN a ELSE b
Range(f) == {f[x] : x \in DOMAIN f}
Ceil(n) == (n + BlockSize - 1) \div BlockSize
Prefix(r, n) == SubSeq(Text[r], 1, n)
Row(r, p) == Prefix(r, p + 1)
SlotAt(blocks, p) == blocks[p \div BlockSize + 1] * BlockSize + (p % BlockSize)

InUse == UNION {Range(table[r]) : r \in Requests}
Free == Blocks \ InUse

EnvInit ==
    /\ status = [r \in Requests |-> "waiting"]
    /\ known = [r \in Requests |-> PromptLen[r]]
    /\ computed = [r \in Requests |-> 0]
    /\ table = [r \in Requests |-> <<>>]
    /\ hash = [b \in Blocks |-> <<>>]
    /\ batch = <<>>
    /\ layout = <<>>
    /\ reported = {}
    /\ preempts = MaxPreempt
    /\ life = [r \in Requests |-> 0]
    /\ pc = "schedule"

----------------------------------------------------------------------------
(* Prefix matching.                                                         *)

Hits(r, i) == {b \in Blocks : hash[b] = Prefix(r, i * BlockSize)}

\* vLLM never lets a hit cover the last known token.
RECURSIVE LongestHitFrom(_, _, _)
LongestHitFrom(r, limit, h) ==
    IF (h + 1) * BlockSize <= limit /\ Hits(r, h + 1) # {}
    THEN LongestHitFrom(r, limit, h + 1) ELSE h
LongestHit(r, limit) == LongestHitFrom(r, limit, 0)

----------------------------------------------------------------------------
(* Placing a request into the step: allocate, publish the hashes.           *)

\* The tokens in the step so far.
StepTokens ==
    UNION {Range(SubSeq(Text[e.req], e.start + 1, e.start + e.n)) : e \in Range(batch)}

Place(r, kind, start, n, kept, new) ==
    LET blocks == kept \o new
        Full(b) == {i \in 1 .. (start + n) \div BlockSize : blocks[i] = b}
    IN /\ "whole" \in Env => Cardinality(StepTokens \cup Range(SubSeq(Text[r], start + 1, start + n))) = 1
       /\ table' = [table EXCEPT ![r] = blocks]
       /\ hash' = [b \in Blocks |->
            IF Full(b) # {} THEN Prefix(r, (CHOOSE i \in Full(b) : TRUE) * BlockSize)
            ELSE IF b \in Range(new) THEN <<>> ELSE hash[b]]
       /\ computed' = [computed EXCEPT ![r] = start + n]
       /\ status' = [status EXCEPT ![r] = "running"]
       /\ batch' = Append(batch, [req |-> r, kind |-> kind, start |-> start, n |-> n,
                                    started |-> FALSE])
       /\ event' = [thread |-> "scheduler", action |-> "ScheduleRequest", req |-> r,
                    kind |-> kind, computed |-> start, n |-> n, blocks |-> blocks]

\* Blocks that nobody ever used are interchangeable: take the lowest of them only.
Pick(avail, Used(_)) ==
    {b \in avail : Used(b) \/ \A c \in avail : Used(c) \/ b <= c}

\* Sequences of `need` different available blocks.
Allocations(need, avail) ==
    {s \in [1 .. need -> avail] : \A i, j \in 1 .. need : s[i] = s[j] => i = j}

PlaceWithRoom(r, kind, start, limit, kept) ==
    \E n \in 1 .. Min(MaxChunk, limit - start) :
        \E new \in Allocations(Ceil(start + n) - Len(kept), Free \ Range(kept)) :
            Place(r, kind, start, n, kept, new)

InBatch(r) == \E i \in 1 .. Len(batch) : batch[i].req = r

Schedulable(r) == pc = "schedule" /\ ~InBatch(r) /\ Len(batch) < MaxBatch

\* A new request, or a preempted one that comes back.
Admit(r, kind, limit) ==
    LET h == LongestHit(r, limit - 1)
    IN \E kept \in [1 .. h -> Blocks] :
        /\ \A i \in 1 .. h : kept[i] \in Hits(r, i)
        /\ PlaceWithRoom(r, kind, h * BlockSize, limit, kept)

ScheduleNew(r) ==
    /\ Schedulable(r)
    /\ life[r] < MaxLives
    /\ \/ status[r] = "waiting" /\ reported' = reported
       \* The id of a request that is finished but not yet reported may be used again at
       \* once: then one scheduler output holds it both as finished and as new.
       \/ status[r] = "freed" /\ reported' = reported \cup {r}
       \/ status[r] = "gone" /\ reported' = reported
    /\ Admit(r, "new", PromptLen[r])
    /\ known' = [known EXCEPT ![r] = PromptLen[r]]
    /\ life' = [life EXCEPT ![r] = @ + 1]
    /\ UNCHANGED <<preempts, pc, layout>>

ScheduleResumed(r) ==
    /\ Schedulable(r)
    /\ status[r] = "preempted"
    /\ Admit(r, "resumed", known[r])
    /\ UNCHANGED <<known, life, reported, preempts, pc, layout>>

\* A running request takes its next tokens. While streaming, a continuation chunk makes the
\* scheduler name it as new, with what it computed itself as `computed`.
ScheduleRunning(r) ==
    /\ Schedulable(r)
    /\ status[r] = "running"
    /\ computed[r] < known[r]
    /\ \E kind \in {"running"} \cup (IF "streaming" \in Env THEN {"continued"} ELSE {}) :
        PlaceWithRoom(r, kind, computed[r], known[r], table[r])
    /\ UNCHANGED <<known, life, reported, preempts, pc, layout>>

EnvScheduleRequest(r) == ScheduleNew(r) \/ ScheduleResumed(r) \/ ScheduleRunning(r)

----------------------------------------------------------------------------
(* Between steps: preemption, finish, abort.                                *)

Quiet == pc = "schedule" /\ batch = <<>>

EnvPreemptRequest(r) ==
    /\ Quiet
    /\ status[r] = "running"
    /\ preempts > 0
    /\ preempts' = preempts - 1
    /\ status' = [status EXCEPT ![r] = "preempted"]
    /\ computed' = [computed EXCEPT ![r] = 0]
    /\ table' = [table EXCEPT ![r] = <<>>]
    /\ event' = [thread |-> "scheduler", action |-> "PreemptRequest", req |-> r]
    /\ UNCHANGED <<known, hash, batch, layout, reported, life, pc>>

\* Finished or aborted, which the cache cannot tell apart. A waiting request was never seen.
EnvFreeRequest(r) ==
    /\ Quiet
    /\ status[r] \in {"running", "preempted", "waiting"}
    /\ status' = [status EXCEPT ![r] = "freed"]
    /\ known' = [known EXCEPT ![r] = PromptLen[r]]
    /\ computed' = [computed EXCEPT ![r] = 0]
    /\ table' = [table EXCEPT ![r] = <<>>]
    /\ event' = [thread |-> "scheduler", action |-> "FreeRequest", req |-> r]
    /\ UNCHANGED <<hash, batch, layout, reported, preempts, life, pc>>

Freed == {r \in Requests : status[r] = "freed"}

\* Where each token of the step goes, and what it will be.
Computing(i) == batch[i].start .. batch[i].start + batch[i].n - 1
Layout ==
    LET At(i, p) == SlotAt(table[batch[i].req], p)
        Places == {<<i, p>> \in UNION {{i} \X Computing(i) : i \in 1 .. Len(batch)} :
                    At(i, p) \in Watched}
    IN [s \in {At(x[1], x[2]) : x \in Places} |->
            LET x == CHOOSE x \in Places : At(x[1], x[2]) = s
            IN [entry |-> x[1], row |-> Row(batch[x[1]].req, x[2])]]

EnvEndSchedule ==
    /\ pc = "schedule"
    /\ \E late \in BOOLEAN :
        LET told == reported \cup (IF late THEN {} ELSE Freed)
        IN /\ late => Freed # {}
           /\ batch # <<>> \/ told # {}
           /\ reported' = told
           /\ status' = [r \in Requests |-> IF status[r] = "freed" /\ r \in told
                                            THEN "gone" ELSE status[r]]
           /\ event' = [thread |-> "scheduler", action |-> "EndSchedule", reported |-> told]
    /\ layout' = Layout
    /\ pc' = "start"
    /\ UNCHANGED <<known, computed, table, hash, batch, preempts, life>>

\* After the forward: a request whose last known token was computed has sampled one more.
ForwardDone ==
    known' = [r \in Requests |->
        IF InBatch(r) /\ computed[r] = known[r] /\ known[r] < Len(Text[r])
        THEN known[r] + 1 ELSE known[r]]

----------------------------------------------------------------------------
(* Two things that an engine must not do to this cache. Off in every model   *)
(* but the ones that show why the gate refuses them.                         *)

\* Priority scheduling may take back a request already placed; its hashes stay.
EnvWithdrawRequest(r) ==
    /\ "withdraw" \in Env
    /\ pc = "schedule"
    /\ batch # <<>> /\ batch[Len(batch)].req = r
    /\ batch' = SubSeq(batch, 1, Len(batch) - 1)
    /\ status' = [status EXCEPT ![r] = "preempted"]
    /\ computed' = [computed EXCEPT ![r] = 0]
    /\ table' = [table EXCEPT ![r] = <<>>]
    /\ event' = [thread |-> "scheduler", action |-> "WithdrawRequest", req |-> r]
    /\ UNCHANGED <<known, hash, layout, reported, preempts, life, pc>>

\* KV that came from elsewhere: a block is published with no forward behind it.
EnvLoadBlock(r) ==
    /\ "unbacked" \in Env
    /\ Quiet
    /\ status[r] = "waiting"
    /\ LongestHit(r, PromptLen[r] - 1) = 0
    /\ BlockSize <= PromptLen[r]
    /\ \E b \in Free :
        /\ hash' = [hash EXCEPT ![b] = Prefix(r, BlockSize)]
        /\ event' = [thread |-> "scheduler", action |-> "LoadBlock", req |-> r, block |-> b]
    /\ UNCHANGED <<status, known, computed, table, batch, layout, reported, preempts, life, pc>>
=============================================================================
