"""Builders apply every event once, those of one step in order, and end."""

from __future__ import annotations

import pytest

from conformance.drivers.builders import Builders
from conformance.interleave import SerialRuntime, Uniform
from conformance.schedules.trace import Discard, Event


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_events_of_a_step_stay_in_order(count: int, seed: int) -> None:
    """However threads are interleaved; and `wait` returns once all of them were applied."""
    runtime = SerialRuntime(Uniform(seed))
    applied: list[tuple[int, int]] = []

    def apply(index: int, event: Event) -> None:
        runtime.point("applying")
        assert isinstance(event, Discard)
        applied.append((event.label, index))

    def program() -> None:
        builders = Builders(runtime, count, apply)
        for index in range(9):
            builders.post(index, Discard(label=index % 4))
            if index == 5:
                builders.wait()
                assert len(applied) == 6
        builders.close()

    runtime.run(program)
    assert sorted(index for _, index in applied) == list(range(9))
    for label in range(4):
        of_step = [index for found, index in applied if found == label]
        assert of_step == sorted(of_step)
