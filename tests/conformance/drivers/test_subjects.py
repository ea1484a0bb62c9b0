"""A run ends at the first thing that is wrong, and says of what kind it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.cases import CASES
from conformance.drivers.expected import tables_at_rest
from conformance.drivers.subject import Kind
from conformance.drivers.subjects import EagerFast, ReferenceModel, run_events
from conformance.schedules import generate
from conformance.schedules.driver import Outcome
from conformance.schedules.trace import CONTRACT, Event, Materialize
from omni_prefix_ref.errors import NotEnabled, RuleBroken

TRACE = CASES["E01"].make()


class _Answers:
    """Answers what is due, but for one event."""

    def __init__(self, at: int, answer: Callable[[], Outcome | None]) -> None:
        self._at = at
        self._answer = answer
        self._index = -1

    def apply(self, event: Event) -> Outcome | None:
        self._index += 1
        if self._index == self._at:
            return self._answer()
        return Outcome(due=event.due if isinstance(event, Materialize) else None)


def _raise(error: Exception) -> Callable[[], Outcome]:
    def answer() -> Outcome:
        raise error

    return answer


WRONG: dict[Kind, Callable[[], Outcome]] = {
    "outcome": lambda: Outcome(error=CONTRACT, detail="for no reason"),
    "rule": _raise(RuleBroken("claim_all", "slot 0")),
    "deadlock": _raise(NotEnabled("nobody moves")),
    "crash": _raise(KeyError("slot")),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_failure_says_where_and_of_what_kind(kind: Kind) -> None:
    """Index, event and kind; what comes behind it is not applied."""
    ran = run_events(TRACE, _Answers(4, WRONG[kind]))
    assert ran.failure is not None
    assert (ran.failure.index, ran.failure.event, ran.failure.kind, ran.events) == (4, "save", kind, 5)


def test_tables_are_asked_after_each_event() -> None:
    """The first that differs ends the run; what was left out is not asked about."""
    asked: list[str] = []

    def check(event: Event, outcome: Outcome) -> str | None:  # noqa: ARG001 - the shape of a check
        asked.append(event.event)
        return "pins" if len(asked) == 3 else None

    ran = run_events(TRACE, _Answers(0, lambda: None), check=check)
    assert asked == ["save", "materialize", "start"]
    assert ran.failure is not None
    assert (ran.failure.index, ran.failure.kind, ran.failure.what) == (3, "tables", "pins")


@pytest.mark.parametrize("subject", [ReferenceModel(), EagerFast()], ids=lambda subject: subject.name)
def test_a_run_counts_the_actions_of_the_machine(subject: ReferenceModel | EagerFast) -> None:
    """By their names in docs/machine.md."""
    ran = subject.run(TRACE)
    assert ran.failure is None
    assert ran.events == len(TRACE.events)
    assert (ran.actions["claim_slots"], ran.actions["take_step"]) == (2, 2)


def test_tables_at_rest_are_worked_out_once() -> None:
    """What the eager subject leaves for others is what they would work out: the reference model's tables at rest."""
    for seed in range(30):
        trace = generate(seed).trace
        assert EagerFast().run(trace).failure is None
        kept = tables_at_rest(trace)
        again = trace.model_copy()
        assert kept == tables_at_rest(again), seed
