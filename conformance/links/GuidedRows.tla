------------------------------ MODULE GuidedRows ------------------------------
(* Small graphs of several steps, for the replay on the reference model: the *)
(* scheduler is led along one story, and committer and builder move freely.  *)
EXTENDS Rules

Order3 == <<"a", "b", "c">>
Text3 == "a" :> <<0>> @@ "b" :> <<0, 2>> @@ "c" :> <<2>>
Prompt3 == "a" :> 1 @@ "b" :> 2 @@ "c" :> 1
Order2 == <<"a", "b">>
Text2 == "a" :> <<0>> @@ "b" :> <<0, 2>>
Prompt2 == "a" :> 1 @@ "b" :> 2
Order1 == <<"a">>
Text1 == "a" :> <<0, 1, 2>>
Prompt1 == "a" :> 1
Whole == "codes" :> {0, 1, 2}

Told == pc = "start" => Freed = {}
Over(n) == step = n /\ pc = "schedule"

\* a fills a block, b hits it, both finish, c takes a block over while b's read may be unfetched.
Evict ==
    /\ pc \in {"schedule", "start"} /\ batch # <<>> => step < 3 /\ batch[1].req = Order[step + 1]
    /\ \A r \in Requests : status[r] \in {"freed", "gone"} => r # "c" /\ step >= 2
    /\ status["b"] \in {"freed", "gone"} => status["a"] \in {"freed", "gone"}
    /\ Told
    /\ pc = "schedule" /\ batch # <<>> => Open = DOMAIN tasks
    /\ step >= 2 => 1 \notin DOMAIN steps
    /\ Over(3) => event.action = "OpenStep"
\* a is preempted with its write open and comes back, to the same blocks or to others.
Resume ==
    /\ step <= 3
    /\ Over(3) => batch = <<>>
    /\ status["a"] \notin {"freed", "gone"}
\* Whatever may run later runs at once, as in the eager cache: a sealed write goes through its chain
\* before anything else happens; reads are fetched by a claim, or for a handover.
EagerOrder ==
    /\ DOMAIN tasks # Open => \/ pc \in {"register", "append", "replan"}
                              \/ event.thread = "committer"
                              \/ event.action \in {"OpenStep", "FinishRequest", "SealWrite"}
    /\ event.action = "FetchRead" => pc = "preserve" \/ (Quiet /\ event.read[1] \in DOMAIN steps)
\* Two requests, one may be preempted; a step may stay unconsumed while the next one is made.
Eager ==
    /\ EagerOrder
    /\ Told
    /\ ~Quiet => Cardinality(DOMAIN steps) <= 1
    /\ step <= 2
    /\ \A r \in Requests : status[r] \in {"freed", "gone"} => life[r] > 0
    /\ Over(2) => event.thread \in {"committer", "builder"} \/ event.action = "OpenStep"
=============================================================================
