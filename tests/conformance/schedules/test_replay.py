"""Replay notices: an altered row, a dropped event, a wrong error; and it knows what a failing write may do."""

from __future__ import annotations

import pytest

from conformance.drivers.reference import ReferenceDriver
from conformance.schedules import Trace, generate, replay
from conformance.schedules.driver import Outcome
from conformance.schedules.replay import Judge
from conformance.schedules.trace import CONTRACT, WRITE, Discard, Fail, Materialize, Save, Start


def _replay(trace: Trace) -> int | None:
    mismatch = replay(trace, ReferenceDriver(trace.header))
    return None if mismatch is None else mismatch.index


SEEDS = [seed for seed in range(12) if not any(isinstance(e, Fail) for e in generate(seed).trace.events)][:4]
"""Traces in which no write fails: every outcome is due exactly."""


def _with_rows(trace: Trace) -> int:
    """Index of the first event that hands over rows."""
    return next(
        i for i, e in enumerate(trace.events) if isinstance(e, Materialize) and e.due is not None and e.due.rows
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_an_altered_row_is_noticed_where_it_is_handed_over(seed: int) -> None:
    """A row due that is off by one is a mismatch at that event."""
    trace = generate(seed).trace
    at = _with_rows(trace)
    event = trace.events[at]
    assert isinstance(event, Materialize)
    assert event.due is not None
    rows = {k: {r: [v + 1 for v in col] for r, col in of_key.items()} for k, of_key in event.due.rows.items()}
    altered = event.model_copy(update={"due": event.due.model_copy(update={"rows": rows})})
    events = [*trace.events[:at], altered, *trace.events[at + 1 :]]
    assert _replay(trace) is None
    assert _replay(trace.model_copy(update={"events": events})) == at


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dropped_save_is_noticed(seed: int) -> None:
    """Without its save, the step that follows is refused, or its rows are missed."""
    trace = generate(seed).trace
    at = next(i for i, e in enumerate(trace.events) if isinstance(e, Save) and e.error is None)
    events = [*trace.events[:at], *trace.events[at + 1 :]]
    found = _replay(trace.model_copy(update={"events": events}))
    assert found is not None
    assert found >= at


def test_a_failure_may_surface_late_but_then_stays() -> None:
    """After a failing write each call is right or raises it; once raised, a call that answers is a mismatch."""
    judge, ok, failed = Judge(), Outcome(), Outcome(error=WRITE)
    assert judge.judge(0, Start(), failed) is not None
    judge = Judge()
    assert judge.judge(0, Fail(stage="copy"), ok) is None
    assert judge.judge(1, Start(), ok) is None
    assert judge.judge(2, Discard(label=0, error=CONTRACT), Outcome(error=CONTRACT)) is None
    assert judge.judge(3, Start(), failed) is None
    assert judge.judge(4, Start(), failed) is None
    assert judge.judge(5, Start(), ok) is not None
