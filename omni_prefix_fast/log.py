"""The deferred log: device clones of rows that are written to the pool when their request finishes.

One chunk a step holds the step's rows of every deferred key, for all its requests together, with the slots and versions
that the step claimed. A chunk never changes, so a read planned on one of its rows stays right whatever happens to the
slot. Guarantees: device bytes are reserved before the clone is made, charged once, and given back once, when the last
holder lets go. Takes no lock: the caller holds the state lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.tasks import DeferredWrite, WritePiece
from omni_prefix_fast.types import IntArray, Key, ReqId, TaskId


class DeviceBudget:
    """Device bytes charged against a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.charged = 0

    def reserve(self, nbytes: int) -> BudgetTicket | None:
        """Charge `nbytes`, or None if they do not fit now."""
        if self.charged + nbytes > self.limit:
            return None
        self.charged += nbytes
        return BudgetTicket(self, nbytes)


class BudgetTicket:
    """One charge. `release` gives it back, once."""

    def __init__(self, budget: DeviceBudget, nbytes: int) -> None:
        self._budget: DeviceBudget | None = budget
        self.nbytes = nbytes

    def release(self) -> None:
        """Uncharge. Nothing if it was before."""
        if self._budget is not None:
            self._budget.charged -= self.nbytes
            self._budget = None


@dataclass(slots=True)
class LogChunk:
    """Deferred rows of one step."""

    chunk_id: int
    layout: StepLayout
    versions: IntArray
    rows: Mapping[Key, torch.Tensor]
    """`(num_tokens, *feature)` a key, on the device, never changed."""
    ticket: BudgetTicket
    unwritten: set[ReqId]
    """Requests whose rows are not in the pool yet."""
    readers: int = 0
    """Planned, unfetched reads that name rows of the chunk, once a key."""


@dataclass(slots=True)
class DeferredLog:
    """Live chunks, oldest first, the one open write of each request, and sealed writes that have not ended."""

    chunks: dict[int, LogChunk] = field(default_factory=dict)
    open_writes: dict[ReqId, DeferredWrite] = field(default_factory=dict)
    sealed: dict[TaskId, DeferredWrite] = field(default_factory=dict)
    next_chunk: int = 0

    def append(
        self, layout: StepLayout, versions: IntArray, rows: Mapping[Key, torch.Tensor], ticket: BudgetTicket
    ) -> LogChunk:
        """Append the step's rows. Every request of the step has to get an open write."""
        chunk = LogChunk(self.next_chunk, layout, versions, rows, ticket, set(layout.req_ids))
        self.chunks[chunk.chunk_id] = chunk
        self.next_chunk += 1
        return chunk

    def oldest(self) -> LogChunk | None:
        """The chunk that has been held longest."""
        return next(iter(self.chunks.values()), None)

    def chunks_of(self, task: DeferredWrite) -> Iterator[LogChunk]:
        """Live chunks with rows of a deferred write, oldest first."""
        end = self.next_chunk if task.end_chunk is None else task.end_chunk
        for chunk_id in range(task.first_chunk, end):
            chunk = self.chunks.get(chunk_id)
            if chunk is not None and task.req_id in chunk.unwritten:
                yield chunk

    def seal(self, req_id: ReqId) -> DeferredWrite | None:
        """Close the request's open write; `fill` gives it its rows. None if there is none."""
        task = self.open_writes.pop(req_id, None)
        if task is not None:
            task.end_chunk = self.next_chunk
            self.sealed[task.task_id] = task
        return task

    def fill(self, task: DeferredWrite) -> None:
        """Give a sealed write its rows. Engine thread, and the one thing here that needs no lock.

        A long request has a chunk for each of its steps. None of them can go while the request is unwritten in it.
        """
        req_id = task.req_id
        parts: dict[Key, list[tuple[IntArray, IntArray, torch.Tensor]]] = {}
        for chunk in self.chunks_of(task):
            at = chunk.layout.rows(req_id)
            for key, rows in chunk.rows.items():
                parts.setdefault(key, []).append((chunk.layout.slots[at], chunk.versions[at], rows[at]))
        for key, of_key in parts.items():
            slots, versions, pieces = zip(*of_key, strict=True)
            task.pieces.append(WritePiece(key, np.concatenate(slots), np.concatenate(versions), pieces))

    def seal_chunk(self, chunk: LogChunk) -> list[DeferredWrite]:
        """Close every open write that has rows in `chunk`, in the order of the step's requests."""
        open_ = (self.open_writes.get(r) for r in chunk.layout.req_ids if r in chunk.unwritten)
        covering = [task.req_id for task in open_ if task is not None and task.first_chunk <= chunk.chunk_id]
        return [task for req_id in covering if (task := self.seal(req_id)) is not None]

    def sealed_of(self, chunk: LogChunk) -> list[DeferredWrite]:
        """Sealed writes that may still have rows of `chunk` to write, oldest first."""
        return [task for task in self.sealed.values() if self._covers(task, chunk)]

    def written(self, task: DeferredWrite, at_most: int | None = None) -> bool:
        """The rows of a sealed write are in the pool, or lost with it: its hold on their chunks ends.

        `at_most`: chunks to let go of now, oldest first; None: all of them. Whether nothing is left to let go of.
        """
        chunks = list(islice(self.chunks_of(task), at_most))
        for chunk in chunks:
            chunk.unwritten.discard(task.req_id)
            self._let_go(chunk)
            task.first_chunk = chunk.chunk_id + 1
        if at_most is not None and len(chunks) == at_most:
            return False
        self.sealed.pop(task.task_id, None)
        return True

    def hold(self, chunk: LogChunk) -> None:
        """A planned read names rows of the chunk."""
        chunk.readers += 1

    def release(self, chunk: LogChunk) -> None:
        """Undo one `hold`."""
        chunk.readers -= 1
        self._let_go(chunk)

    def clear(self) -> None:
        """Drop everything, at shutdown."""
        for chunk in self.chunks.values():
            chunk.ticket.release()
        self.chunks.clear()
        self.open_writes.clear()
        self.sealed.clear()

    def _covers(self, task: DeferredWrite, chunk: LogChunk) -> bool:
        end = self.next_chunk if task.end_chunk is None else task.end_chunk
        return task.first_chunk <= chunk.chunk_id < end and task.req_id in chunk.unwritten

    def _let_go(self, chunk: LogChunk) -> None:
        if not chunk.unwritten and not chunk.readers:
            chunk.ticket.release()
            self.chunks.pop(chunk.chunk_id, None)
