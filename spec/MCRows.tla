------------------------------- MODULE MCRows --------------------------------
EXTENDS Rules

\* Token 0 opens every shared prefix and emits codes, 1 emits them too, 2 does not.
Text2 == "a" :> <<0, 1, 2>> @@ "b" :> <<0, 2, 1>>
\* c shares nothing, so it can push the shared prefix out of its block.
Text3 == "a" :> <<0, 1>> @@ "b" :> <<0, 2>> @@ "c" :> <<2>>
Order3 == <<"a", "b", "c">>
Prompt3 == "a" :> 1 @@ "b" :> 2 @@ "c" :> 1
\* The shared token emits no codes, c does.
TextHole == "a" :> <<2, 1>> @@ "b" :> <<2, 0>> @@ "c" :> <<0>>
Order2 == <<"a", "b">>
Prompt2 == "a" :> 1 @@ "b" :> 2
\* For the state graph, where no view cuts the counters off. All tokens emit the same keys there,
\* so that a step emits a key whole, as the reference model's steps do.
OneStep == step <= 1
Text1 == "a" :> <<0, 1>> @@ "b" :> <<0, 2>>
Whole == "codes" :> {0, 1, 2}
\* Two tokens a block.
TextBlocks == "a" :> <<0, 1, 2, 1>> @@ "b" :> <<0, 1, 2>>
PromptBlocks == "a" :> 2 @@ "b" :> 3
\* A longer shared prefix: what one computed while the other was out is a larger hit for it.
TextGap == "a" :> <<0, 1, 2>> @@ "b" :> <<0, 1>>
PromptGap == "a" :> 3 @@ "b" :> 2
Codes == "codes" :> {0, 1}
=============================================================================
