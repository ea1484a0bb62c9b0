"""What an engine might do is told from what none does."""

from __future__ import annotations

import pytest

from conformance.schedules import generate
from conformance.schedules.possible import engine_might
from conformance.schedules.trace import Save, Start, Unsaved


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_drawn_traces_are_possible(first: int) -> None:
    """Every trace of the generator, and every beginning of one."""
    for seed in range(first, first + 50):
        events = generate(seed).trace.events
        assert engine_might(events), f"seed {seed}"
        assert engine_might(events[: seed % len(events)])


def test_a_step_that_is_missing_is_noticed() -> None:
    """Without its start, its save, or a step in the middle of a request, it is no engine's doing."""
    for seed in range(20):
        events = generate(seed).trace.events
        last = max(i for i, e in enumerate(events) if isinstance(e, Start))
        for index, event in enumerate(events[:last]):
            computes = isinstance(event, (Save, Unsaved)) and event.batch and getattr(event, "error", None) is None
            if computes or (isinstance(event, Start) and event.scheduled):
                assert not engine_might([*events[:index], *events[index + 1 :]]), f"seed {seed}, without event {index}"
