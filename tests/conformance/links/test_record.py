"""The reference model's own traces are behaviours of the specification; altered ones, and a faulty model's, are not."""

from __future__ import annotations

import functools

import pytest

from conformance.links.record import SETTING, Event, Recorded, record
from conformance.mutants.faults import FinishLeavesBookkeeping, PlanSameStepOnce, SkipChainStep
from conformance.tla.accept import Acceptance, accept
from omni_prefix_ref import Machine

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(90)]

SEEDS = (1, 2, 3, 5, 6)
"""Even: the committer is done before the next step begins. Odd: it lags."""


@functools.cache
def trace(seed: int) -> Recorded:
    """Recorded once for each seed."""
    return record(seed)


def first(events: tuple[Event, ...], action: str) -> int:
    """Where an action is taken for the first time."""
    return next(i for i, event in enumerate(events) if event["action"] == action)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_reference_model_does_is_a_behaviour(seed: int) -> None:
    """Each trace is taken whole, and the interesting things happen in it."""
    recorded = trace(seed)
    print(f"seed {seed}: {len(recorded.events)} events, {dict(recorded.seen)}")
    for what in ("hit", "UnplanReads", "preemption", "resumed", "abort", "late", "discard", "FetchRead"):
        assert recorded.seen[what], what
    assert accept(SETTING, recorded.events) == Acceptance(True, len(recorded.events))


def test_a_trace_is_a_function_of_its_seed() -> None:
    """A seed that fails can be run again."""
    assert record(SEEDS[0]) == record(SEEDS[0])


@pytest.mark.parametrize("action", ["UnplanReads", "FinishCopy", "PreserveReads"])
def test_without_one_event_it_is_rejected_there(action: str) -> None:
    """A same-step hit that is not unplanned, a chain with a link left out, reads that are not preserved."""
    events = trace(2).events
    at = first(events, action)
    assert accept(SETTING, (*events[:at], *events[at + 1 :])) == Acceptance(False, at)


@pytest.mark.parametrize("action", ["ClaimSlots", "RegisterWrite", "WritePool"])
def test_with_two_events_swapped_it_is_rejected_there(action: str) -> None:
    """The event and the one that follows."""
    events = trace(2).events
    at = first(events, action)
    swapped = (*events[:at], events[at + 1], events[at], *events[at + 2 :])
    assert accept(SETTING, swapped) == Acceptance(False, at)


@pytest.mark.parametrize(
    ("action", "change"),
    [
        ("StartRequest", {"computed": 4}),
        ("PlanRead", {"read": (1, "d")}),
        ("ClaimSlots", {"slots": frozenset({0})}),
    ],
)
def test_with_one_event_altered_it_is_rejected_there(action: str, change: Event) -> None:
    """One argument is another."""
    events = trace(2).events
    at = first(events, action)
    altered = (*events[:at], {**events[at], **change}, *events[at + 1 :])
    assert altered[at] != events[at]
    assert accept(SETTING, altered) == Acceptance(False, at)


@pytest.mark.parametrize(
    ("machine", "refused"),
    [(PlanSameStepOnce, "PreserveReads"), (SkipChainStep, "WritePool"), (FinishLeavesBookkeeping, "ClaimPage")],
)
def test_what_a_faulty_model_does_is_rejected(machine: type[Machine], refused: str) -> None:
    """At the first event that shows the fault."""
    events = record(2, machine=machine).events
    acceptance = accept(SETTING, events)
    assert not acceptance.accepted
    assert events[acceptance.taken]["action"] == refused


def test_a_write_between_a_finished_id_and_the_plans_is_a_behaviour() -> None:
    """The eager driver writes there, and so may a committer whenever the lock is free."""
    recorded = record(2)
    actions = [event["action"] for event in recorded.events]
    at = actions.index("FinishRequest")
    assert "QueueTask" in actions[at : at + 2]
    assert accept(SETTING, recorded.events).accepted
