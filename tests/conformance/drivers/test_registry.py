"""Subjects by name: every built-in one is there, and a wrong name is answered with the right ones."""

from __future__ import annotations

import pytest

from conformance.drivers.registry import missing, names, subject
from conformance.schedules import generate


@pytest.mark.parametrize("name", [n for n in names() if missing(n) is None])
def test_each_name_is_a_subject_that_runs_a_trace(name: str) -> None:
    """It bears the name that it was asked for by, and a right implementation runs a trace without a failure."""
    found = subject(name)
    trace = generate(3).trace
    ran = found.run(trace, seed=1)
    assert found.name == name
    assert ran.failure is None
    assert ran.events == len(trace.events)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    """The error lists what there is."""
    with pytest.raises(ValueError, match=r"'slow'.*reference, fast-eager, fast-async, cuda, module:NAME"):
        subject("slow")


@pytest.mark.parametrize(("name", "why"), [("module:no_such_module", "no_such_module"), ("module:json", "lacks")])
def test_a_module_that_cannot_be_taken_says_why(name: str, why: str) -> None:
    """One that cannot be imported, and one without the contract's names, are named."""
    with pytest.raises(ValueError, match=why):
        subject(name)
