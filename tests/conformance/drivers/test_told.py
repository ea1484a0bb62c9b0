"""What is recorded of the reference model is what it was asked and what it answered; and it replays."""

from __future__ import annotations

import pytest

from conformance.drivers.reference import ReferenceDriver
from conformance.drivers.registry import subject
from conformance.drivers.subjects import run_events
from conformance.drivers.told import ToldDriver, header_of
from conformance.schedules import Trace, generate
from conformance.schedules.trace import CLOSED, Event, Fail, Rest, Save, Start
from omni_prefix_ref import KeySpec, Settings


def _told(trace: Trace) -> Trace:
    driver = ReferenceDriver(trace.header, driver=ToldDriver)
    assert run_events(trace, driver).failure is None
    assert isinstance(driver.cache, ToldDriver)
    return driver.cache.trace()


def _plain(event: Event) -> Event:
    """An event without what the reference model is not told: padding, and how a request came back."""
    if isinstance(event, Start):
        admitted = [admission.model_copy(update={"resumed": False}) for admission in event.admitted]
        return event.model_copy(update={"admitted": admitted})
    if isinstance(event, Save):
        return event.model_copy(update={"padded": 0, "label": 0, "widths": {}})
    return event


SEEDS = [seed for seed in range(40) if not any(isinstance(event, Fail) for event in generate(seed).trace.events)][:15]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trace_through_the_model_is_told_as_it_was(seed: int) -> None:
    """Call for call: slots, rows, errors, and outputs as what is due."""
    trace = generate(seed).trace
    asked = [_plain(event) for event in trace.events if not isinstance(event, Rest)]
    assert [_plain(event) for event in _told(trace).events] == asked


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_told_replays(seed: int) -> None:
    """On the production cache, where nothing in it asks for a refusal by width or by a late call."""
    trace = _told(generate(seed).trace)
    events = [event for event in trace.events if not (isinstance(event, Save) and event.widths)]
    events = [event for event in events if getattr(event, "error", None) != CLOSED]
    assert subject("fast-eager").run(trace.model_copy(update={"events": events})).failure is None


def test_a_key_that_no_lane_fits_is_refused() -> None:
    """Rows of a trace are whole lanes."""
    settings = Settings(1, 2, (KeySpec("odd", 3),), staging_depth=1, page_rows=1, budget_bytes=0)
    with pytest.raises(ValueError, match="'odd' have 3 bytes"):
        header_of(settings)
