------------------------------ MODULE GuidedRows ------------------------------
(* Small graphs of several steps, for the replay on the reference model: the *)
(* scheduler is led along one story, and committer and builder move freely.  *)
EXTENDS Rules

Order3 == <<"a", "b", "c">>
Text3 == "a" :> <<0>> @@ "b" :> <<0, 2>> @@ "c" :> <<2>>
Prompt3 == "a" :> 1 @@ "b" :> 2 @@ "c" :> 1
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
=============================================================================
