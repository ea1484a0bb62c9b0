"""The reference model on random traces: every outcome is the one due, and every rule holds after every action."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.drivers.reference import ReferenceDriver
from conformance.schedules import generate, replay

SEEDS = st.integers(min_value=0, max_value=1 << 40)


@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_eager_outcomes_are_those_due(seed: int) -> None:
    """With every write done at once."""
    trace = generate(seed).trace
    assert replay(trace, ReferenceDriver(trace.header)) is None


@given(seed=SEEDS, lag=st.integers(min_value=0, max_value=1 << 40))
@settings(max_examples=60, deadline=None)
def test_outcomes_do_not_depend_on_when_other_threads_move(seed: int, lag: int) -> None:
    """With a committer that lags and a prefetch thread that fetches at any time."""
    trace = generate(seed).trace
    assert replay(trace, ReferenceDriver(trace.header, lag=lag)) is None
