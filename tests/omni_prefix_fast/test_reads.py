"""A hit read: what a plan resolves to, what it holds, and what is gathered, into memory that is never clean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch

from omni_prefix_fast import HIDDEN_KEY, PrefixBlockPool, PrefixCacheConfig
from omni_prefix_fast.device import HostDevice
from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.log import DeferredLog, DeviceBudget, LogChunk
from omni_prefix_fast.pool import RowSpec
from omni_prefix_fast.reads import HitRead, ReadState
from omni_prefix_fast.slots import SlotTable
from omni_prefix_fast.tasks import ImmediateWrite
from tests.omni_prefix_fast.harness import ManualRuntime, column, filled

DIRT = 99


def dirty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory as a recycled output leaves it."""
    return torch.full(tuple(shape), DIRT, dtype=dtype)


class Tables:
    """A pool, a table and a log with an immediate key (hidden) and a deferred one."""

    def __init__(self) -> None:
        self.table = SlotTable(16)
        self.pool = PrefixBlockPool(PrefixCacheConfig(num_blocks=4, block_size=4))
        self.log = DeferredLog()
        self.budget = DeviceBudget(1000)
        self.writers: dict[int, ImmediateWrite] = {}
        for key in (HIDDEN_KEY, "d"):
            self.table.open_key(key, deferred=key == "d")
            self.pool.open(key, RowSpec.of(filled([0], 2)))

    def commit(self, key: str, slots: Iterable[int], step: int = 0) -> None:
        """Claim the slots for one key and put rows (value = slot) into the pool."""
        at = np.array(list(slots))
        versions = self.table.claim(at, step, (key,))
        self.pool.write(key, at, filled(at.tolist(), 2))
        self.table.commit(key, at, versions)

    def append(self, slots: Sequence[int], values: Sequence[int]) -> LogChunk:
        """Claim the slots for d, with rows in the log."""
        at = np.array(slots)
        step = self.log.next_chunk
        versions = self.table.claim(at, step, ("d",))
        layout = StepLayout(
            step, ("A",), {"A": 0}, counts=(len(at),), offsets=(0, len(at)), starts=(0,), ends=(len(at),), slots=at
        )
        ticket = self.budget.reserve(10)
        assert ticket is not None
        chunk = self.log.append(layout, versions, {"d": filled(values, 2)}, ticket)
        self.table.log_append("d", at, chunk.chunk_id)
        return chunk

    def plan(self, slots: Sequence[int], keys: Sequence[str] = (HIDDEN_KEY, "d")) -> HitRead:
        """A planned read of the slots as positions 10, 11, ..."""
        read = HitRead("B", 5, (10, 10 + len(slots)), np.array(slots), ManualRuntime())
        read.plan(keys, self.table, self.log, self.writers)
        return read

    def gather(self, read: HitRead) -> dict[str, list[int]]:
        """Values of the gathered rows of the span, by key."""
        rows = read.gather(read.plans, self.pool, HostDevice(), dirty)
        return {key: column(of_key[: len(read)]) for key, of_key in rows.items()}

    def pinned(self) -> list[int]:
        """Slots that somebody pins."""
        return [int(slot) for slot in np.flatnonzero(self.table.pins)]


def test_plan_names_pool_rows_log_rows_and_holes() -> None:
    """Each position resolves on its own; what is gathered has rows where rows are, zeros in holes, in any memory."""
    tables = Tables()
    tables.commit(HIDDEN_KEY, [0, 1, 2, 3])
    tables.commit("d", [4, 5])
    tables.append([6, 8], [60, 80])
    tables.append([9], [90])
    read = tables.plan([4, 9, 7, 6, 5, 8])
    plan = read.plans["d"]
    assert plan.pool is not None
    assert plan.pool.tolist() == [0, 4]
    assert [(part.chunk.chunk_id, part.rows.tolist(), part.positions.tolist()) for part in plan.log] == [
        (0, [0, 1], [3, 5]),
        (1, [0], [1]),
    ]
    assert plan.holes.tolist() == [2]
    assert tables.gather(read) == {"d": [4, 90, 0, 60, 5, 80]}
    assert tables.pinned() == [4, 5]
    assert [chunk.readers for chunk in tables.log.chunks.values()] == [1, 1]


@pytest.mark.parametrize("slots", [[0, 1, 2, 3, 8, 9, 10, 11], [1, 2, 3], [3, 8]], ids=["blocks", "part", "across"])
def test_span_all_in_the_pool(slots: list[int]) -> None:
    """A span that the pool holds whole is gathered at once, with room for the step's own rows behind it."""
    tables = Tables()
    tables.commit(HIDDEN_KEY, range(12))
    read = tables.plan(slots, [HIDDEN_KEY])
    read.tail = 3
    rows = read.gather(read.plans, tables.pool, HostDevice(), dirty)[HIDDEN_KEY]
    assert column(rows) == [*slots, DIRT, DIRT, DIRT]


def test_rows_in_transit_name_the_writer_to_wait_for() -> None:
    """An immediate row on its way is a pool row once its writer is done; each writer is named."""
    tables = Tables()
    tables.commit(HIDDEN_KEY, [0])
    for step in (7, 8):
        tables.table.claim(np.array([step - 6]), step, (HIDDEN_KEY,))
        tables.writers[step] = ImmediateWrite(step, step, ManualRuntime(), 0)
    read = tables.plan([0, 1, 2], [HIDDEN_KEY])
    assert set(read.waits) == set(tables.writers.values())
    assert tables.pinned() == [0, 1, 2]


def test_hole_in_hidden_rows_fails_the_read_where_they_are_owed() -> None:
    """The first hole's position and slot are named; without hidden rows owed nothing fails."""
    tables = Tables()
    tables.commit(HIDDEN_KEY, [0, 1, 3])
    read = tables.plan([0, 1, 2, 3])
    told = []
    for owes_hidden in (False, True):
        read.settle(owes_hidden=owes_hidden)
        told.append(read.failure or "")
    assert told[0] == ""
    assert "'B' hit positions 10..13, but 1 of them" in told[1]
    assert "position 12 (slot 2)" in told[1]


def test_hidden_rows_never_saved_are_all_holes() -> None:
    """A read planned before the key was opened owes the whole span."""
    tables = Tables()
    read = tables.plan([0, 1], ["d"])
    read.settle(owes_hidden=True)
    assert read.failure is not None
    assert "2 of them" in read.failure


def test_key_without_any_row_is_not_gathered() -> None:
    """All holes: the key is absent from what was gathered."""
    tables = Tables()
    tables.commit(HIDDEN_KEY, [0, 1])
    assert tables.gather(tables.plan([0, 1])) == {HIDDEN_KEY: [0, 1]}


@pytest.mark.parametrize("end", ["fetched", "dropped", "unplanned"])
def test_everything_is_let_go_once(end: str) -> None:
    """Pins and chunks come back exactly once, whichever way the read ends, and however often."""
    tables = Tables()
    tables.commit(HIDDEN_KEY, [0, 1])
    chunk = tables.append([0], [5])
    other = tables.plan([0, 1])
    read = tables.plan([0, 1])
    for _ in range(2):
        if end == "unplanned":
            read.unplan(tables.table, tables.log)
        else:
            read.release(tables.table, tables.log, ReadState(end))
    assert read.state is ReadState(end)
    assert chunk.readers == 1
    assert tables.table.pins[:2].tolist() == [0, 1]
    other.release(tables.table, tables.log, ReadState.FETCHED)
    assert tables.pinned() == []
    assert chunk.readers == 0


def test_planning_again_resolves_to_the_new_tenant() -> None:
    """After `unplan` a plan names the rows that are there then."""
    tables = Tables()
    tables.append([0], [5])
    read = tables.plan([0], ["d"])
    assert tables.gather(read) == {"d": [5]}
    read.unplan(tables.table, tables.log)
    tables.append([0], [6])
    read.plan(["d"], tables.table, tables.log, tables.writers)
    assert tables.gather(read) == {"d": [6]}


def test_planned_log_rows_survive_a_rewrite_of_their_slot() -> None:
    """The chunk is named, not the slot."""
    tables = Tables()
    tables.append([0, 1], [5, 6])
    read = tables.plan([0, 1], ["d"])
    tables.append([0, 1], [7, 8])
    assert tables.gather(read) == {"d": [5, 6]}


def test_forgotten_key_is_owed_no_more() -> None:
    """A demoted key lets its chunks go and is not gathered; the other keys stay planned."""
    tables = Tables()
    tables.commit(HIDDEN_KEY, [1])
    chunk = tables.append([0], [5])
    read = tables.plan([0, 1])
    assert read.holds(chunk)
    read.forget("d", tables.log)
    assert not read.holds(chunk)
    assert chunk.readers == 0
    assert tables.gather(read) == {HIDDEN_KEY: [0, 1]}
    read.release(tables.table, tables.log, ReadState.FETCHED)
    assert chunk.readers == 0
    assert tables.pinned() == []
