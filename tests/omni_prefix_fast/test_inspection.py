"""What an inspection tells of a cache at one moment."""

from __future__ import annotations

import dataclasses

import pytest

from omni_prefix_fast import HIDDEN_KEY, ModelCachePolicy
from omni_prefix_fast.types import Holder, Occupancy, TaskState
from tests.omni_prefix_fast import harness

DEFER = ModelCachePolicy(deferred_keys=frozenset({"d"}))


def engine_with_everything() -> harness.Engine:
    """A's deferred write is open, B hit A's block, and its step is not consumed."""
    engine = harness.Engine(num_blocks=4, policy=DEFER, staging_depth=2, eager=True)
    engine.take(engine.step(new=[("A", [0], 0, 3)], mm={"d": harness.per_token(1)}), "A")
    engine.step(new=[("B", [0, 1], 3, 2)])
    return engine


def test_inspection_names_the_tables_of_the_machine() -> None:
    """Versions, owners, pins, occupancy, tasks, writes, watermarks, bytes, steps, reads and pages."""
    seen = engine_with_everything().cache.inspect()
    assert seen.version[:6] == (1, 1, 1, 1, 1, 0)
    assert seen.owner[:6] == (0, 0, 0, 1, 1, -1)
    assert seen.pins[:6] == (1, 1, 1, 0, 0, 0)
    assert seen.occupancy[HIDDEN_KEY][:6] == (Occupancy.COMMITTED,) * 5 + (Occupancy.ABSENT,)
    assert seen.occupancy["d"][:4] == (Occupancy.IN_TRANSIT,) * 3 + (Occupancy.ABSENT,)
    ((task_id, write_n),) = seen.open_writes.values()
    assert (list(seen.open_writes), write_n) == (["A"], 1)
    assert seen.tasks == {task_id: TaskState.PENDING}
    assert seen.emitted == {"A": 3, "B": 5}
    assert (seen.charged, seen.chunks) == (3 * 4, (0,))
    assert seen.unconsumed == (1,)
    assert list(seen.reads) == [(1, "B")]
    assert sorted(seen.pages) == [(), (Holder("step", 1),)]


def test_inspection_is_a_copy_and_can_be_compared() -> None:
    """Looking changes nothing; two looks are equal until something happens; a look cannot be changed."""
    engine = engine_with_everything()
    before = engine.settled()
    assert engine.cache.inspect() == before
    engine.cache.discard_step(1)
    assert engine.cache.inspect() != before
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.charged = 0  # type: ignore[misc]


def test_footprint_counts_rows_gathered_early() -> None:
    """Rows of a hit that a claim forced out are pending until they are handed over; device bytes follow the budget."""
    engine = engine_with_everything()
    assert engine.cache.footprint().pending_bytes == 0
    assert engine.cache.footprint().device_bytes == 3 * 4
    engine.cache.discard_step(engine.step(new=[("C", [0], 0, 4)]))
    assert engine.cache.footprint().pending_bytes > 0
    engine.take(1, "B")
    assert engine.cache.footprint().pending_bytes == 0
    assert engine.cache.footprint().table_bytes > 0
