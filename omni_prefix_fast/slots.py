"""`SlotTable`: who holds each slot. Arrays indexed by slot; every operation is array work over the slots it is given.

Takes no lock and never blocks: the manager calls it under the state lock. Guarantees:

- a claim is for every key at once, so one version a slot serves them all, and (slot, version) names a tenant;
- versions never fall; occupancy speaks of the current version only;
- `commit` touches a slot only while it still has the version that the caller claimed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from omni_prefix_fast.types import BoolArray, IntArray, Key, Occupancy, StepId

NO_STEP = -1
NO_CHUNK = -1

_FEW = 96
"""Up to so many slots a set of Python numbers is faster than arrays."""

_ABSENT, _IN_TRANSIT, _COMMITTED = map(int, Occupancy)
"""As plain numbers, which numpy takes without asking an `Enum` what it is."""


class LogRows(NamedTuple):
    """Where in-transit deferred rows are, by slot."""

    chunk: IntArray
    """Chunk id; `NO_CHUNK` for a row that does not come from the log."""
    row: IntArray
    """Row of the chunk."""


class SlotTable:
    """Version, owner and pins by slot; occupancy by key and slot."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # One record a slot, so that a step meets one cache line for each of its slots, not one an array.
        # Filled, not merely zeroed, so that no step faults their pages in.
        self._records: IntArray = np.full((num_slots, 4), 0, dtype=np.int64)
        self.version: IntArray = self._records[:, 0]
        self.owner: IntArray = self._records[:, 1]
        self.owner.fill(NO_STEP)
        self.pins: IntArray = self._records[:, 2]
        self._scratch: IntArray = self._records[:, 3]
        self._order: IntArray = np.arange(1)
        self._stamps: IntArray = np.full(num_slots, 0, dtype=np.int64)
        self._epoch = 0
        self.claims = 0
        """Claims so far. While it stays the same, whatever was owned is still owned."""
        self._occupancy: dict[Key, npt.NDArray[np.uint8]] = {}
        self._log: dict[Key, LogRows] = {}
        self._prepared: dict[Key, tuple[npt.NDArray[np.uint8], LogRows | None]] = {}
        """Tables of keys that are not open yet."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        by_slot = self._records.nbytes + self._stamps.nbytes
        prepared = self._prepared.values()
        by_key = sum(a.nbytes for a in (*self._occupancy.values(), *(occupancy for occupancy, _ in prepared)))
        logs = (*self._log.values(), *(log for _, log in prepared if log is not None))
        return by_slot + by_key + sum(log.chunk.nbytes + log.row.nbytes for log in logs)

    def open_keys(self) -> tuple[Key, ...]:
        """Keys with a table, in the order in which they were opened."""
        return tuple(self._occupancy)

    def has_key(self, key: Key) -> bool:
        """Whether `key` has a table."""
        return key in self._occupancy

    def prepare_key(self, key: Key, *, deferred: bool) -> None:
        """Allocate the table that `open_key` will give to `key`. Nothing else sees it, so the caller needs no lock."""
        if key in self._occupancy or key in self._prepared:
            return
        log: LogRows | None = None
        if deferred:
            log = LogRows(*(np.full(self.num_slots, value, dtype=np.int64) for value in (NO_CHUNK, 0)))
        self._prepared[key] = (np.full(self.num_slots, Occupancy.ABSENT, dtype=np.uint8), log)

    def open_key(self, key: Key, *, deferred: bool) -> None:
        """Give `key` a table with every slot absent. Nothing if it has one."""
        if key in self._occupancy:
            return
        self.prepare_key(key, deferred=deferred)
        self._occupancy[key], log = self._prepared.pop(key)
        if log is not None:
            self._log[key] = log

    def close_key(self, key: Key) -> None:
        """Forget `key`: no slot has a row of it any more."""
        self._occupancy.pop(key, None)
        self._log.pop(key, None)

    def occupancy(self, key: Key, slots: IntArray) -> npt.NDArray[np.uint8]:
        """`Occupancy` of each slot under `key`, a copy."""
        return self._occupancy[key][slots]

    def log_rows(self, key: Key, slots: IntArray) -> LogRows | None:
        """Where the in-transit rows of a deferred key are; None for an immediate key. Meaningful in transit only."""
        rows = self._log.get(key)
        return None if rows is None else LogRows(rows.chunk[slots], rows.row[slots])

    def first_repeated(self, slots: IntArray) -> int | None:
        """A slot that stands twice in `slots`, or None."""
        count = slots.shape[0]
        if count <= _FEW and len(set(slots.tolist())) == count:
            return None
        order = self._first(count)
        self._scratch[slots] = order
        repeated = self._scratch[slots] != order
        return int(slots[repeated.argmax()]) if np.count_nonzero(repeated) else None

    def any_pinned(self, slots: IntArray) -> bool:
        """Whether some planned read names the pool row of one of the slots."""
        return bool(self.pins[slots].any())

    def stamp(self, slots: IntArray) -> int:
        """Mark `slots`; `stamped` tells until the next call. Cost: the slots given, not the number of slots."""
        self._epoch += 1
        self._stamps[slots] = self._epoch
        return self._epoch

    def stamped(self, slots: IntArray, epoch: int) -> bool:
        """Whether any of `slots` is among those marked as `epoch`."""
        return bool((self._stamps[slots] == epoch).any())

    def claim(self, slots: IntArray, step_id: StepId, emitted: Iterable[Key]) -> IntArray:
        """Start a new tenancy of each slot, for every key. Returns the new versions, `(len(slots),)`.

        Rows of the former tenant are gone under every key, those that the step does not emit included. Emitted
        keys are in transit, as immediate rows until `log_append` says otherwise.
        """
        self.claims += 1
        self.version[slots] += 1
        self.owner[slots] = step_id
        emitted = frozenset(emitted)
        for key, occupancy in self._occupancy.items():
            occupancy[slots] = _IN_TRANSIT if key in emitted else _ABSENT
        for log in self._log.values():
            log.chunk[slots] = NO_CHUNK
        return self.version[slots]

    def log_append(self, key: Key, slots: IntArray, chunk_id: int) -> None:
        """The in-transit rows of `key` at `slots` are rows 0, 1, ... of a log chunk."""
        log = self._log[key]
        log.chunk[slots] = chunk_id
        log.row[slots] = self._first(slots.shape[0])

    def still_owned(self, slots: IntArray, versions: IntArray, claims: int | None = None) -> BoolArray | np.bool_:
        """For each slot, whether the tenancy that was claimed as `versions` still lasts.

        `claims`: what `claims` was when all of them were owned. Without another claim there is nothing to look at.
        """
        return np.True_ if claims == self.claims else np.asarray(self.version[slots] == versions)

    def commit(self, key: Key, slots: IntArray, versions: IntArray, claims: int | None = None) -> None:
        """Rows are in the pool: in transit -> committed, for the slots whose tenancy still lasts.

        `claims`: as in `still_owned`.
        """
        occupancy = self._occupancy.get(key)
        if occupancy is None:
            return
        kept = slots
        if claims != self.claims:
            kept = slots[self.version[slots] == versions]
        occupancy[kept] = _COMMITTED
        if key in self._log:
            self._log[key].chunk[kept] = NO_CHUNK

    def pin(self, slots: IntArray) -> None:
        """A planned read names the pool rows of `slots` (no slot twice)."""
        self.pins[slots] += 1

    def unpin(self, slots: IntArray) -> None:
        """Undo one `pin` of the same slots."""
        self.pins[slots] -= 1

    def _first(self, count: int) -> IntArray:
        """0, 1, ..., `count` of them, made once. Engine thread; not to be changed."""
        if count > self._order.shape[0]:
            self._order = np.arange(count)
        return self._order[:count]
