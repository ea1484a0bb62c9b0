"""A hand-driven engine for tests of the production cache, in the notation of the cases.

::

    engine = Engine(num_blocks=8)                       # block_size 4
    step = engine.step(new=[("A", [0, 1], 0, 8)])       # A holds blocks 0, 1; hit 0; computes positions 0..7
    assert engine.hidden(step, "A") == list(range(8))   # materialize; row of position p is base + p
    step = engine.step(new=[("B", [0, 1, 2], 8, 4)], finished=["A"], base={"B": 500})
    assert engine.hidden(step, "B") == [*range(8), *range(508, 512)]

The row of request r at position p is `base[r] + p` in every column. mm values are given by key: `per_token(width)`
makes such rows, anything else is handed to the cache as it is. `start` and `save` are `step` in two halves. Rows of the
harness's making are overwritten as soon as `save_outputs` returned, as by the next forward.

A test that says nothing about the mode runs in each (`conftest.py`): eager, asynchronous, and asynchronous on a device
whose copies land late. `settled` looks at the tables once everything in the background has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace, TracebackType
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch

from conformance.device import SimulatedDevice
from omni_prefix_fast import ModelCachePolicy, OmniPrefixCacheManager, PrefixCacheConfig, StageCacheOutputs
from omni_prefix_fast.device import Device, HostDevice
from omni_prefix_fast.inspection import Inspection
from omni_prefix_fast.metrics import TraceSink
from omni_prefix_fast.recycler import OutputAllocator
from omni_prefix_fast.runtime import Runtime

BLOCK_SIZE = 4
GATE_S = 20.0
WIDTH = 2

Admission: TypeAlias = tuple[str, Sequence[int], int, int]
"""(request, its whole block table, computed tokens, tokens to compute)"""
Running: TypeAlias = tuple[str, int] | tuple[str, int, Sequence[int]]
"""(request, tokens to compute[, blocks appended to its table])"""


class Default:
    """Stands for hidden states as the harness makes them, since None says something."""


DEFAULT = Default()


class Mode(Enum):
    """Who does what when."""

    EAGER = "eager"
    """Every write inside the call that starts it."""
    ASYNCHRONOUS = "asynchronous"
    """Writes and gathers on threads of their own."""
    SIMULATED = "simulated"
    """The same, and copies land late."""


MODE: ContextVar[Mode] = ContextVar("mode", default=Mode.EAGER)
"""Mode of the engines that say nothing themselves."""


class Gate:
    """A trace sink that holds whichever thread first reaches an action while it is armed, until it is opened."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.armed = False
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, action: str, acted_on: Mapping[str, object]) -> None:
        if self.armed and action == self.action and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(GATE_S), f"nobody opened the gate at {action} ({acted_on})"


@dataclass(frozen=True)
class Part:
    """One request's part of a step."""

    req_id: str
    start: int
    count: int


@dataclass
class View:
    """The engine's batch, as the cache sees it."""

    block_size: int
    tables: dict[str, list[int]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def batch_req_ids(self) -> list[str]:
        return list(self.order)

    def step_slots_cpu(self, req_ids: Sequence[str], num_scheduled: Mapping[str, int]) -> torch.Tensor:
        slots = [s for r in req_ids for s in self.slots(r, self.computed[r], self.computed[r] + num_scheduled[r])]
        return torch.tensor(slots, dtype=torch.int64)

    def slots(self, req_id: str, start: int, end: int) -> list[int]:
        table, size = self.tables[req_id], self.block_size
        return [table[p // size] * size + p % size for p in range(start, end)]


@dataclass(frozen=True)
class PerToken:
    """An mm value with one row a token, made when the step is saved: base + position + add."""

    feature: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    add: int = 0


def per_token(*feature: int, dtype: torch.dtype = torch.float32, add: int = 0) -> PerToken:
    """Rows `(num_tokens, *feature)` of the step."""
    return PerToken(feature, dtype, add)


def filled(values: Sequence[int], *feature: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A row for each value, the same value in every column. For bool: whether the value is odd."""
    column_ = torch.tensor(list(values), dtype=torch.int64)
    cast = (column_ % 2).to(dtype) if dtype == torch.bool else column_.to(dtype)
    return cast.reshape(-1, *(1 for _ in feature)).expand(-1, *feature).contiguous()


def column(rows: Any) -> list[int]:
    """The value of each row, which has to be the same in every column."""
    assert isinstance(rows, torch.Tensor)
    flat = rows.reshape(rows.shape[0], -1)
    assert torch.equal(flat, flat[:, :1].expand_as(flat)), f"columns differ: {rows}"
    return [int(value) for value in flat[:, 0].tolist()]


class Engine:
    """Drives an `OmniPrefixCacheManager`. `settings` are those of `PrefixCacheConfig`."""

    made: ClassVar[list[Engine]] = []
    """Engines of the running test."""

    def __init__(
        self,
        *,
        num_blocks: int = 8,
        block_size: int = BLOCK_SIZE,
        policy: ModelCachePolicy | None = None,
        width: int = WIDTH,
        dtype: torch.dtype = torch.float32,
        runtime: Runtime | None = None,
        device: Device | None = None,
        trace: TraceSink | None = None,
        allocate: OutputAllocator | None = None,
        eager: bool | Default | None = DEFAULT,
        **settings: Any,
    ) -> None:
        if isinstance(eager, Default):
            eager = MODE.get() is Mode.EAGER
            if MODE.get() is Mode.SIMULATED and device is None:
                device = SimulatedDevice()
        self.device = device
        self.eager = bool(eager)
        self.config = PrefixCacheConfig(num_blocks=num_blocks, block_size=block_size, **settings)
        self.view = View(block_size)
        self.cache = OmniPrefixCacheManager(
            self.config, self.view, eager, runtime=runtime, device=device, output_allocator=allocate, trace=trace
        )
        if policy is not None:
            self.cache.register_policy(policy)
        self.width = width
        self.dtype = dtype
        self.base: dict[str, int] = {}
        self.parts: list[Part] = []
        """The step that was started last, in the order of its rows."""
        self.position: dict[str, int] = {}
        """Where each request goes on when it is next in `cached`."""
        self.made.append(self)

    # ------------------------------------------------------------------------------------ steps

    def step(
        self,
        *,
        new: Sequence[Admission] = (),
        cached: Sequence[Running] = (),
        resumed: Sequence[Admission] = (),
        finished: Sequence[str] = (),
        order: Sequence[str] | None = None,
        base: Mapping[str, int] | None = None,
        hidden: torch.Tensor | Default | None = DEFAULT,
        mm: Mapping[str, Any] | None = None,
        padded: int | None = None,
    ) -> int:
        """Start and save a step. Returns its id."""
        self.start(new=new, cached=cached, resumed=resumed, finished=finished, order=order, base=base)
        return self.save(hidden=hidden, mm=mm, padded=padded)

    def start(
        self,
        *,
        new: Sequence[Admission] = (),
        cached: Sequence[Running] = (),
        resumed: Sequence[Admission] = (),
        finished: Sequence[str] = (),
        order: Sequence[str] | None = None,
        base: Mapping[str, int] | None = None,
    ) -> None:
        """`new_step_starts`, then the engine's own update of its batch (rows in `order`; as they came if left out)."""
        output = self.schedule(new=new, cached=cached, resumed=resumed, finished=finished, base=base)
        self.cache.new_step_starts(output)
        self.update(output, finished=finished, order=order)

    def schedule(
        self,
        *,
        new: Sequence[Admission] = (),
        cached: Sequence[Running] = (),
        resumed: Sequence[Admission] = (),
        finished: Sequence[str] = (),
        base: Mapping[str, int] | None = None,
    ) -> SimpleNamespace:
        """A scheduler output, with vLLM's fields; the harness's tables already follow it."""
        self.base.update(base or {})
        for req_id, blocks, hit, _ in (*new, *resumed):
            self.view.tables[req_id] = list(blocks)
            self.view.computed[req_id] = hit
        running = [(entry[0], entry[1], list(entry[2]) if len(entry) == 3 else []) for entry in cached]
        for req_id, _, blocks in running:
            self.view.tables[req_id] += blocks
            self.view.computed[req_id] = self.position[req_id]
        counts = [
            *((r, n) for r, n, _ in running),
            *((r, n) for r, _, _, n in resumed),
            *((r, n) for r, _, _, n in new),
        ]
        self.parts = [Part(r, self.view.computed[r], n) for r, n in counts]
        self.position.update((part.req_id, part.start + part.count) for part in self.parts)
        again = [r for r, *_ in resumed]
        come_back = [*(r for r, *_ in running), *again]
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r,
                    num_computed_tokens=hit,
                    block_ids=(list(blocks),),
                    prompt_token_ids=list(range(hit + n)),
                )
                for r, blocks, hit, n in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=come_back,
                resumed_req_ids=set(again),
                new_block_ids=[
                    *((blocks,) if blocks else None for _, _, blocks in running),
                    *((list(blocks),) for _, blocks, _, _ in resumed),
                ],
                num_computed_tokens=[self.view.computed[r] for r in come_back],
            ),
            num_scheduled_tokens=dict(counts),
            total_num_scheduled_tokens=sum(n for _, n in counts),
            finished_req_ids=set(finished),
        )

    def update(
        self, output: SimpleNamespace, *, finished: Sequence[str] = (), order: Sequence[str] | None = None
    ) -> None:
        """The engine's batch after `output`: finished requests leave, scheduled ones stand in `order`."""
        scheduled: list[str] = list(output.num_scheduled_tokens)
        if order is not None:
            if sorted(order) != sorted(scheduled):
                raise ValueError(f"order {list(order)} is not an order of {scheduled}")
            scheduled = list(order)
            by_id = {part.req_id: part for part in self.parts}
            self.parts = [by_id[r] for r in scheduled]
        for req_id in finished:
            if req_id not in scheduled:
                self.view.tables.pop(req_id, None)
                self.view.computed.pop(req_id, None)
        idle = [r for r in self.view.order if r not in scheduled and r in self.view.tables]
        self.view.order = [*scheduled, *idle]

    def save(
        self,
        *,
        hidden: torch.Tensor | Default | None = DEFAULT,
        mm: Mapping[str, Any] | None = None,
        padded: int | None = None,
    ) -> int:
        """`save_outputs` of the step that was started. Returns its id."""
        live: list[torch.Tensor] = []
        if isinstance(hidden, Default):
            hidden = self.rows(self.width, dtype=self.dtype, padded=padded)
            live.append(hidden)
        values: dict[str, Any] = {}
        for key, value in (mm or {}).items():
            values[key] = self._made(value, padded)
            live += [values[key]] if isinstance(value, PerToken) else []
        step_id = self.cache.save_outputs(hidden, values, num_tokens_unpadded=self.num_tokens, num_tokens_padded=padded)
        for rows in live:
            rows.fill_(-2)
        return step_id

    # ------------------------------------------------------------------------------------ values

    @property
    def num_tokens(self) -> int:
        """Tokens of the step that was started last."""
        return sum(part.count for part in self.parts)

    def rows(
        self, *feature: int, dtype: torch.dtype = torch.float32, add: int = 0, padded: int | None = None
    ) -> torch.Tensor:
        """Rows of the step that was started last, `(num_tokens or padded, *feature)`; padding is -1."""
        values = [self.base.get(p.req_id, 0) + add + i for p in self.parts for i in range(p.start, p.start + p.count)]
        values += [-1] * ((padded or 0) - len(values))
        return filled(values, *feature, dtype=dtype)

    def _made(self, value: Any, padded: int | None) -> Any:
        if isinstance(value, PerToken):
            return self.rows(*value.feature, dtype=value.dtype, add=value.add, padded=padded)
        return value

    # ------------------------------------------------------------------------------------ looking inside

    def settled(self) -> Inspection:
        """The tables, once everything in the background has ended."""
        self.cache.drain()
        return self.cache.inspect()

    # ------------------------------------------------------------------------------------ handover

    def take(self, step_id: int, *req_ids: str) -> StageCacheOutputs:
        """`materialize`."""
        return self.cache.materialize(step_id, req_ids)

    def hidden(self, step_id: int, req_id: str) -> list[int]:
        """Materialize a step for one request: the values of its hidden rows."""
        hidden = self.take(step_id, req_id).hidden_states
        assert hidden is not None
        return column(hidden[req_id])

    def mm(self, step_id: int, key: str, req_id: str) -> list[int]:
        """Materialize a step for one request: the values of its rows of a per-token mm key."""
        return column(self.take(step_id, req_id).mm_outputs[key][req_id])


class ManualLock:
    """A lock that tells instead of hanging: taking a held one without a time limit fails the test."""

    def __init__(self, runtime: ManualRuntime, name: str) -> None:
        self._runtime, self._name = runtime, name
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        assert not blocking or timeout >= 0, f"waiting for {self._name!r} without a limit would hang"
        if blocking:
            self._runtime.pass_time(timeout, self._name)
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()


class ManualCondition(ManualLock):
    """Waiting passes time; a notification is seen if it comes while it passes."""

    def __init__(self, runtime: ManualRuntime, name: str) -> None:
        super().__init__(runtime, name)
        self._notified = False

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None, f"waiting on {self._name!r} without a limit"
        self._notified = False
        self.release()
        self._runtime.pass_time(timeout, self._name)
        self.acquire()
        return self._notified

    def notify_all(self) -> None:
        self._notified = True


class ManualEvent:
    """Waiting passes time."""

    def __init__(self, runtime: ManualRuntime, name: str) -> None:
        self._runtime, self._name, self._set = runtime, name, False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None, f"waiting for {self._name!r} without a limit"
        if not self._set:
            self._runtime.pass_time(timeout, self._name)
        return self._set


class ManualRuntime:
    """A clock that only moves when somebody waits. For one thread; `meanwhile` is what the others do during a wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[tuple[str, float]] = []
        self.meanwhile: Callable[[str], None] | None = None

    def monotonic(self) -> float:
        return self.now

    def pass_time(self, seconds: float, name: str) -> None:
        self.waited.append((name, seconds))
        if self.meanwhile is not None:
            self.meanwhile(name)
        self.now += seconds

    def lock(self, name: str) -> ManualLock:
        return ManualLock(self, name)

    def condition(self, name: str) -> ManualCondition:
        return ManualCondition(self, name)

    def event(self, name: str) -> ManualEvent:
        return ManualEvent(self, name)

    def spawn(self, name: str, target: Callable[[], None]) -> NoReturn:
        raise AssertionError(f"no thread {name!r} ({target}) runs under a manual clock")


class FaultyDevice(HostDevice):
    """A device of which chosen operations raise. `faults`: which call of which operation, counted from 1."""

    def __init__(self, **faults: int) -> None:
        self.faults = faults
        self.calls: dict[str, int] = {}

    def _count(self, operation: str) -> None:
        self.calls[operation] = self.calls.get(operation, 0) + 1
        if self.calls[operation] == self.faults.get(operation):
            raise OSError(f"{operation} call {self.calls[operation]} was made to fail")

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._count("clone")
        return super().clone(rows, dtype)

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self._count("copy_to_host")
        super().copy_to_host(rows, out)

    def gather_to_host(self, parts: Sequence[torch.Tensor], chunk_bytes: int) -> torch.Tensor:
        self._count("gather_to_host")
        return super().gather_to_host(parts, chunk_bytes)
