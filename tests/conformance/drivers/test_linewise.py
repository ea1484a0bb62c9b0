"""Line by line, the production cache comes to what is due, and a run replays."""

from __future__ import annotations

import sys

import pytest

from conformance.drivers import linewise
from conformance.drivers.asynchronous import AsynchronousFast
from conformance.drivers.linewise import LinewiseFast
from conformance.schedules import generate


@pytest.mark.parametrize("seed", range(12))
def test_drawn_traces_come_to_what_is_due(seed: int) -> None:
    """With many times the points of the asynchronous subject; and nothing is traced afterwards."""
    trace, before = generate(seed).trace, sys.gettrace()
    ran = LinewiseFast().run(trace, seed=seed)
    assert ran.failure is None, f"seed {seed}: {ran.failure}"
    assert ran.points > 4 * AsynchronousFast().run(trace, seed=seed).points
    assert sys.gettrace() is before


def test_a_run_is_replayed_exactly() -> None:
    """Every moment of it, in order."""
    subject, trace = LinewiseFast(), generate(7).trace
    first = subject.run(trace, seed=7, record=True)
    assert first.interleaving is not None
    assert first.interleaving.switches
    for _ in range(3):
        assert subject.run(trace, interleaving=first.interleaving, record=True) == first


def test_modules_are_there() -> None:
    """A module that is renamed would not be traced any more."""
    assert [name for name in linewise.MODULES if name not in sys.modules] == []
