"""Every failure of the environment, at every place: a clear error or full recovery, and never a wrong row."""

from __future__ import annotations

import itertools

import pytest

from conformance.drivers.registry import subject
from conformance.drivers.subject import Failure
from conformance.faults.sweep import Totals, places, small_traces, sweep
from conformance.mutants.fast_edit import Edit, FastMutant
from conformance.schedules.trace import STAGES
from omni_prefix_fast.manager import OmniPrefixCacheManager

OF_FETCH = "rows_to_host"
"""The only stage that small traces rarely come to: a hit on rows that are still in the log."""


def test_every_failure_at_every_place_eager() -> None:
    """Two small traces: all stages occur, dozens of places each, and nothing is wrong after any."""
    totals = Totals()
    for trace in itertools.islice(small_traces(100), 2):
        sweep(subject("fast-eager"), trace, totals)
    assert totals.injections.keys() >= set(STAGES) - {OF_FETCH}
    assert sum(totals.injections.values()) > 200
    assert not totals.wrong, "\n".join(map(str, totals.wrong[:5]))


@pytest.mark.parametrize("stage", STAGES)
def test_failures_under_interleavings(stage: str) -> None:
    """The first places of each stage, threads interleaved by the trace's seed."""
    totals = Totals()
    for trace in itertools.islice(small_traces(200), 3):
        sweep(subject("fast-async"), trace, totals, seed=trace.header.seed, stages=(stage,), most=8)  # type: ignore[arg-type]
    assert totals.injections[stage] or stage == OF_FETCH
    assert not totals.wrong, "\n".join(map(str, totals.wrong[:5]))


@pytest.mark.parametrize(
    ("old", "stage", "what"),
    [
        ("machine.release_page(layout.step_id, page)", "launch", "pages_held"),
        ("machine.cancel(ticket)", "clone", "charged"),
    ],
)
def test_a_cache_that_leaks_is_found_out(old: str, stage: str, what: str) -> None:
    """A save that fails and does not give back what it took is seen in the tables, at the event."""
    mutant = FastMutant("leak", "leaks", "none", (Edit(OmniPrefixCacheManager, "_land", old, "pass"),))
    failures: list[Failure | None] = []
    with mutant.applied():
        for trace in itertools.islice(small_traces(100), 4):
            failures += [found.failure for found in places(subject("fast-eager"), trace, stage, most=3)]  # type: ignore[arg-type]
    told = [f.what for f in failures if f is not None and f.kind in {"tables", "crash", "outcome"}]
    assert any(what in line or "left behind" in line for line in told), told


def test_a_place_that_is_not_reached_ends_the_sweep() -> None:
    """Places are numbered without a gap from the first on, and a failure that does not go off is none."""
    trace = next(small_traces(100))
    found = list(places(subject("fast-eager"), trace, "write"))
    assert [injection.fail.after for injection in found] == list(range(len(found)))
    assert all(injection.run.went_off == "write" for injection in found)
    assert "seed" in str(found[0])
