"""What is left of a trace is a trace: its dues are those of cache-off, and the reference model comes to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.drivers.reference import ReferenceDriver
from conformance.schedules import Trace, generate, replay
from conformance.schedules.lives import find_lives
from conformance.schedules.shrink import shrink_trace
from conformance.schedules.trace import CONTRACT, Discard, Materialize, Save, Shutdown, Start
from omni_prefix_ref.errors import NotEnabled


def _accepts(trace: Trace) -> bool:
    try:
        return replay(trace, ReferenceDriver(trace.header, checked=False)) is None
    except (NotEnabled, AssertionError, KeyError, IndexError, ValueError):
        return False


def _hit(trace: Trace) -> bool:
    """A step hands over rows that it did not compute."""
    starts = {(e.label, part.req): part.start for e in trace.events if isinstance(e, Save) for part in e.batch}
    return any(
        span[0] < starts[event.label, req]
        for event in trace.events
        if isinstance(event, Materialize) and event.due
        for req, span in event.due.spans.items()
    )


def _late_discard(trace: Trace) -> bool:
    """A step is discarded after a later one was saved."""
    saved = -1
    for event in trace.events:
        if isinstance(event, Save):
            saved = max(saved, event.label)
        if isinstance(event, Discard) and 0 <= event.label < saved:
            return True
    return False


def _refused_start(trace: Trace) -> bool:
    return any(isinstance(event, Start) and event.error == CONTRACT for event in trace.events)


def _shut_down(trace: Trace) -> bool:
    return any(isinstance(event, Shutdown) for event in trace.events)


@pytest.mark.parametrize(("fails", "most"), [(_hit, 8), (_late_discard, 25), (_refused_start, 3), (_shut_down, 1)])
def test_a_trace_is_made_small_and_stays_right(fails: Callable[[Trace], bool], most: int) -> None:
    """What made it interesting is left, in a few events; dues are unchanged, and the reference comes to them."""
    for trace in [t for t in (generate(seed).trace for seed in range(60)) if fails(t)][:4]:
        small = shrink_trace(trace, accepts=_accepts, fails=fails)
        assert fails(small)
        assert _accepts(small)
        assert len(small.events) <= most, f"seed {trace.header.seed}: {[e.event for e in small.events]}"
        dues = {e.label: e.due for e in trace.events if isinstance(e, Materialize) and e.due}
        for event in small.events:
            if isinstance(event, Materialize) and event.due:
                _is_part(event, dues[event.label].rows)


def _is_part(event: Materialize, rows: dict[str, dict[str, list[int]]]) -> None:
    assert event.due is not None
    for key, of_key in event.due.rows.items():
        for req, column in of_key.items():
            assert column == rows[key][req], f"step {event.label}: {key} of {req} is due anew"


def test_nothing_is_done_where_nothing_fails_any_more() -> None:
    """A trace of which every smaller one is right stays whole."""
    trace = generate(3).trace
    assert shrink_trace(trace, accepts=_accepts, fails=lambda _: False) is trace


def test_a_life_ends_where_its_end_is_told() -> None:
    """An id that is used again is another life, and each step of a life is counted."""
    for seed in range(40):
        events = generate(seed).trace.events
        lives = find_lives(events)
        admissions = [(i, a.req) for i, e in enumerate(events) if isinstance(e, Start) for a in e.admitted]
        first_seen = {lives.at[i][req] for i, req in admissions}
        assert first_seen == set(lives.lengths), f"seed {seed}"
        told = [life for ended in lives.ended for life in ended.values()]
        assert len(told) == len(set(told)), f"seed {seed}: a life ends twice"
        steps = sum(len(e.scheduled) for e in events if isinstance(e, Start))
        assert sum(lives.lengths.values()) == steps
