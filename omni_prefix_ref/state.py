"""The variables of the machine: what a state is made of. Every record is immutable.

A *slot* is `block * block_size + offset`. A *row* is one key's value at one token; here it is a number that stands
for it, `ZEROS` for a row of zeros. A *tenancy* is the life of a slot between two claims, named by (slot, version).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

HIDDEN_KEY = "__hidden_states__"
ZEROS = 0

Key: TypeAlias = str
Req: TypeAlias = str
Slot: TypeAlias = int
Row: TypeAlias = int
StepId: TypeAlias = int
TaskId: TypeAlias = int
ReadId: TypeAlias = int
ChunkId: TypeAlias = int
Rows: TypeAlias = Mapping[Key, tuple[Row, ...]]
Holder: TypeAlias = tuple[str, int]
"""Who holds a page or a chunk: `("step", id)`, `("write", id)` or `("read", id)`."""

K = TypeVar("K")
V = TypeVar("V")


class Occupancy(Enum):
    """Whether there is a row of the slot's current version: none, on its way to the pool, in the pool."""

    ABSENT = "absent"
    IN_TRANSIT = "in_transit"
    COMMITTED = "committed"


class TaskState(Enum):
    """Where a write task stands."""

    PENDING = "pending"
    QUEUED = "queued"
    COPYING = "copying"
    HOST_READY = "host_ready"
    WRITTEN = "written"
    FAILED = "failed"


LEGAL_MOVES: Mapping[TaskState, frozenset[TaskState]] = {
    TaskState.PENDING: frozenset((TaskState.QUEUED, TaskState.FAILED)),
    TaskState.QUEUED: frozenset((TaskState.COPYING, TaskState.FAILED)),
    TaskState.COPYING: frozenset((TaskState.HOST_READY, TaskState.FAILED)),
    TaskState.HOST_READY: frozenset((TaskState.WRITTEN, TaskState.FAILED)),
    TaskState.WRITTEN: frozenset(),
    TaskState.FAILED: frozenset(),
}
FINAL = frozenset((TaskState.WRITTEN, TaskState.FAILED))


class PoolRow(NamedTuple):
    """The pool's row of one tenancy of a slot."""

    slot: Slot
    version: int


class LogRow(NamedTuple):
    """A row of a chunk of the log."""

    chunk: ChunkId
    row: int


class PageRow(NamedTuple):
    """A row of a staging page."""

    page: int
    row: int


Source: TypeAlias = PoolRow | LogRow | None
"""What a planned position of one key resolved to; None is a hole."""


@dataclass(frozen=True)
class KeySpec:
    """One per-token output. `deferred` rows wait on the device until their request ends."""

    name: Key
    row_bytes: int
    deferred: bool = False


@dataclass(frozen=True)
class Settings:
    """Sizes and bounds of the machine."""

    block_size: int
    num_blocks: int
    keys: tuple[KeySpec, ...]
    staging_depth: int
    page_rows: int
    budget_bytes: int

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def key_names(self) -> tuple[Key, ...]:
        return tuple(key.name for key in self.keys)


@dataclass(frozen=True)
class Chunk:
    """Device clones of one step's deferred rows, all its requests and deferred keys together. Never changed."""

    rows: Rows
    num_bytes: int
    holders: frozenset[Holder]


class Entry(NamedTuple):
    """One row that a task is to write: whose it is (slot and the version claimed) and where it is now."""

    key: Key
    slot: Slot
    version: int
    source: PageRow | LogRow


@dataclass(frozen=True)
class WriteTask:
    """What moves rows into the pool. Immediate: one a step. Deferred: `req` and the ordinal `write_n` say whose."""

    state: TaskState
    entries: tuple[Entry, ...]
    req: Req | None = None
    write_n: int = 0


@dataclass(frozen=True)
class HitRead:
    """Rows `[start, start + len(slots))` of a request that come from the cache, in one step.

    `plan` is what each key and position resolved to; None while unplanned. `rows` are there once fetched.
    """

    req: Req
    start: int
    slots: tuple[Slot, ...]
    plan: Mapping[Key, tuple[Source, ...]] | None = None
    writers: frozenset[TaskId] = frozenset()
    rows: Mapping[Key, tuple[Row | None, ...]] | None = None
    step: StepId | None = None
    failed: bool = False

    @property
    def pinned(self) -> frozenset[Slot]:
        """Slots whose pool rows the plan still needs."""
        if self.plan is None or self.rows is not None or self.failed:
            return frozenset()
        return frozenset(s.slot for sources in self.plan.values() for s in sources if isinstance(s, PoolRow))

    @property
    def chunks(self) -> frozenset[ChunkId]:
        """Chunks whose rows the plan still needs."""
        if self.plan is None or self.rows is not None or self.failed:
            return frozenset()
        return frozenset(s.chunk for sources in self.plan.values() for s in sources if isinstance(s, LogRow))


class BatchItem(NamedTuple):
    """One request's part of a step: the positions `[start, start + len(slots))` that it computes, and where."""

    req: Req
    start: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class StepContext:
    """All that the builder needs of a step, fixed at save. `taken` are the requests to hand over, once taken."""

    page: int
    batch: tuple[BatchItem, ...]
    emits: frozenset[Key]
    spans: Mapping[Req, tuple[int, int]]
    reads: Mapping[Req, ReadId]
    taken: tuple[Req, ...] | None = None


@dataclass(frozen=True)
class Page:
    """A staging page: the rows that land in it, and who still needs them."""

    holders: frozenset[Holder] = frozenset()
    rows: Rows = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Failure:
    """The first failed write."""

    task: TaskId
    cause: str


@dataclass(frozen=True)
class Outputs:
    """What a step hands over: rows by key and request, and the absolute positions that each request's rows cover.

    A key that the step did not emit covers only the request's hit span: its rows start where the span starts.
    """

    rows: Mapping[Key, Mapping[Req, tuple[Row, ...]]]
    spans: Mapping[Req, tuple[int, int]]


if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414 - for `machine`, with its fields' types checked
else:

    def replace(record, **changes):
        """The record with some fields set.

        `dataclasses.replace` makes it anew, which takes half the time of all actions together. These records check and
        work out nothing as they are made, so a copy is the same.
        """
        made = object.__new__(type(record))
        made.__dict__.update(record.__dict__)
        made.__dict__.update(changes)
        if len(made.__dict__) != len(record.__dict__):
            unknown = sorted(changes.keys() - record.__dict__.keys())
            raise TypeError(f"{type(record).__name__} has no field {unknown}")
        return made


def put(table: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """The table with one entry set."""
    return MappingProxyType({**table, key: value})


def drop(table: Mapping[K, V], key: K) -> Mapping[K, V]:
    """The table without one entry, if it has it."""
    return MappingProxyType({k: v for k, v in table.items() if k != key})


def at(column: tuple[V, ...], updates: Mapping[int, V]) -> tuple[V, ...]:
    """The column with some positions set."""
    if not updates:
        return column
    changed = list(column)
    for index, value in updates.items():
        changed[index] = value
    return tuple(changed)
