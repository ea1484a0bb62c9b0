-------------------------------- MODULE Slots --------------------------------
(* Slot versions: who owns a slot's rows, and where each key's row is.       *)
(*                                                                           *)
(* A claim starts a new tenancy of a slot for every key at once. (slot,      *)
(* version) names a tenant's rows for ever: whoever remembers the version    *)
(* that it claimed can tell whether it still owns the slot.                  *)
EXTENDS VllmEnv

CONSTANTS
    Keys,       \* the per-token outputs that are cached
    Hidden,     \* those that every token emits and every hit owes: {"hidden"} or {}
    Deferred,   \* those whose rows stay on the device until a write is sealed
    EmitTokens  \* [key -> tokens that emit it]; a hidden key needs no entry

VARIABLES
    version,    \* [slot -> Nat]
    owner,      \* [slot -> step id, 0 for none]
    occupancy,  \* [key -> [slot -> "absent", "in_transit", "committed"]]
    pool,       \* [key -> [slot -> row]]: the durable host rows
    log_row,    \* [key -> [slot -> row]]: where an in-transit deferred row is. A row of the
                \* log never changes, so naming it and holding it are one thing here
    pins        \* [slot -> planned, unfetched reads that name its pool row]

slotVars == <<version, owner, occupancy, pool, log_row, pins>>

Zero == <<>>
Emits(k, row) == k \in Hidden \/ row[Len(row)] \in EmitTokens[k]
Due(k, r, p) == IF Emits(k, Row(r, p)) THEN Row(r, p) ELSE Zero

SlotsInit ==
    /\ version = [s \in Watched |-> 0]
    /\ owner = [s \in Watched |-> 0]
    /\ occupancy = [k \in Keys |-> [s \in Watched |-> "absent"]]
    /\ pool = [k \in Keys |-> [s \in Watched |-> Zero]]
    /\ log_row = [k \in Keys |-> [s \in Watched |-> Zero]]
    /\ pins = [s \in Watched |-> 0]

----------------------------------------------------------------------------
(* The slots that this step computes, and the row that it computes at each.  *)

StepSlots == DOMAIN layout
ComputedBy(s) == layout[s].entry
ComputedRow(s) == layout[s].row

Claim(step) ==
    LET Taken(k, s) == s \in StepSlots /\ (On("claim_only_emitted") => Emits(k, ComputedRow(s)))
    IN /\ version' = [s \in Watched |->
            IF s \in StepSlots /\ ~On("skip_version_bump") THEN version[s] + 1 ELSE version[s]]
       /\ owner' = [s \in Watched |-> IF s \in StepSlots THEN step ELSE owner[s]]
       /\ occupancy' = [k \in Keys |-> [s \in Watched |->
            IF ~Taken(k, s) THEN occupancy[k][s]
            ELSE IF On("zero_instead_of_absent") /\ occupancy[k][s] = "committed" THEN "committed"
            ELSE IF Emits(k, ComputedRow(s)) THEN "in_transit" ELSE "absent"]]
       /\ pool' = IF On("zero_instead_of_absent")
                  THEN [k \in Keys |-> [s \in Watched |-> IF Taken(k, s) THEN Zero ELSE pool[k][s]]]
                  ELSE pool
       /\ log_row' = [k \in Keys |-> [s \in Watched |-> IF Taken(k, s) THEN Zero ELSE log_row[k][s]]]
=============================================================================
