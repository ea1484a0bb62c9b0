"""A fault is in the production package for one run, and has to find its place there."""

from __future__ import annotations

import pytest

from conformance.mutants.fast_edit import Edit, Edits, FastMutant, StaleFaultError, Wrap
from omni_prefix_fast.requests import RequestTable
from omni_prefix_fast.steps import StepTable


def test_a_fault_is_there_while_it_is_applied_and_not_after() -> None:
    """The function changes for the time of the run, also where that fails."""
    issue = StepTable.issue
    mutant = FastMutant("m", "ids stand still", "r", (Edit(StepTable, "issue", "self._next += 1", "pass"),))
    with pytest.raises(ZeroDivisionError), mutant.applied():  # noqa: PT012 - what was changed is looked at on the way
        table = StepTable()
        assert [table.issue(), table.issue()] == [0, 0]
        raise ZeroDivisionError
    assert StepTable.issue is issue
    table = StepTable()
    assert [table.issue(), table.issue()] == [0, 1]


def test_words_that_are_gone_are_an_error_that_names_them() -> None:
    """Neither a function nor words that are not there, nor words that stand there twice, are passed over."""
    for stale in (
        Edit(StepTable, "no_such_action", "x", "y"),
        Edit(StepTable, "issue", "no such words", "y"),
        Edit(StepTable, "issue", "self", "y"),
        Edits(StepTable, "issue", (("self._next += 1", "pass"), ("self._next += 1", "pass"))),
        Wrap(RequestTable, "no_such_action", lambda function: function, "x"),
    ):
        with pytest.raises(StaleFaultError, match=stale.name), FastMutant("m", "f", "r", (stale,)).applied():
            pass


def test_what_was_written_instead_is_told_in_one_line() -> None:
    """Old words and new ones; words that are merely gone as nothing."""
    left_out = Edit(StepTable, "issue", "self._next += 1", "")
    instead = Edits(StepTable, "issue", (("self._next += 1", "pass\n  # later"), ("step_id = self._next", "")))
    assert FastMutant("m", "f", "r", (left_out, instead)).wrote == (
        "self._next += 1 → (nothing); self._next += 1 → pass # later; step_id = self._next → (nothing)"
    )
