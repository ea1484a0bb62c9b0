"""Part E: memory. Staging, the byte budget, growth, footprints."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from omni_prefix_fast import HIDDEN_KEY, ModelCachePolicy, OmniPrefixCacheContractError, PrefixCacheConfig
from omni_prefix_fast.device import HostDevice
from omni_prefix_fast.types import Occupancy
from tests.omni_prefix_fast.cases.instruments import (
    CountingDevice,
    census,
    container_sizes,
    nbytes,
    tensor_bytes,
    walk,
)
from tests.omni_prefix_fast.cases.stages import gate
from tests.omni_prefix_fast.harness import Engine, column, filled, per_token

DEFERRED = pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])


def policy(deferred: bool) -> ModelCachePolicy:
    """Key k, per token, deferred or not."""
    return ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()), token_keys=frozenset({"k"}))


# ----------------------------------------------------------------------------------------------------------- E33


class Gauge(HostDevice):
    """Knows how many bytes of clones are alive, and asks for the charge whenever one is made."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.peak_alive = 0
        self.peak_charged = 0
        self._alive = 0

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert self.engine is not None
        clone = super().clone(rows, dtype)
        size = nbytes(clone)
        self._alive += size
        weakref.finalize(clone.untyped_storage(), self._gone, size)
        self.peak_alive = max(self.peak_alive, self._alive)
        self.peak_charged = max(self.peak_charged, self.engine.cache.footprint().device_bytes)
        assert self._alive <= self.engine.cache.footprint().device_bytes, "bytes on the device that nobody pays for"
        return clone

    def _gone(self, size: int) -> None:
        self._alive -= size


def budget_engine(limit: int, **settings: Any) -> tuple[Engine, Gauge]:
    """Deferred key k of 16 bytes a row, and a byte limit."""
    gauge = Gauge()
    engine = gauge.engine = Engine(device=gauge, policy=policy(True), gpu_staging_bytes=limit, **settings)
    return engine, gauge


WIDE: dict[str, Any] = {"k": per_token(4)}


@pytest.mark.parametrize("limit", [48, 16, 33, 100, 16 * 12, 15, 0])
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
def test_E33_one_long_request_stays_within_the_budget(limit: int, finished: bool) -> None:
    """One request decodes 12 positions, 16 bytes each: never more than the limit, and a later hit reads all twelve."""
    engine, gauge = budget_engine(limit)
    engine.take(engine.step(new=[("A", [0, 1, 2], 0, 1)], mm=WIDE), "A")
    for position in range(1, 12):
        assert engine.mm(engine.step(cached=[("A", 1)], mm=WIDE), "k", "A") == [position]
    outs = engine.take(engine.step(new=[("B", [0, 1, 2, 3], 12, 1)], finished=["A"] if finished else [], mm=WIDE), "B")
    assert column(outs.mm_outputs["k"]["B"]) == list(range(13))
    assert gauge.peak_charged <= limit
    assert gauge.peak_alive <= limit
    assert gauge.peak_charged >= limit // 16 * 16 if limit < 16 * 12 else gauge.peak_charged == 16 * 12
    if 16 <= limit < 16 * 12:
        assert engine.cache.statistics().writes_forced > 0


@pytest.mark.parametrize("limit", [48, 96, 160])
@pytest.mark.parametrize("seed", range(4))
def test_E33_many_requests_and_pending_hits_stay_within_the_budget(limit: int, seed: int) -> None:
    """Several requests decode while hits on their open writes are pending: within the limit, and every row right."""
    engine, gauge = budget_engine(limit, num_blocks=32, staging_depth=8)
    generator = torch.Generator().manual_seed(seed)
    names = ["A", "B", "C"]
    new = [(r, [4 * i, 4 * i + 1, 4 * i + 2], 0, 1) for i, r in enumerate(names)]
    engine.take(engine.step(new=new, base={"A": 100, "B": 200, "C": 300}, mm=WIDE), *names)
    pending: list[tuple[str, str, int, int]] = []
    for at in range(1, 12):
        running = [r for r in names if int(torch.randint(4, (), generator=generator))]
        readers: list[tuple[str, list[int], int, int]] = []
        writer = names[at % 2]
        if at % 3 == 0:
            hit = engine.position[writer] // 4 * 4
            reader = f"r{at}"
            engine.base[reader] = engine.base[writer]
            readers = [(reader, [*engine.view.tables[writer][: hit // 4], 12 + at], hit, 1)]
        step = engine.step(cached=[(r, 1) for r in running], new=readers, mm=WIDE)
        for reader, _, hit, _ in readers:
            pending.append((reader, writer, hit, step))
        if not readers:
            outs = engine.take(step, *running)
            for r in running:
                assert column(outs.mm_outputs["k"][r]) == [engine.base[r] + engine.position[r] - 1]
        if len(pending) == 3:
            check_reader(engine, *pending.pop(0))
    for entry in pending:
        check_reader(engine, *entry)
    assert gauge.peak_charged <= limit
    assert gauge.peak_alive <= limit
    engine.cache.new_step_starts(engine.schedule(finished=[*names, *(f"r{at}" for at in range(12))]))
    engine.cache.drain()
    assert engine.cache.footprint().device_bytes == 0


def check_reader(engine: Engine, reader: str, writer: str, hit: int, step: int) -> None:
    """A reader that hit `hit` of the writer's rows has them and its own."""
    assert engine.mm(step, "k", reader) == [engine.base[writer] + p for p in range(hit + 1)]


# ----------------------------------------------------------------------------------------------------------- E35

MODES: Mapping[str, tuple[ModelCachePolicy, dict[str, Any]]] = {
    "hidden only": (ModelCachePolicy(), {}),
    "immediate key": (ModelCachePolicy(), {"k": per_token(1)}),
    "deferred key": (policy(True), {"k": per_token(1)}),
    "no hidden": (ModelCachePolicy(needs_full_hidden_states=False), {"k": per_token(1)}),
    "no hidden, nothing at all": (ModelCachePolicy(needs_full_hidden_states=False, token_keys=frozenset()), {}),
    "leftovers": (ModelCachePolicy(), {"ref": torch.ones(7, 2), "list": [torch.ones(3)], "nested": {"a": [1]}}),
}


def churn(engine: Engine, mm: Mapping[str, Any], first: int, last: int) -> None:
    """One-token requests, each finishing at the next step: plain, hitting, aborted, discarded, resumed, idle.

    A cycle of 20 requests leaves the cache as it found it.
    """
    for i in range(first, last):
        req_id, gone, block = f"request {i}", [f"request {i - 1}"], i % 4
        values = {**mm, "by_request": {req_id: torch.ones(3)}} if "nested" in mm else mm
        match i % 5:
            case 0:
                engine.take(engine.step(new=[(req_id, [block], 0, 1)], finished=gone, mm=values), req_id)
            case 1:  # a hit on what the one before computed
                engine.take(engine.step(new=[(req_id, [(i - 1) % 4], 1, 1)], finished=gone, mm=values), req_id)
            case 2:
                engine.cache.discard_step(engine.step(new=[(req_id, [block], 0, 1)], finished=gone, mm=values))
            case 3:  # its output is asked for by nobody, and it is resumed elsewhere
                engine.take(engine.step(new=[(req_id, [block], 0, 1)], finished=gone, mm=values))
                step = engine.step(resumed=[(req_id, [block + 4], 0, 2)], mm=values)
                engine.take(step, req_id)
            case _:  # same-step hit, then a step of nothing
                other = f"other {i}"
                new = [(req_id, [block], 0, 1), (other, [block, 7], 1, 1)]
                engine.take(engine.step(new=new, finished=gone, mm=values), other)
                engine.cache.new_step_starts(engine.schedule(finished=[other, "never seen"]))


@pytest.mark.parametrize("mode", MODES)
def test_E35_nothing_grows_with_the_number_of_requests(mode: str) -> None:
    """After 600 requests every container and array of the cache has the size that it had after 100."""
    defined, mm = MODES[mode]
    engine = Engine(policy=defined)
    churn(engine, mm, 0, 100)
    engine.cache.drain()
    sizes = container_sizes(engine.cache, leave_out=[engine.view, engine.device])
    churn(engine, mm, 100, 600)
    engine.cache.drain()
    assert container_sizes(engine.cache, leave_out=[engine.view, engine.device]) == sizes
    engine.cache.new_step_starts(engine.schedule(finished=["request 599"]))
    state = engine.settled()
    assert (dict(state.emitted), dict(state.open_writes), dict(state.tasks)) == ({}, {}, {})
    assert (state.charged, state.chunks, state.unconsumed) == (0, (), ())
    assert not any(state.pins)
    assert not any(state.pages)


# ----------------------------------------------------------------------------------------------------------- E36


@pytest.fixture
def _collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.eager_only("the committer may still hold the write that it ended last")
@pytest.mark.usefixtures("_collector_off")
@DEFERRED
def test_E36_everything_dies_without_the_collector(deferred: bool) -> None:
    """With the collector off, 200 steps with hits: what went in and what came out is dead as soon as it is dropped.

    No object of the cache is left in a cycle, and the bytes that it holds stay the same.
    """
    engine = Engine(policy=policy(deferred), staging_depth=3)
    seen: list[weakref.ref[torch.Tensor]] = []

    def step(i: int) -> None:
        writer, reader = f"w{i}", f"r{i}"
        nested = torch.ones(9)
        values: dict[str, Any] = {"k": filled(range(4), 1), "ref": torch.ones(9, 2), "nested": {"ref": nested}}
        hidden = filled(range(4), 2)
        seen.extend(weakref.ref(t) for t in (hidden, nested, values["k"], values["ref"]))
        gone = [f"w{i - 1}", f"r{i - 1}"]
        first = engine.step(new=[(writer, [i % 3], 0, 4)], finished=gone, hidden=hidden, mm=values)
        second = engine.step(new=[(reader, [i % 3, 4], 4, 1)], mm={"k": per_token(1), "ref": torch.ones(9, 2)})
        del hidden, nested, values
        for step_id, req_id in ((second, reader), (first, writer)):
            outs = engine.take(step_id, req_id)
            assert outs.hidden_states is not None
            handed = [outs.hidden_states[req_id], *(v[req_id] for v in outs.mm_outputs.values())]
            seen.extend(weakref.ref(t) for t in handed if isinstance(t, torch.Tensor))

    for i in range(40):
        step(i)
    engine.cache.drain()
    counted, held = census("omni_prefix_fast"), tensor_bytes(engine.cache)
    for i in range(40, 100):
        step(i)
    engine.cache.drain()
    assert len(seen) >= 100 * 9
    assert [ref for ref in seen if ref() is not None] == []
    assert census("omni_prefix_fast") == counted
    assert tensor_bytes(engine.cache) == held


# ----------------------------------------------------------------------------------------------------------- E37

K3 = per_token(3, dtype=torch.float16)


@pytest.mark.parametrize("requests", [1, 4, 8])
@pytest.mark.parametrize("padded", [None, 16], ids=["unpadded", "padded"])
def test_E37_one_copy_a_key_and_step(requests: int, padded: int | None) -> None:
    """Hidden (8, 2) fp32 and k (8, 3) fp16: one copy of 64 bytes and one of 48, whatever the batch."""
    device = CountingDevice()
    engine = Engine(device=device)
    new = [(f"r{i}", [i], 0, 8 // requests) for i in range(requests)] if requests > 1 else [("r0", [0, 1], 0, 8)]
    step = engine.step(new=new, mm={"k": K3}, padded=padded)
    assert device.copies == [64, 48]
    engine.take(step, *(r for r, *_ in new))
    assert device.copies == [64, 48]
    assert device.clones == []
    assert engine.cache.statistics().host_copies == 2
    assert engine.cache.statistics().host_copy_bytes == 112


def test_E37_no_copy_of_hidden_states_that_nobody_needs() -> None:
    """A model that needs the tail only has opted out of hidden states: not one byte of them is copied."""
    device = CountingDevice()
    engine = Engine(device=device, policy=ModelCachePolicy(needs_full_hidden_states=False))
    outs = engine.take(engine.step(new=[("A", [0, 1], 0, 8)], mm={"k": K3}), "A")
    assert outs.hidden_states is None
    assert device.copies == [48]
    assert engine.cache.statistics().host_copy_bytes == 48
    assert set(engine.cache.footprint().pool_bytes) == {"k"}


def test_E37_a_hit_copies_nothing_more_from_the_device() -> None:
    """Cached rows are on the host already: a hit's step copies its own rows and no others."""
    device = CountingDevice()
    engine = Engine(device=device)
    engine.take(engine.step(new=[("A", [0, 1], 0, 8)], mm={"k": K3}), "A")
    device.copies.clear()
    engine.take(engine.step(new=[("B", [0, 1, 2], 8, 2)], mm={"k": K3}), "B")
    assert device.copies == [16, 12]


def test_E37_deferred_rows_are_cloned_once_and_written_once() -> None:
    """A deferred key: one clone a step on the device, and one copy in all when the request finishes."""
    device = CountingDevice()
    engine = Engine(device=device, policy=policy(True))
    engine.take(engine.step(new=[("A", [0, 1], 0, 4)], mm={"k": K3}), "A")
    engine.take(engine.step(cached=[("A", 4)], mm={"k": K3}), "A")
    assert device.clones == [24, 24]
    before = engine.cache.statistics()
    engine.cache.new_step_starts(engine.schedule(finished=["A"]))
    engine.cache.drain()
    after = engine.cache.statistics()
    assert after.host_copies - before.host_copies == 1
    assert after.host_copy_bytes - before.host_copy_bytes == 48


# ----------------------------------------------------------------------------------------------------------- E38


@pytest.mark.parametrize("tokens", [5, 8, 31])
@DEFERRED
def test_E38_a_step_larger_than_a_page_is_refused_before_it_touches_anything(tokens: int, deferred: bool) -> None:
    """A page holds 4 tokens: the larger step is refused by setting and size, the neighbours' pages stay as they are."""
    engine = Engine(num_blocks=16, staging_capacity_tokens=4, staging_depth=3, policy=policy(deferred))
    mm = {"k": per_token(1)}
    first = engine.step(new=[("A", [0], 0, 4)], base={"A": 10}, mm=mm)
    second = engine.step(new=[("B", [1], 0, 4)], base={"B": 20}, mm=mm)
    engine.start(new=[("C", list(range(2, 10)), 0, tokens)], base={"C": 900})
    before, footprint = engine.settled(), engine.cache.footprint()
    with pytest.raises(
        OmniPrefixCacheContractError, match=rf"{tokens} tokens.* holds 4; raise staging_capacity_tokens"
    ):
        engine.save(mm=mm)
    assert engine.cache.inspect() == before
    assert engine.cache.footprint() == footprint
    for step, req_id, base in ((second, "B", 20), (first, "A", 10)):
        outs = engine.take(step, req_id)
        assert column((outs.hidden_states or {})[req_id]) == column(outs.mm_outputs["k"][req_id])
        assert column(outs.mm_outputs["k"][req_id]) == list(range(base, base + 4))


def test_E38_a_page_that_a_step_fills_to_the_last_row_is_enough() -> None:
    """A step of exactly the capacity is fine, padding beyond it does not count."""
    engine = Engine(staging_capacity_tokens=8, staging_depth=1)
    assert engine.hidden(engine.step(new=[("A", [0, 1], 0, 8)], padded=32), "A") == list(range(8))


def test_E38_capacity_is_the_batch_limit_and_else_the_model_length() -> None:
    """8192 batch tokens and a model length of 32768: 8192. No batch limit: the model length. Neither: a default."""
    limited = gate(max_num_batched_tokens=8192, max_model_len=32768)
    unlimited = gate(max_num_batched_tokens=None, max_model_len=32768)
    assert limited is not None
    assert unlimited is not None
    assert limited.staging_capacity_tokens == 8192
    assert unlimited.staging_capacity_tokens == 32768
    bare = PrefixCacheConfig.from_vllm_config(num_blocks=8, block_size=4, scheduler_config=SimpleNamespace())
    assert bare.staging_capacity_tokens == PrefixCacheConfig(num_blocks=8, block_size=4).staging_capacity_tokens


# ----------------------------------------------------------------------------------------------------------- E39


@DEFERRED
def test_E39_the_report_is_what_is_allocated(deferred: bool) -> None:
    """8 blocks of 4, hidden (2) fp32 and k (3) fp16, two pages of 16: 256 + 192 in the pools, as much in the pages.

    896 bytes in all, and the cache's tensors hold just that; idle, nothing is pending; a hit gathered early is.
    """
    engine = Engine(staging_depth=2, staging_capacity_tokens=16, policy=policy(deferred))
    assert engine.cache.footprint().host_bytes == tensor_bytes(engine.cache) == 0
    engine.take(engine.step(new=[("A", [0, 1], 0, 8)], mm={"k": K3}), "A")
    engine.cache.new_step_starts(engine.schedule(finished=["A"]))
    engine.cache.drain()
    footprint = engine.cache.footprint()
    assert footprint.pool_bytes == {HIDDEN_KEY: 256, "k": 192}
    assert footprint.static_bytes == 448
    assert footprint.staging_bytes == {HIDDEN_KEY: 256, "k": 192}
    assert footprint.host_bytes == 896
    assert (footprint.pending_bytes, footprint.device_bytes) == (0, 0)
    assert tensor_bytes(engine.cache) == 896
    arrays = [part for _, part in walk(engine.cache, leave_out=[engine.view]) if isinstance(part, np.ndarray)]
    tables = [array for array in arrays if array.flags.owndata and len(array) == engine.config.num_slots]
    assert footprint.table_bytes == sum(table.nbytes for table in tables)
    hit = engine.step(new=[("B", [0, 1, 2], 8, 1)], mm={"k": K3})
    engine.cache.discard_step(engine.step(new=[("C", [0, 1], 0, 8)], mm={"k": K3}))
    gathered = 9 * (8 + 6)
    engine.cache.drain()
    assert engine.cache.footprint().pending_bytes == gathered
    device_bytes = engine.cache.footprint().device_bytes
    assert device_bytes == ((1 + 8) * 6 if deferred else 0)
    assert tensor_bytes(engine.cache) == 896 + gathered + device_bytes
    engine.take(hit, "B")
    assert engine.cache.footprint().pending_bytes == 0


# ----------------------------------------------------------------------------------------------------------- E40


class Elsewhere(torch.Tensor):
    """A tensor on a device that is neither a CPU nor CUDA. Operations run on the host copy behind it."""

    host: torch.Tensor

    @staticmethod
    def around(inner: torch.Tensor) -> Elsewhere:
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - torch has no public name for it
        made: Elsewhere = make(Elsewhere, inner.shape, dtype=inner.dtype, device=torch.device("meta"))
        made.host = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub lacks the first argument
        cls, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return on_host(func, args, kwargs)


def on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Run an operation of the other device on the host; what it makes is there again unless it goes to the host."""
    options = dict(kwargs or {})
    there = any(isinstance(v, Elsewhere) for v in tree_leaves(list(args)))
    match func.overloadpacket.__name__:
        case "copy_":
            there = isinstance(args[0], Elsewhere)
        case "_to_copy" if options.get("device") is not None:
            there = torch.device(options.pop("device")).type != "cpu"
    result = func(*tree_map(lambda v: v.host if isinstance(v, Elsewhere) else v, list(args)), **options)
    return Elsewhere.around(result) if there and isinstance(result, torch.Tensor) else result


class OtherDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, host tensors can be moved to the other device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return on_host(func, args, kwargs)


@pytest.mark.eager_only("the other device is seen by one thread only")
@DEFERRED
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
def test_E40_rows_of_a_device_that_is_not_cuda_land_on_the_host(deferred: bool, finished: bool) -> None:
    """Hidden states, k and leftovers on some other device: pools, pages and everything handed over are host memory."""
    engine = Engine(policy=policy(deferred))

    def save(values: Sequence[int]) -> int:
        mm = {"k": Elsewhere.around(filled(values, 1)), "ref": Elsewhere.around(filled([7, 8, 9, 10, 11, 12], 2))}
        return engine.save(hidden=Elsewhere.around(filled(values, 2)), mm=mm)

    with OtherDevice():  # type: ignore[no-untyped-call]
        engine.start(new=[("A", [0], 0, 4)])
        first = save(range(4))
        engine.start(new=[("B", [0, 1], 4, 2)], finished=["A"] if finished else [])
        second = save([4, 5])
        taken = [(engine.take(step, r), r) for step, r in ((first, "A"), (second, "B"))]
    for (outs, req_id), right in zip(taken, [list(range(4)), list(range(6))], strict=True):
        assert outs.hidden_states is not None
        handed = [outs.hidden_states[req_id], outs.mm_outputs["k"][req_id], outs.mm_outputs["ref"][req_id]]
        assert all(type(t) is torch.Tensor and t.device.type == "cpu" for t in handed)
        assert column(handed[0]) == column(handed[1]) == right
        assert column(handed[2]) == [7, 8, 9, 10, 11, 12]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a box with a device pins")
def test_E40_without_a_device_nothing_is_pinned() -> None:
    """A CPU-only build constructs the cache and opens keys in ordinary memory."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"k": per_token(1)}), "A")
    state = engine.settled()
    assert {key: state.occupancy[key][:4] for key in (HIDDEN_KEY, "k")} == {
        HIDDEN_KEY: (Occupancy.COMMITTED,) * 4,
        "k": (Occupancy.COMMITTED,) * 4,
    }
