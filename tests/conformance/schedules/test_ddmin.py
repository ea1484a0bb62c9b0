"""Delta debugging ends with what is needed, and with nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conformance.schedules.ddmin import ddmin


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=6))))
def test_what_is_needed_is_left(case: tuple[int, set[int]]) -> None:
    """Where failing needs certain items, these are left, in order."""
    length, needed = case
    assert ddmin(range(length), lambda kept: needed <= set(kept)) == sorted(needed)


@given(st.sets(st.integers(0, 30), min_size=3))
def test_no_single_item_can_be_left_out(items: set[int]) -> None:
    """Also where what is needed depends on what else is there."""

    def fails(kept: list[int]) -> bool:
        return sum(kept) % 3 == total % 3 and len(kept) >= 2

    total = sum(items)
    kept = ddmin(sorted(items), fails)
    assert fails(kept) or kept == sorted(items)
    assert not any(fails(kept[:at] + kept[at + 1 :]) for at in range(len(kept)))
