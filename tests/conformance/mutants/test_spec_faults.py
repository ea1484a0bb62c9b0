"""The table of seeded faults shows what TLC finds for the same fault of the specification."""

from conformance.mutants.runner import spec_faults
from conformance.mutants.table import MUTANTS


def test_the_seeds_faults_are_in_both_descriptions() -> None:
    """The faults that a naive reading of the design has are seeded in the specification and in the reference model."""
    shared = {mutant.name for mutant in MUTANTS} & set(spec_faults())
    assert {"claim_only_emitted", "resolve_deferred_at_fetch", "plan_same_step_once", "plan_at_materialize"} <= shared


def test_each_fault_of_the_specification_has_a_counterexample() -> None:
    """Model, rule and a length of at least two states."""
    for figures in spec_faults().values():
        model, rule, length = figures.split(", ")
        assert model
        assert rule.endswith(("Inv", "Prop"))
        assert int(length) > 1
