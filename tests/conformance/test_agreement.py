"""Reference model and production cache agree on random traces, event by event.

`OMNI_PREFIX_TRACES` says how many traces (60 if it is not set), `OMNI_PREFIX_SEED` which one is the first.
"""

from __future__ import annotations

import os

import pytest

from conformance.drivers.agree import agree_on_seeds

TRACES = int(os.environ.get("OMNI_PREFIX_TRACES", "60"))
SEED = int(os.environ.get("OMNI_PREFIX_SEED", "0"))


@pytest.mark.timeout(60 + TRACES)
def test_reference_and_fast_agree_event_by_event() -> None:
    """Outputs, errors, versions, occupancy, writes, pins, charge, pages and watermarks are equal after every event."""
    different = [f"seed {c.seed}, {c.disagreement}" for c in agree_on_seeds(SEED, TRACES) if c.disagreement is not None]
    assert not different, "\n".join(different[:5])
