"""Consumers that die or never consume: the engine loses their steps, and nobody else's rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from conformance.drivers.registry import subject
from conformance.faults.consumers import dies, hoards, labels
from conformance.faults.sweep import small_traces
from conformance.schedules.trace import TIMEOUT, Discard, Save, Trace

TRACES = list(itertools.islice(small_traces(0), 6))


@pytest.mark.parametrize("driver", ["reference", "fast-eager", "fast-async"])
@pytest.mark.parametrize("fails", [dies, hoards])
def test_what_others_are_due_does_not_change(fails: Callable[[Trace, int], Trace], driver: str) -> None:
    """Each step in turn has a consumer that fails: all others get their rows, and nothing is left behind."""
    for trace in TRACES:
        for label in labels(trace)[:3]:
            ran = subject(driver).run(fails(trace, label), seed=trace.header.seed)
            assert ran.failure is None, f"seed {trace.header.seed}, label {label}: {ran.failure}"


def test_a_hoarded_step_costs_a_time_out_where_pages_run_out() -> None:
    """The save that finds no page is told, and comes again once the engine has discarded the step."""
    found = 0
    for trace in TRACES:
        for label in labels(trace):
            events = hoards(trace, label).events
            found += sum(
                isinstance(one, Save) and one.error == TIMEOUT and other == Discard(label=label)
                for one, other in itertools.pairwise(events)
            )
    assert found


def test_a_step_that_nobody_consumes_has_no_consumer_to_fail() -> None:
    """A label of no consumed step is refused."""
    for fails in (dies, hoards):
        with pytest.raises(ValueError, match="nobody consumes"):
            fails(TRACES[0], 10_000)
