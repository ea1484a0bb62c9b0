"""The asynchronous subject: right on drawn traces, replayable, and as exact when it records."""

from __future__ import annotations

from enum import Enum

import pytest

from conformance.drivers.asynchronous import AsynchronousFast
from conformance.schedules import generate


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_drawn_traces_come_to_what_is_due(first: int) -> None:
    """Outputs, errors and tables at rest are right however the threads are interleaved."""
    subject = AsynchronousFast()
    for seed in range(first, first + 10):
        ran = subject.run(generate(seed).trace, seed=seed)
        assert ran.failure is None, f"seed {seed}: {ran.failure}"
        assert ran.events == len(generate(seed).trace.events)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_is_replayed_exactly(seed: int) -> None:
    """The interleaving that a run tells gives the same run, ten times of ten: every moment of it, in order."""
    subject, trace = AsynchronousFast(), generate(seed).trace
    first = subject.run(trace, seed=seed, record=True)
    assert first.interleaving is not None
    assert first.interleaving.switches, f"seed {seed}: no thread was interleaved"
    for _ in range(10):
        again = subject.run(trace, interleaving=first.interleaving, record=True)
        assert again == first


def test_moments_keep_nothing_that_the_cache_uses() -> None:
    """Numbers, names and tuples of them: recording a run changes nothing in it."""
    subject, trace = AsynchronousFast(), generate(2).trace
    ran, unrecorded = subject.run(trace, seed=2, record=True), subject.run(trace, seed=2)
    assert (ran.failure, ran.actions, ran.interleaving) == (None, unrecorded.actions, unrecorded.interleaving)
    assert {moment.thread for moment in ran.moments} >= {"engine", "committer", "builder 0"}
    assert {"call", "return", "block", "run", "claim_slots", "write_pool"} <= {m.action for m in ran.moments}
    assert not unrecorded.moments
    values = [value for moment in ran.moments for value in moment.details.values()]
    assert all(isinstance(value, (int, float, str, tuple, dict, Enum, type(None))) for value in values)
