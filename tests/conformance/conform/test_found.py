"""Traces that `omni-prefix conform` once found to fail, made small: each is right now, however its threads run."""

from pathlib import Path

import pytest

from conformance.drivers.registry import subject
from conformance.schedules import read

FOUND = sorted(Path(__file__).with_name("found").glob("*.jsonl"))
SEEDS = 40


def test_there_are_traces() -> None:
    """The check below checks something."""
    assert len(FOUND) >= 2


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_found_trace_is_right(path: Path) -> None:
    """A trace that failed is right with the interleaving that it failed with, with others, and eagerly."""
    trace = read(path)
    assert subject("fast-eager").run(trace).failure is None
    threads = subject("fast-async")
    assert threads.run(trace, interleaving=trace.interleaving).failure is None
    for seed in range(SEEDS):
        assert threads.run(trace, seed=seed).failure is None
