"""An interleaving is made small: what is left fails, with no switch too many."""

from __future__ import annotations

import pytest

from conformance.interleave import Replay, Uniform, sample, shrink_switches
from conformance.interleave.explore import run_once
from tests.conformance.interleave.planted import PLANTED


@pytest.mark.parametrize("name", PLANTED)
def test_a_drawn_interleaving_is_made_small(name: str) -> None:
    """Uniform choice fails with many switches; a few are enough, and each of these is needed."""
    faulty, _ = PLANTED[name]
    found = sample(faulty, (Uniform(n) for n in range(200)))
    assert found.error is not None

    def fails(switches: list[tuple[int, str]]) -> bool:
        return type(run_once(faulty, Replay(switches))[1]) is type(found.error)

    small = shrink_switches(found.switches, fails)
    print(f"{name}: {len(found.switches)} switches, {len(small)} are left: {small}")
    assert fails(small)
    assert len(small) <= 4
    assert not any(fails(small[:at] + small[at + 1 :]) for at in range(len(small)))
