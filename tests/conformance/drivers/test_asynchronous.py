"""The asynchronous subject: right on drawn traces, replayable, and not to be fooled by a faulty cache."""

from __future__ import annotations

import pytest

from conformance.drivers.asynchronous import AsynchronousFast
from conformance.schedules import generate

SEEDS = range(40)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_drawn_traces_come_to_what_is_due(first: int) -> None:
    """Outputs, errors and tables at rest are right however the threads are interleaved."""
    subject = AsynchronousFast()
    for seed in range(first, first + 10):
        ran = subject.run(generate(seed).trace, seed=seed)
        assert ran.failure is None, f"seed {seed}: {ran.failure}"
        assert ran.events == len(generate(seed).trace.events)


@pytest.mark.parametrize("seed", range(5))
def test_a_run_is_replayed_exactly(seed: int) -> None:
    """The interleaving that a run tells gives the same run, ten times of ten: every moment of it, in order."""
    subject, trace = AsynchronousFast(), generate(seed).trace
    first = subject.run(trace, seed=seed, record=True)
    assert first.interleaving is not None
    assert first.interleaving.switches, f"seed {seed}: no thread was interleaved"
    for _ in range(10):
        again = subject.run(trace, interleaving=first.interleaving, record=True)
        assert again == first
