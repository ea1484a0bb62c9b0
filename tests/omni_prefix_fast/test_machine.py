"""The machine's actions: their names, their order within a step, and what happens under the state lock."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from omni_prefix_fast import ModelCachePolicy, OmniPrefixCacheWriteError
from omni_prefix_fast.device import HostDevice, Transfer
from omni_prefix_fast.types import IntArray
from tests.omni_prefix_fast import harness

DEFER = ModelCachePolicy(deferred_keys=frozenset({"d"}))
MM = {"d": harness.per_token(1)}
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "machine.md"
BESIDE = {"unplan_read", "preserve_read", "seal_write", "release_step", "wait_task", "wait_read"}
"""Actions told one read or write at a time, the end of a handover, and what no table follows: waits."""


def every_action(sink: Callable[[str, Mapping[str, object]], None]) -> harness.Engine:
    """A short run in which everything happens: hits, same-step hits, preserved reads, forced writes."""
    engine = harness.Engine(policy=DEFER, trace=sink, eager=True, gpu_staging_bytes=6 * 4)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=MM), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)], mm=MM)
    step = engine.step(new=[("C", [0], 0, 4), ("D", [0, 2], 4, 1)], finished=["A"], mm=MM)
    engine.take(late, "B")
    engine.take(step, "D")
    engine.take(engine.step(new=[("E", [3, 4], 0, 6)], mm=MM), "E")
    return engine


def test_actions_are_those_of_the_document() -> None:
    """Each traced name is an action of docs/machine.md in small letters, and each of a run without failure occurs."""
    named = set(re.findall(r"`([A-Z][A-Za-z]+)(?:\([a-z, ]*\))?`", DOCUMENT.read_text(encoding="utf-8")))
    documented = {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in named}
    seen: set[str] = set()
    engine = every_action(lambda action, _: seen.add(action))
    assert engine.cache.statistics().writes_forced
    assert seen - documented <= BESIDE
    expected = {"finish_request", "start_request", "plan_read", "claim_page", "reserve_budget", "claim_slots"}
    expected |= {"register_write", "append_rows", "open_step", "queue_task", "claim_copy", "finish_copy", "write_pool"}
    assert expected | {"commit_task", "take_step", "fetch_read", "unplan_read", "preserve_reads", "seal_write"} <= seen


def test_order_of_a_step() -> None:
    """Finished requests first, then plans; at save the page, the budget, unplanned and preserved reads, the claim."""
    order: list[str] = []
    engine = harness.Engine(policy=DEFER, trace=lambda action, _: order.append(action), eager=True)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=MM), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)], mm=MM)
    order.clear()
    engine.step(new=[("C", [0], 0, 4), ("D", [0, 2], 4, 1)], finished=["A"], mm=MM)
    write = ["queue_task", "claim_copy", "finish_copy", "write_pool", "commit_task"]
    # Where the read is unplanned relative to the page and the budget is free; before the claim it has to be.
    assert [a for a in order if a not in {"claim_page", "unplan_read", "reserve_budget"}] == [
        *("finish_request", *write, "start_request", "start_request", "plan_read"),
        *("preserve_read", "fetch_read", "preserve_reads"),
        *("claim_slots", "register_write", "append_rows", "plan_read", "open_step"),
        *write,
    ]
    for action in ("claim_page", "unplan_read", "reserve_budget"):
        assert order.index("plan_read") < order.index(action) < order.index("claim_slots")
    assert engine.mm(late, "d", "B") == [0, 1, 2, 3, 4]


class WatchedLock(harness.ManualLock):
    """Knows whether it is held."""

    held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.held = super().acquire(blocking, timeout) or self.held
        return True

    def release(self) -> None:
        self.held = False
        super().release()


class WatchedRuntime(harness.ManualRuntime):
    """Keeps the state lock where a test can see it."""

    state: WatchedLock

    def lock(self, name: str) -> harness.ManualLock:
        if name != "manager state":
            return super().lock(name)
        self.state = WatchedLock(self, name)
        return self.state


class WatchingDevice(HostDevice):
    """Refuses to move a row while the state lock is held."""

    def __init__(self, runtime: WatchedRuntime) -> None:
        self.runtime = runtime
        self.moves: list[str] = []

    def _move(self, what: str) -> None:
        assert not self.runtime.state.held, f"{what} under the state lock"
        self.moves.append(what)

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._move("clone")
        return super().clone(rows, dtype)

    def launch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        self._move("launch")
        return super().launch(copies)

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self._move("copy_to_host")
        super().copy_to_host(rows, out)

    def rows_to_host(self, rows: torch.Tensor, index: IntArray, out: torch.Tensor) -> None:
        self._move("rows_to_host")
        super().rows_to_host(rows, index, out)

    def gather_to_host(self, parts: Sequence[torch.Tensor], chunk_bytes: int) -> torch.Tensor:
        self._move("gather_to_host")
        return super().gather_to_host(parts, chunk_bytes)


def test_no_row_moves_under_the_state_lock() -> None:
    """Clones, copies, gathers from the log and writes all happen outside it."""
    runtime = WatchedRuntime()
    device = WatchingDevice(runtime)
    engine = harness.Engine(policy=DEFER, runtime=runtime, device=device, eager=True, gpu_staging_bytes=6 * 4)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=MM), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)], mm=MM)
    engine.step(new=[("C", [0], 0, 4), ("D", [0, 2], 4, 1)], finished=["A"], mm=MM)
    engine.take(late, "B")
    assert set(device.moves) == {"clone", "launch", "copy_to_host", "rows_to_host", "gather_to_host"}
    assert runtime.waited == []


@pytest.mark.parametrize("action", ["claim_slots", "append_rows", "register_write", "open_step"])
def test_fault_at_any_point_of_a_publish_holds_nothing(action: str) -> None:
    """Device bytes, pages, pins and tasks come back wherever the publish stops."""

    def sink(told: str, acted_on: Mapping[str, object]) -> None:
        if told == action and acted_on["step"] == 1:
            raise MemoryError(told)

    engine = harness.Engine(policy=DEFER, trace=sink, eager=True)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=MM), "A")
    with pytest.raises(MemoryError, match=action):
        engine.step(new=[("B", [0, 1], 4, 1)], mm=MM)
    seen = engine.cache.inspect()
    assert (seen.charged, seen.chunks, seen.tasks, seen.unconsumed) == (0, (), {}, ())
    assert not any(seen.pins)
    assert not any(seen.pages)
    with pytest.raises(OmniPrefixCacheWriteError, match="publishing step 1"):
        engine.start()


@pytest.mark.parametrize("budget", [0, 1000])
def test_versions_rise_by_one_a_claim(budget: int) -> None:
    """Each computed slot's version rises by one a step that computes it; no other slot's moves."""
    engine = harness.Engine(policy=DEFER, eager=True, gpu_staging_bytes=budget)
    engine.take(engine.step(new=[("A", [0, 1], 0, 6)], mm=MM), "A")
    engine.take(engine.step(resumed=[("A", [0, 1], 4, 2)]), "A")
    engine.start(new=[("B", [0], 0, 1)])
    engine.start()
    assert engine.cache.inspect().version[:8] == (2, 1, 1, 1, 2, 2, 0, 0)
