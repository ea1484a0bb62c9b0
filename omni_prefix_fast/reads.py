"""A hit read: the cached rows that a request is owed in one step, from plan to fetch.

`plan` resolves each (key, position) to a *row*: the pool row of a slot at its present version, pinned; or a row of a
log chunk, held; or a hole. Once planned, nothing is resolved again: pinned rows are not claimed before the read is
fetched (`PreserveReads` in docs/machine.md), chunks never change, and holes stay holes.

`plan`, `unplan` and `release` are table work under the state lock. `gather` moves rows, under the read's own lock only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch

from omni_prefix_fast.device import Device
from omni_prefix_fast.log import DeferredLog, LogChunk
from omni_prefix_fast.pool import PrefixBlockPool, indexable
from omni_prefix_fast.recycler import OutputAllocator
from omni_prefix_fast.runtime import Runtime
from omni_prefix_fast.slots import NO_CHUNK, SlotTable
from omni_prefix_fast.tasks import WriteTask
from omni_prefix_fast.types import HIDDEN_KEY, BoolArray, IntArray, Key, Occupancy, ReqId, Span, StepId

NOTHING: IntArray = np.empty(0, dtype=np.int64)

_ABSENT, _IN_TRANSIT, _COMMITTED = map(int, Occupancy)


class ReadState(Enum):
    """Where a read stands."""

    UNPLANNED = "unplanned"
    PLANNED = "planned"
    FETCHED = "fetched"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class LogRead:
    """Rows of one chunk that a plan names."""

    chunk: LogChunk
    rows: IntArray
    positions: IntArray
    """Where they go, relative to the start of the span."""


@dataclass(frozen=True, slots=True)
class LogReads:
    """The `LogRead`s of a plan. Made when they are gone through, not under the lock under which they are found."""

    chunks: Sequence[LogChunk] = ()
    positions: Callable[[], Sequence[IntArray]] = tuple
    """Positions of each chunk's rows."""
    read: Callable[[LogChunk, IntArray], LogRead] | None = None

    def __len__(self) -> int:
        return len(self.chunks)

    def __iter__(self) -> Iterator[LogRead]:
        if self.read is not None:
            yield from map(self.read, self.chunks, self.positions())


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """What one key's positions of the span resolved to. Positions are relative to the start of the span."""

    pool: IntArray | None
    """Positions whose row is the slot's pool row; None: all of them."""
    log: LogReads
    holes: IntArray

    def has_rows(self, length: int) -> bool:
        """Whether any position has a row."""
        return bool(self.holes.shape[0] < length)


NO_LOG = LogReads()


class HitRead:
    """The rows `[start, end)` that one request is owed from the cache in one step."""

    def __init__(
        self,
        req_id: ReqId,
        step_id: StepId,
        span: Span,
        slots: IntArray,
        runtime: Runtime,
        blocks: IntArray | None = None,
    ) -> None:
        self.req_id = req_id
        self.step_id = step_id
        self.start, self.end = span
        self.slots = slots
        """Slot of each position, `(end - start,)`."""
        self.blocks = blocks
        """The blocks that these are, if they are known to be whole ones."""
        self.lock = runtime.lock(f"hit read of {req_id!r}, step {step_id}")
        """Held while rows are gathered, so that a builder and a claimant never gather twice."""
        self.state = ReadState.UNPLANNED
        self.plans: dict[Key, KeyPlan] = {}
        self.waits: tuple[WriteTask, ...] = ()
        """Writes that have to be done before the pool rows are there."""
        self.pinned: IntArray = NOTHING
        self.failure: str | None = None
        """Why the read can never be fetched."""
        self.rows: dict[Key, torch.Tensor] = {}
        """Gathered rows: `(length + tail, *feature)`, the first `length` filled."""
        self.tail = 0
        """Rows to leave room for behind the span: the step's own."""
        self.generation = 0
        """How often the read was unplanned; a gather that began before that is thrown away."""

    def __len__(self) -> int:
        return self.end - self.start

    def plan(
        self, keys: Collection[Key], table: SlotTable, log: DeferredLog, writers: Mapping[StepId, WriteTask]
    ) -> None:
        """Resolve every key and position, and pin what was found. `writers`: immediate writes not yet committed."""
        self.plans = {key: self._plan_key(key, table, log, writers) for key in keys}
        named: slice | BoolArray = slice(None)
        if all(plan.pool is not None for plan in self.plans.values()):
            named = np.zeros(len(self), dtype=np.bool_)
            for plan in self.plans.values():
                named[plan.pool] = True
        for plan in self.plans.values():
            for chunk in plan.log.chunks:
                log.hold(chunk)
        self.pinned = self.slots[named]
        table.pin(self.pinned)
        self.state = ReadState.PLANNED

    def _plan_key(self, key: Key, table: SlotTable, log: DeferredLog, writers: Mapping[StepId, WriteTask]) -> KeyPlan:
        occupancy = table.occupancy(key, self.slots)
        in_pool = occupancy == _COMMITTED
        if np.count_nonzero(in_pool) == len(self):
            return KeyPlan(None, NO_LOG, NOTHING)
        transit = occupancy == _IN_TRANSIT
        parts = NO_LOG
        logged = table.log_rows(key, self.slots)
        if logged is not None:
            from_log = transit & (logged.chunk != NO_CHUNK)
            at = np.flatnonzero(from_log)
            at = at[np.argsort(logged.chunk[at], kind="stable")]
            chunk_ids, firsts = np.unique(logged.chunk[at], return_index=True)
            parts = LogReads(
                [log.chunks[chunk_id] for chunk_id in chunk_ids.tolist()],
                lambda: np.split(at, firsts[1:]),
                lambda chunk, positions: LogRead(chunk, logged.row[positions], positions),
            )
            transit &= ~from_log
        if transit.any():
            owners = np.unique(table.owner[self.slots[transit]]).tolist()
            self.waits = (*self.waits, *(writers[step] for step in owners))
            in_pool |= transit
        holes = np.flatnonzero(occupancy == _ABSENT)
        return KeyPlan(None if in_pool.all() else np.flatnonzero(in_pool), parts, holes)

    def settle(self, *, owes_hidden: bool) -> None:
        """Holes are final now: where hidden rows are owed, a hole among them fails the read."""
        if not owes_hidden:
            return
        plan = self.plans.get(HIDDEN_KEY)  # none before hidden rows were ever saved
        holes = np.arange(len(self)) if plan is None else plan.holes
        if holes.size:
            first = int(holes[0])
            self.failure = (
                f"request {self.req_id!r} hit positions {self.start}..{self.end - 1}, but {holes.size} of them have "
                f"no hidden rows, the first at position {self.start + first} (slot {int(self.slots[first])}): the KV "
                "block was filled without this cache seeing the forward. Nothing but this engine's own forwards may "
                "fill KV blocks while enable_prefix_caching is true (no KV connector, no skipped save)"
            )

    def unplan(self, table: SlotTable, log: DeferredLog) -> None:
        """Forget what was resolved, before the step's own claim."""
        self._let_go(table, log)
        self.plans = {}
        self.rows = {}
        self.waits = ()
        self.generation += 1
        self.state = ReadState.UNPLANNED

    def forget(self, key: Key, log: DeferredLog) -> None:
        """Owe nothing of `key` any more."""
        plan = self.plans.pop(key, None)
        self.rows.pop(key, None)
        if plan is not None and self.state is ReadState.PLANNED:
            for chunk in plan.log.chunks:
                log.release(chunk)

    def gather(
        self, plans: Mapping[Key, KeyPlan], pool: PrefixBlockPool, device: Device, allocate: OutputAllocator
    ) -> dict[Key, torch.Tensor]:
        """Copy the rows of `plans` out. Under `lock`, with the writers done; no table is touched."""
        return {
            key: self._gather_key(key, plan, pool, device, allocate)
            for key, plan in plans.items()
            if plan.has_rows(len(self))
        }

    def _gather_key(
        self, key: Key, plan: KeyPlan, pool: PrefixBlockPool, device: Device, allocate: OutputAllocator
    ) -> torch.Tensor:
        storage = pool.storage(key)
        rows = allocate((len(self) + self.tail, *storage.shape[2:]), storage.dtype)
        if plan.pool is None:
            pool.gather(key, self.slots, rows[: len(self)], None, self.blocks)
            return rows
        out = rows[: len(self)]
        if plan.holes.size:
            indexable(out)[torch.from_numpy(plan.holes)] = 0
        pool.gather(key, self.slots[plan.pool], out, plan.pool)
        for part in plan.log:
            found = torch.empty((part.rows.shape[0], *storage.shape[2:]), dtype=storage.dtype)
            device.rows_to_host(part.chunk.rows[key], part.rows, found)
            indexable(out)[torch.from_numpy(part.positions)] = indexable(found)
        return rows

    def release(self, table: SlotTable, log: DeferredLog, state: ReadState) -> None:
        """Fetched or dropped: unpin and let chunks go, once. A dropped read stays dropped."""
        self._let_go(table, log)
        if self.state is not ReadState.DROPPED:
            self.state = state

    def holds(self, chunk: LogChunk) -> bool:
        """Whether the plan names rows of `chunk`."""
        return any(held is chunk for plan in self.plans.values() for held in plan.log.chunks)

    def _let_go(self, table: SlotTable, log: DeferredLog) -> None:
        if self.state is not ReadState.PLANNED:
            return
        table.unpin(self.pinned)
        self.pinned = NOTHING
        for plan in self.plans.values():
            for chunk in plan.log.chunks:
                log.release(chunk)
        # The bytes of a chunk are given back with its last holder: no plan may keep its tensors alive.
        self.plans = {key: replace(plan, log=NO_LOG) if plan.log else plan for key, plan in self.plans.items()}
