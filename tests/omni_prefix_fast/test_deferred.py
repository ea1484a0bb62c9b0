"""Deferred writes: opened, appended, sealed by a finish, an abort or the byte budget."""

from __future__ import annotations

import pytest

from omni_prefix_fast import (
    ModelCachePolicy,
)
from omni_prefix_fast.machine import CHUNKS_AT_ONCE
from omni_prefix_fast.types import Occupancy
from tests.omni_prefix_fast.harness import (
    Engine,
    per_token,
)

DEFER = ModelCachePolicy(deferred_keys=frozenset({"d"}))


def test_deferred_write_opens_appends_and_is_sealed_by_the_finish() -> None:
    """One open write a request over all its steps; its rows are in transit until the finish, then in the pool."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0, 1], 0, 3)], mm={"d": per_token(1)}), "A")
    engine.take(engine.step(cached=[("A", 3)], mm={"d": per_token(1)}), "A")
    seen = engine.settled()
    assert {r: n for r, (_, n) in seen.open_writes.items()} == {"A": 1}
    assert set(seen.occupancy["d"][:6]) == {Occupancy.IN_TRANSIT}
    assert seen.charged == 6 * 4
    assert engine.cache.statistics().writes_deferred == 1
    engine.start(finished=["A"])
    seen = engine.settled()
    assert set(seen.occupancy["d"][:6]) == {Occupancy.COMMITTED}
    assert (seen.open_writes, seen.charged, seen.chunks) == ({}, 0, ())
    assert engine.mm(engine.step(new=[("B", [0, 1], 6, 1)]), "d", "B") == [0, 1, 2, 3, 4, 5]


def test_abort_lands_the_rows() -> None:
    """A request aborted between two steps is a finished one: what it computed is hit by the next."""
    engine = Engine(policy=DEFER)
    engine.cache.discard_step(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)}))
    step = engine.step(new=[("B", [0, 1], 4, 1)], finished=["A"], mm={"d": per_token(1)})
    assert engine.mm(step, "d", "B") == [0, 1, 2, 3, 4]


def test_budget_forces_the_oldest_rows_out() -> None:
    """Under pressure open writes are sealed, oldest first, and counted; the request's next write is its second."""
    engine = Engine(policy=DEFER, gpu_staging_bytes=4 * 4)
    engine.take(engine.step(new=[("A", [0, 1], 0, 4)], mm={"d": per_token(1)}), "A")
    engine.take(engine.step(cached=[("A", 2)], mm={"d": per_token(1)}), "A")
    seen = engine.cache.inspect()
    assert seen.charged == 2 * 4
    assert list(seen.occupancy["d"][:6]) == [Occupancy.COMMITTED] * 4 + [Occupancy.IN_TRANSIT] * 2
    assert {r: n for r, (_, n) in seen.open_writes.items()} == {"A": 2}
    assert engine.cache.statistics().writes_forced == 1
    assert engine.mm(engine.step(new=[("B", [0, 1], 6, 1)]), "d", "B") == [0, 1, 2, 3, 4, 5]


@pytest.mark.eager_only("otherwise the prefetch thread has fetched the read before the budget needs it")
def test_budget_completes_reads_that_hold_the_rows() -> None:
    """A planned read on log rows does not keep the bytes: it is fetched early and hands over the same rows."""
    engine = Engine(policy=DEFER, gpu_staging_bytes=5 * 4)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)}), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)], mm={"d": per_token(1)})
    engine.take(engine.step(new=[("C", [2], 0, 4)], base={"C": 60}, mm={"d": per_token(1)}), "C")
    assert engine.cache.statistics().reads_preserved == 1
    assert engine.cache.inspect().charged <= 5 * 4
    assert engine.cache.footprint().pending_bytes > 0
    assert engine.mm(late, "d", "B") == [0, 1, 2, 3, 4]
    assert engine.cache.footprint().pending_bytes == 0


@pytest.mark.parametrize("budget", [0, 15])
def test_rows_that_never_fit_the_budget_are_written_at_once(budget: int) -> None:
    """A step larger than the whole budget joins the immediate write; nothing is charged."""
    engine = Engine(policy=DEFER, gpu_staging_bytes=budget)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)}), "A")
    seen = engine.settled()
    assert (seen.charged, seen.open_writes) == (0, {})
    assert set(seen.occupancy["d"][:4]) == {Occupancy.COMMITTED}
    assert engine.mm(engine.step(new=[("B", [0, 1], 4, 1)]), "d", "B") == [0, 1, 2, 3]


def test_sealed_write_skips_slots_of_a_newer_tenant() -> None:
    """A's deferred rows land after B took the block over: B's stay, the lost ones are counted."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0, 1], 0, 6)], mm={"d": per_token(1)}), "A")
    engine.cache.drain()
    engine.take(engine.step(new=[("B", [1], 0, 4)], base={"B": 80}, mm={"d": per_token(1)}), "B")
    engine.take(engine.step(new=[("C", [0, 2], 4, 1)], finished=["A", "B"], mm={"d": per_token(1)}), "C")
    engine.cache.drain()
    assert engine.cache.statistics().rows_lost == 2
    assert engine.mm(engine.step(new=[("D", [1, 3], 4, 1)]), "d", "D") == [80, 81, 82, 83]
    assert engine.mm(engine.step(new=[("E", [0, 3], 4, 1)]), "d", "E") == [0, 1, 2, 3]


@pytest.mark.eager_only("the lock is the same in each mode")
def test_a_long_request_ends_under_many_short_holds_of_the_lock() -> None:
    """The chunks of hundreds of steps are let go of some at a time, with the state lock free in between."""
    steps = 2 * CHUNKS_AT_ONCE + 1
    blocks = list(range(-(-steps // 4)))
    engine = Engine(policy=DEFER, num_blocks=len(blocks))
    engine.cache.discard_step(engine.step(new=[("A", blocks, 0, 1)], mm={"d": per_token(1)}))
    for _ in range(steps - 1):
        engine.cache.discard_step(engine.step(cached=[("A", 1)], mm={"d": per_token(1)}))
    assert len(engine.cache.inspect().chunks) == steps
    before = engine.cache.lock_times().acquisitions
    engine.start(finished=["A"])
    assert engine.cache.lock_times().acquisitions - before > steps // CHUNKS_AT_ONCE
    assert (engine.cache.inspect().chunks, engine.cache.inspect().charged) == ((), 0)
