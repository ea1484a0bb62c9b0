"""The reference model's own traces are behaviours of the specification; altered ones, and a faulty model's, are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from conformance.links.environment import SETTING, Recorded
from conformance.links.record import record
from conformance.mutants.faults import (
    ClaimOnlyEmitted,
    DropAbortedWrite,
    FinishLeavesBookkeeping,
    PlanSameStepOnce,
    SkipChainStep,
)
from conformance.tla.accept import Acceptance, accept_all
from conformance.tla.values import Function
from omni_prefix_ref import Machine
from tests.conformance.links.altered import Altered, Events, altered, dropped, early, first, misread

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(120)]

SEEDS = (1, 2, 3, 5, 6)
"""Even: the committer is done before the next step begins. Odd: it lags."""
TIGHT = replace(SETTING, pressure=True)


@cache
def trace(seed: int) -> Recorded:
    """Recorded once for each seed."""
    return record(seed)


def test_what_the_reference_model_does_is_a_behaviour() -> None:
    """Each trace is taken whole, and the interesting things happen in it."""
    traces = [trace(seed) for seed in SEEDS]
    for seed, recorded in zip(SEEDS, traces, strict=True):
        print(f"seed {seed}: {len(recorded.events)} events, {dict(recorded.seen)}")
        for what in ("hit", "UnplanReads", "preemption", "resumed", "abort", "late", "discard", "FetchRead"):
            assert recorded.seen[what], what
    due = [Acceptance(True, len(recorded.events)) for recorded in traces]
    assert accept_all(SETTING, [recorded.events for recorded in traces]) == due


def test_what_pressure_does_is_a_behaviour() -> None:
    """Open writes are sealed, and land, before a save goes on."""
    traces = [record(seed, setting=TIGHT, budget=4) for seed in SEEDS[:2]]
    assert all(recorded.seen["SealWrite"] > 2 for recorded in traces)
    due = [Acceptance(True, len(recorded.events)) for recorded in traces]
    assert accept_all(TIGHT, [recorded.events for recorded in traces]) == due


def test_a_trace_is_a_function_of_its_seed() -> None:
    """A seed that fails can be run again."""
    assert record(SEEDS[0]) == record(SEEDS[0])


def test_an_altered_trace_is_rejected_where_it_was_altered() -> None:
    """One event dropped, told early, or with another argument."""
    events = trace(2).events
    changes: list[tuple[str, Callable[[Events, int], Altered]]] = [
        ("UnplanReads", dropped),
        ("FinishCopy", dropped),
        ("PreserveReads", dropped),
        ("ClaimSlots", early),
        ("RegisterWrite", early),
        ("WritePool", early),
        ("StartRequest", altered(computed=4)),
        ("PlanRead", altered(read=(1, "d"))),
        ("PlanRead", altered(kinds=Function({("hidden", 0): "hole"}))),
        ("ClaimSlots", altered(slots=frozenset({0}))),
        ("ClaimSlots", altered(versions=Function({0: 7}))),
        ("Inspect", misread("emitted", Function({"a": 1}))),
    ]
    traces = [change(events, first(events, action)) for action, change in changes]
    found = accept_all(SETTING, [told for told, _ in traces])
    for (action, change), (_, places), acceptance in zip(changes, traces, found, strict=True):
        assert not acceptance.accepted, (action, change)
        assert not acceptance.broken, (action, change)
        assert acceptance.taken in places, (action, change)


FAULTS: dict[type[Machine], tuple[int, str]] = {
    PlanSameStepOnce: (2, "PreserveReads"),
    SkipChainStep: (2, "WritePool"),
    FinishLeavesBookkeeping: (2, "Inspect"),
    ClaimOnlyEmitted: (4, "Inspect"),
    DropAbortedWrite: (2, "Inspect"),
}
"""A faulty model, a seed, and the first event of that trace that the specification does not take: of faults that change
only what an action does, the next look at the tables."""


def test_what_a_faulty_model_does_is_rejected() -> None:
    """At the first event that shows the fault."""
    traces = [record(seed, machine=machine).events for machine, (seed, _) in FAULTS.items()]
    found = accept_all(SETTING, traces)
    assert not any(acceptance.accepted for acceptance in found)
    refused = [events[a.taken]["action"] for events, a in zip(traces, found, strict=True)]
    assert refused == [action for _, action in FAULTS.values()]


def test_a_write_between_a_finished_id_and_the_plans_is_in_a_trace() -> None:
    """The eager driver writes there, and so may a committer at any time."""
    actions = [event["action"] for event in trace(2).events]
    at = actions.index("FinishRequest")
    assert "QueueTask" in actions[at : at + 2]
