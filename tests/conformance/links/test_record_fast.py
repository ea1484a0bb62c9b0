"""The production package's own traces are behaviours of the specification; altered and faulty ones are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest

from conformance.links.environment import SETTING, Recorded
from conformance.links.record_fast import record_eager, record_threads
from conformance.links.sources import spec_actions
from conformance.mutants.fast_table import FAST_MUTANTS
from conformance.tla.accept import Acceptance, accept_all
from conformance.tla.values import Function
from tests.conformance.links.altered import Altered, Events, altered, dropped, early, first, misread

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(120)]

BY_NAME = {mutant.name: mutant for mutant in FAST_MUTANTS}
TIGHT = replace(SETTING, pressure=True)
BUDGET = 4
"""Deferred rows that fit on the device: those of one step do, those of all open writes do not."""
SEEDS = range(40)
CHOSEN = 7
"""Traces that TLC is asked about."""
ALWAYS = ("hit", "UnplanReads", "preemption", "resumed", "abort", "late", "discard", "fetched by prefetch")
"""What happens in each of them."""
SOMETIMES = ("fetched by engine", "fetched by builder", "committer beside a publish", "committer behind a claim")
"""What happens in some."""


def accepted(traces: Sequence[Recorded]) -> list[Acceptance]:
    """What becomes of traces that are behaviours."""
    return [Acceptance(True, len(recorded.events)) for recorded in traces]


@cache
def threads(seed: int) -> Recorded:
    """Recorded once for each seed."""
    return record_threads(seed)


@cache
def eager(seed: int) -> Recorded:
    """Recorded once for each seed."""
    return record_eager(seed)


def chosen() -> list[int]:
    """Seeds whose traces have all that every trace has to have; those first that have what some have to have."""
    good = [seed for seed in SEEDS if all(threads(seed).seen[what] for what in ALWAYS)]
    first_with = [next(seed for seed in good if threads(seed).seen[what]) for what in SOMETIMES]
    return list(dict.fromkeys([*first_with, *good]))[:CHOSEN]


def test_what_the_threads_do_is_a_behaviour() -> None:
    """Each trace is taken whole: engine, committer, prefetch and builders interleaved, copies landing late."""
    assert [threads(seed).crash for seed in SEEDS if threads(seed).crash] == []
    seeds = chosen()
    print(f"seeds {seeds}")
    assert len(seeds) == CHOSEN
    traces = [threads(seed) for seed in seeds]
    assert accept_all(SETTING, [recorded.events for recorded in traces]) == accepted(traces)


def test_what_the_eager_cache_does_is_a_behaviour() -> None:
    """The same without threads."""
    traces = [eager(seed) for seed in (1, 2, 6)]
    for recorded in traces:
        assert recorded.crash == ""
        assert [what for what in ALWAYS[:-1] if not recorded.seen[what]] == []
    assert accept_all(SETTING, [recorded.events for recorded in traces]) == accepted(traces)


def test_what_pressure_does_is_a_behaviour() -> None:
    """Writes of running requests are sealed, and land, before a save goes on; with threads and without."""
    traces = [
        record(seed, setting=TIGHT, budget=BUDGET) for record in (record_threads, record_eager) for seed in (2, 6)
    ]
    for recorded in traces:
        assert recorded.crash == ""
        assert recorded.seen["SealWrite"] > 2
    assert accept_all(TIGHT, [recorded.events for recorded in traces]) == accepted(traces)


@pytest.mark.parametrize("record", [record_eager, record_threads])
def test_every_action_is_recorded(record: Callable[..., Recorded]) -> None:
    """Each action of `PrefixCache` occurs in the traces, less those of engines that the gate refuses."""
    told = {event["action"] for seed in SEEDS for event in record(seed, setting=TIGHT, budget=BUDGET).events}
    actions = {place.name for place in spec_actions() if place.module == "PrefixCache"}
    assert told - {"Inspect"} == actions - {"WithdrawRequest", "LoadBlock"}


def test_a_trace_is_a_function_of_its_seed() -> None:
    """A seed that fails can be run again, threads and all."""
    assert record_threads(SEEDS[0]) == threads(SEEDS[0])


def test_an_altered_trace_is_rejected_where_it_was_altered() -> None:
    """One event dropped, two swapped, one argument changed."""
    events = threads(chosen()[0]).events
    changes: list[tuple[str, Callable[[Events, int], Altered]]] = [
        ("UnplanReads", dropped),
        ("FinishCopy", dropped),
        ("PreserveReads", dropped),
        ("OpenStep", dropped),
        ("UnplanReads", early),
        ("ClaimSlots", early),
        ("OpenStep", early),
        ("WritePool", early),
        ("StartRequest", altered(computed=4)),
        ("PlanRead", altered(kinds=Function({("hidden", 0): "hole"}))),
        ("ClaimSlots", altered(versions=Function({0: 7}))),
        ("FetchRead", altered(read=(1, "d"))),
        ("ClaimCopy", altered(task=99)),
        ("Inspect", misread("steps", frozenset({99}))),
        ("Inspect", misread("open_write", Function({"d": (99, 1)}))),
    ]
    traces = [change(events, first(events, action)) for action, change in changes]
    found = accept_all(SETTING, [trace for trace, _ in traces])
    for (action, change), (_, places), acceptance in zip(changes, traces, found, strict=True):
        assert not acceptance.accepted, (action, change)
        assert not acceptance.broken, (action, change)
        assert acceptance.taken in places, (action, change)


FAULTS: dict[tuple[str, str], set[str]] = {
    ("eager", "plan_same_step_once"): {"PreserveReads"},
    ("eager", "new_before_finished"): {"StartRequest"},
    ("eager", "continuation_is_hit"): {"PlanRead"},
    ("eager", "skip_version_bump"): {"ClaimSlots"},
    ("eager", "finish_leaves_watermark"): {"Inspect", "ClaimPage", "PlanRead"},
    ("eager", "claim_only_emitted"): {"Inspect", "PlanRead"},
    ("eager", "drop_aborted_write"): {"Inspect"},
    ("eager", "commit_ignores_versions"): {"Inspect"},
    ("threads", "plan_same_step_once"): {"PreserveReads"},
    ("threads", "fetch_before_done"): {"FetchRead"},
    ("threads", "no_preserve"): {"FetchRead", "PreserveReads"},
}
"""A fault, and the first events that the specification does not take where it shows: of faults that change only what an
action does, or that leave out what nobody waits for, a look at the tables."""
SHOWING = 2
"""Traces of a fault that TLC is asked about: the first that are others than without it."""


def test_what_a_faulty_cache_does_is_rejected() -> None:
    """At an event that shows the fault, wherever it shows."""
    sound = {("eager", seed): eager(seed).events for seed in SEEDS}
    sound |= {("threads", seed): threads(seed).events for seed in SEEDS}
    traces: list[tuple[tuple[str, str], Events]] = []
    for how, name in FAULTS:
        record = record_eager if how == "eager" else record_threads
        with BY_NAME[name].applied():
            faulty = ((seed, record(seed).events) for seed in SEEDS)
            shown = (((how, name), events) for seed, events in faulty if events != sound[how, seed])
            traces += islice(shown, SHOWING)
    refused: dict[tuple[str, str], set[str]] = {}
    for (fault, events), acceptance in zip(traces, accept_all(SETTING, [e for _, e in traces]), strict=True):
        if not acceptance.accepted:
            refused.setdefault(fault, set()).add(str(events[acceptance.taken]["action"]))
    assert list(refused) == list(FAULTS)
    assert {fault: actions for fault, actions in refused.items() if not actions <= FAULTS[fault]} == {}
