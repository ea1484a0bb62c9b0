------------------------------- MODULE SIMRows -------------------------------
(* Random behaviours of a machine too large to walk through: four requests,  *)
(* two of one family and two of another, six blocks of two tokens, three     *)
(* keys, every slot watched, every link of the chain an action.              *)
EXTENDS Rules

OrderLarge == <<"a", "b", "c", "d">>
TextLarge == "a" :> <<0, 1, 2, 1, 0>> @@ "b" :> <<0, 1, 2, 2, 1, 0>> @@ "c" :> <<2, 0, 1, 1>> @@ "d" :> <<2, 0, 0>>
PromptLarge == "a" :> 3 @@ "b" :> 4 @@ "c" :> 2 @@ "d" :> 3

\* For replay on the reference model, whose steps emit a key whole: runs of equal tokens.
TextRuns == "a" :> <<0, 0, 1, 1, 2>> @@ "b" :> <<0, 0, 1, 1, 1, 0>> @@ "c" :> <<2, 2, 0>> @@ "d" :> <<1, 0>>
PromptRuns == "a" :> 4 @@ "b" :> 4 @@ "c" :> 2 @@ "d" :> 1
EmitLarge == "codes" :> {0, 1} @@ "mm" :> {1, 2}
=============================================================================
