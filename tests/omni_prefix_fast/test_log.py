"""The deferred log: who holds chunks, what a sealed write is given, and bytes charged once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.log import BudgetTicket, DeferredLog, DeviceBudget, LogChunk
from omni_prefix_fast.tasks import DeferredWrite
from tests.omni_prefix_fast.harness import ManualRuntime, column, filled


def layout_of(step_id: int, counts: Mapping[str, int], first_slot: int = 0) -> StepLayout:
    """Requests one after another on consecutive slots."""
    offsets = [0, *np.cumsum(list(counts.values())).tolist()]
    return StepLayout(
        step_id,
        tuple(counts),
        {r: i for i, r in enumerate(counts)},
        counts=tuple(counts.values()),
        offsets=tuple(offsets),
        starts=tuple(0 for _ in counts),
        ends=tuple(counts.values()),
        slots=np.arange(first_slot, first_slot + offsets[-1]),
    )


class Log:
    """A log, its budget, and short words for what happens to them."""

    def __init__(self, limit: int = 1000) -> None:
        self.log = DeferredLog()
        self.budget = DeviceBudget(limit)
        self.task_id = 0

    def append(self, counts: Mapping[str, int], keys: Sequence[str] = ("d",), nbytes: int = 10) -> LogChunk:
        """Append a step; the row at slot s is 100 * step + s. Opens writes as the machine does."""
        step = self.log.next_chunk
        layout = layout_of(step, counts, first_slot=step * 10)
        ticket = self.budget.reserve(nbytes)
        assert ticket is not None
        rows = {key: filled([100 * step + s for s in layout.slots.tolist()], 2) for key in keys}
        chunk = self.log.append(layout, np.full(layout.num_tokens, step + 1), rows, ticket)
        for req_id in counts:
            if req_id not in self.log.open_writes:
                self.task_id += 1
                self.log.open_writes[req_id] = DeferredWrite(
                    self.task_id, step, ManualRuntime(), req_id=req_id, write_n=1, first_chunk=chunk.chunk_id
                )
        return chunk


def test_sealed_write_has_its_request_rows_of_every_step() -> None:
    """A write covers its own rows of each chunk since it was opened, with their slots and versions, key by key."""
    it = Log()
    it.append({"A": 2, "B": 1})
    it.append({"B": 1}, keys=("d", "e"))
    it.append({"B": 1, "A": 1}, keys=("e",))
    task = it.log.seal("A")
    assert task is not None
    assert task.pieces == []
    it.log.fill(task)
    rows = {p.key: [v for part in p.rows for v in column(part)] for p in task.pieces}
    slots = {p.key: p.slots.tolist() for p in task.pieces}
    versions = {p.key: p.versions.tolist() for p in task.pieces}
    assert rows == {"d": [0, 1], "e": [221]}
    assert slots == {"d": [0, 1], "e": [21]}
    assert versions == {"d": [1, 1], "e": [3]}


def test_sealing_ends_a_write() -> None:
    """Rows appended after the seal belong to the request's next write."""
    it = Log()
    it.append({"A": 1})
    first = it.log.seal("A")
    it.append({"A": 1})
    second = it.log.seal("A")
    assert first is not None
    assert second is not None
    assert [c.chunk_id for c in it.log.chunks_of(first)] == [0]
    assert [c.chunk_id for c in it.log.chunks_of(second)] == [1]
    assert it.log.seal("A") is None
    assert it.log.seal("never seen") is None


def test_chunk_is_held_until_everybody_is_done() -> None:
    """Its bytes come back when the last request's rows are written and the last reader has fetched."""
    it = Log()
    chunk = it.append({"A": 1, "B": 1})
    it.log.hold(chunk)
    for req_id in ("A", "B"):
        task = it.log.seal(req_id)
        assert task is not None
        it.log.written(task)
        assert it.budget.charged == 10
    it.log.release(chunk)
    assert it.budget.charged == 0
    assert not it.log.chunks


def test_forcing_a_chunk_out_seals_the_writes_that_cover_it() -> None:
    """Writes opened after the chunk, and of requests already written, are left alone."""
    it = Log()
    first = it.append({"A": 1, "B": 1})
    done = it.log.seal("B")
    assert done is not None
    it.log.written(done)
    it.append({"B": 1, "C": 1})
    assert it.log.oldest() is first
    sealed = it.log.seal_chunk(first)
    assert [task.req_id for task in sealed] == ["A"]
    assert set(it.log.open_writes) == {"B", "C"}
    it.log.written(sealed[0])
    oldest = it.log.oldest()
    assert oldest is not None
    assert oldest.chunk_id == 1


def test_forcing_a_chunk_out_leaves_the_next_write_of_a_sealed_one_open() -> None:
    """B's rows of the chunk are on their way already: what B computed since is no concern of the chunk."""
    it = Log()
    first = it.append({"B": 1})
    it.log.seal("B")
    it.append({"B": 1})
    assert it.log.seal_chunk(first) == []
    assert set(it.log.open_writes) == {"B"}


def test_sealed_writes_of_a_chunk_are_known_until_they_are_written() -> None:
    """Whoever needs a chunk's bytes finds the writes that are still on their way, whoever sealed them."""
    it = Log()
    first, second = it.append({"A": 1, "B": 1}), it.append({"A": 1})
    sealed = it.log.seal("A")
    assert sealed is not None
    assert it.log.sealed_of(first) == it.log.sealed_of(second) == [sealed]
    it.log.written(sealed)
    assert it.log.sealed_of(first) == []
    assert it.log.oldest() is first


def test_a_long_write_lets_go_piece_by_piece() -> None:
    """At most so many chunks a call, oldest first; it counts as sealed until the last one."""
    it = Log()
    chunks = [it.append({"A": 1, "B": 1} if i % 2 else {"A": 1}) for i in range(5)]
    sealed = it.log.seal("A")
    assert sealed is not None
    assert not it.log.written(sealed, 2)
    assert [c.chunk_id for c in it.log.chunks_of(sealed)] == [2, 3, 4]
    assert it.log.sealed_of(chunks[1]) == []
    assert it.log.sealed_of(chunks[2]) == [sealed]
    assert not it.log.written(sealed, 2)
    assert it.log.written(sealed, 2)
    assert not it.log.sealed
    assert list(it.log.chunks) == [1, 3]  # B's rows are still to come


def test_clear_gives_every_byte_back() -> None:
    """At shutdown nothing stays charged; a late release changes nothing."""
    it = Log()
    chunk = it.append({"A": 1})
    it.log.hold(chunk)
    it.append({"B": 1})
    it.log.clear()
    assert it.budget.charged == 0
    it.log.release(chunk)
    assert it.budget.charged == 0
    assert it.log.oldest() is None


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=20))
def test_budget_is_charged_once(requests: list[tuple[int, bool]]) -> None:
    """Charges never pass the limit nor fall below zero, and each is given back once, however often it is released."""
    budget = DeviceBudget(100)
    live: list[BudgetTicket] = []
    for nbytes, release in requests:
        before = sum(ticket.nbytes for ticket in live)
        ticket = budget.reserve(nbytes)
        assert (ticket is None) == (before + nbytes > 100)
        if ticket is not None:
            live.append(ticket)
        if release and live:
            gone = live.pop(0)
            gone.release()
            gone.release()
        assert budget.charged == sum(ticket.nbytes for ticket in live)


def test_chunk_rows_do_not_move_with_the_slot() -> None:
    """A planned read of a chunk sees the rows that were appended, whatever is appended for the same slot later."""
    log = DeferredLog()
    budget = DeviceBudget(100)
    tickets = [budget.reserve(1), budget.reserve(1)]
    layout = layout_of(0, {"A": 1})
    chunks = [
        log.append(layout, np.array([i + 1]), {"d": torch.tensor([[i]])}, ticket)
        for i, ticket in enumerate(tickets)
        if ticket is not None
    ]
    assert [chunk.rows["d"].item() for chunk in chunks] == [0, 1]


def test_limit_of_zero_defers_nothing() -> None:
    """A budget of zero bytes holds no row, and an empty row always fits."""
    budget = DeviceBudget(0)
    assert budget.reserve(1) is None
    assert budget.reserve(0) is not None
    assert budget.charged == 0
