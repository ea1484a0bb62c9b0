"""The table of seeded faults: every rule is shown to bite, and every reported case has a place."""

from __future__ import annotations

import inspect

from conformance.mutants.table import MUTANTS, NOT_EXPRESSIBLE
from omni_prefix_ref import Machine, Rules
from omni_prefix_ref.driver import EagerDriver

CASES = (
    *(f"E{n:02}" for n in (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 19, 20, 21, 23, 24, 25, 26, 28, 29)),
    *(f"E{n}" for n in (31, 32, 33, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48)),
    *(f"D{n}" for n in (1, 2, 3, 4)),
)


def test_faults_have_names_of_their_own_and_break_something() -> None:
    """No name twice, and each fault overrides the machine or its driver."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert (mutant.machine, mutant.driver) != (Machine, EagerDriver), mutant.name


def test_each_rule_has_a_fault_that_breaks_it() -> None:
    """The rules named by the faults are methods of `Rules`, and no rule is without one."""
    named = {mutant.rule for mutant in MUTANTS}
    rules = {name for name, _ in inspect.getmembers(Rules, inspect.isfunction) if not name.startswith("_")}
    assert named <= rules | {"step_consumed_once"}
    assert rules - {"versions_never_fall", "at_rest"} <= named


def test_each_reported_case_is_a_fault_or_says_why_not() -> None:
    """Cases that no fault stands for give a reason, and no case is in both places."""
    broken = {case for mutant in MUTANTS for case in mutant.cases}
    assert broken | set(NOT_EXPRESSIBLE) == set(CASES)
    assert not broken & set(NOT_EXPRESSIBLE)
