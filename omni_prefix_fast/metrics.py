"""Counters, footprints and the trace sink. Counters only ever rise; reading them loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

from omni_prefix_fast.runtime import Lock, ThreadRuntime
from omni_prefix_fast.types import Key

TraceSink: TypeAlias = Callable[[str, Mapping[str, object]], None]
"""Called with an action's name (`claim_slots`, see docs/machine.md) and what it acted on. Must not block."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals since the cache was made, at one moment."""

    steps_saved: int = 0
    steps_materialized: int = 0
    steps_discarded: int = 0
    steps_abandoned: int = 0
    """Steps that were started and never saved: their slots were given up, so that nobody hits stale rows there."""
    requests_started: int = 0
    """Fresh requests: one for each id between its start and its finish, however often it is chunked or resumed."""
    requests_hit: int = 0
    """Of these, the ones whose prompt was partly computed at the start."""
    requests_below_block: int = 0
    """Of these, the ones whose prompt is too short to hit anything (not longer than one block)."""
    requests_resumed: int = 0
    """Times that a live request came back: resumed after preemption, or continued."""
    requests_finished: int = 0
    tokens_asked: int = 0
    """Prompt tokens of fresh requests; tokens known at the start where the engine does not tell the prompt."""
    tokens_hit: int = 0
    """Tokens of fresh requests that were already computed when they started."""
    rows_hit: Mapping[Key, int] = field(default_factory=dict)
    """Rows handed over from the cache, by key."""
    rows_saved: int = 0
    """Token rows computed and saved, whatever the number of keys."""
    reads_planned: int = 0
    reads_same_step: int = 0
    """Reads planned again because the step itself computes a block that they hit."""
    reads_preserved: int = 0
    """Reads completed early because a claim or the byte budget needed what they were planned on."""
    writes_deferred: int = 0
    """Deferred writes opened."""
    writes_forced: int = 0
    """Deferred writes forced out by the byte budget while their request was running."""
    rows_lost: int = 0
    """Rows of writes that were skipped because the slot had a newer tenant by then."""
    keys_demoted: int = 0
    """Undeclared keys whose shape contradicted an earlier step."""
    host_copies: int = 0
    """Copies of rows from the device to the host, one a key and step, and one a key and deferred write."""
    host_copy_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LockTimes:
    """How long a lock was held, at one moment."""

    acquisitions: int = 0
    held_s: float = 0.0
    """Seconds in all."""
    longest_s: float = 0.0


class HoldTimes:
    """Measures how long a lock is held: `with lock, times:`.

    The lock itself is not wrapped. Entered and left in C, it is let go of whenever an interrupt comes; an `__exit__` in
    Python can be interrupted before its first line.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = 0.0
        self._count = 0
        self._held = 0.0
        self._longest = 0.0

    def __enter__(self) -> None:
        self._since = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        held = self._clock() - self._since
        self._count += 1
        self._held += held
        self._longest = max(self._longest, held)

    def totals(self) -> LockTimes:
        """Totals since the start. Under the lock."""
        return LockTimes(self._count, self._held, self._longest)


class Counters:
    """The mutable side of `Statistics`. Any thread."""

    def __init__(self, sink: TraceSink | None = None, lock: Lock | None = None) -> None:
        self._lock = lock or ThreadRuntime().lock("counters")
        self._totals: dict[str, int] = {name: 0 for name in Statistics.__slots__ if name != "rows_hit"}
        self._rows_hit: dict[Key, int] = {}
        self.sink = sink

    def add(self, name: str, amount: int = 1) -> None:
        """Raise one total."""
        with self._lock:
            self._totals[name] += amount

    def add_all(self, **amounts: int) -> None:
        """Raise several totals at once."""
        with self._lock:
            totals = self._totals
            for name, amount in amounts.items():
                totals[name] += amount

    def add_rows_hit(self, key: Key, rows: int) -> None:
        """Count rows of `key` handed over from the cache."""
        with self._lock:
            self._rows_hit[key] = self._rows_hit.get(key, 0) + rows

    def trace(self, action: str, **acted_on: object) -> None:
        """Tell the trace sink, if there is one."""
        if self.sink is not None:
            self.sink(action, acted_on)

    def snapshot(self) -> Statistics:
        """Copy the totals."""
        with self._lock:
            return Statistics(rows_hit=dict(self._rows_hit), **self._totals)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a cache has allocated, at one moment."""

    pool_bytes: Mapping[Key, int]
    """Durable rows by key: `num_blocks * block_size * row bytes`."""
    staging_bytes: Mapping[Key, int]
    """Staging pages by key: `staging_depth * staging_capacity_tokens * row bytes`."""
    table_bytes: int
    """Slot tables: versions, owners, pins, occupancy."""
    device_bytes: int
    """Device clones of deferred rows (charged against `gpu_staging_bytes`)."""
    pending_bytes: int
    """Rows of hits gathered early, waiting for their step to be materialized."""

    @property
    def static_bytes(self) -> int:
        """Bytes of the pools."""
        return sum(self.pool_bytes.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of the pools and of the staging pages."""
        return self.static_bytes + sum(self.staging_bytes.values())
