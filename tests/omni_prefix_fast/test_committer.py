"""The single writer: order, lost tenancies, failures and joins that end."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from omni_prefix_fast import (
    OmniPrefixCacheController,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheWriteError,
    PrefixBlockPool,
    PrefixCacheConfig,
)
from omni_prefix_fast.metrics import Counters
from omni_prefix_fast.pool import RowSpec
from omni_prefix_fast.runtime import Deadline
from omni_prefix_fast.slots import SlotTable
from omni_prefix_fast.staging import StagingBufferPool
from omni_prefix_fast.tasks import DeferredWrite, ImmediateWrite, WritePiece, WriteTask
from omni_prefix_fast.types import Holder, TaskState
from tests.omni_prefix_fast.harness import FaultyDevice, ManualRuntime, column, filled

KEY = "k"


class Parts:
    """A controller and what it works on."""

    def __init__(self, **faults: int) -> None:
        config = PrefixCacheConfig(num_blocks=4, block_size=4, staging_depth=2, staging_capacity_tokens=8)
        self.runtime = ManualRuntime()
        self.actions: list[str] = []
        self.pool = PrefixBlockPool(config)
        self.table = SlotTable(config.num_slots)
        self.staging = StagingBufferPool(config, self.runtime)
        self.counters = Counters(self.sink)
        self.controller = OmniPrefixCacheController(
            self.pool,
            self.table,
            self.staging,
            config,
            runtime=self.runtime,
            device=FaultyDevice(**faults),
            counters=self.counters,
        )
        spec = RowSpec.of(filled([0], 2))
        self.pool.open(KEY, spec)
        self.staging.open(KEY, spec)
        self.table.open_key(KEY, deferred=False)

    def sink(self, action: str, acted_on: Mapping[str, object]) -> None:
        self.actions.append(f"{action} {acted_on['task']}")

    def immediate(self, task_id: int, slots: list[int], value: int) -> ImmediateWrite:
        """A step's write of one value, landed in a page that it holds."""
        page = self.staging.claim(Holder("write", task_id), Deadline(self.runtime, 1.0))
        self.staging.rows(page, KEY, len(slots)).fill_(value)
        task = ImmediateWrite(task_id, task_id, self.runtime, page)
        self.pieces(task, slots, value)
        task.pieces[0].rows = (self.staging.rows(page, KEY, len(slots)),)
        return task

    def deferred(self, task_id: int, slots: list[int], value: int) -> DeferredWrite:
        """A sealed deferred write of one value."""
        task = DeferredWrite(task_id, 0, self.runtime, req_id="A", write_n=1, first_chunk=0)
        self.pieces(task, slots, value)
        return task

    def pieces(self, task: WriteTask, slots: list[int], value: int) -> None:
        """Claim the slots for the task's rows."""
        at = np.array(slots)
        versions = self.table.claim(at, task.step_id, (KEY,))
        task.pieces = [WritePiece(KEY, at, versions, [filled([value] * len(slots), 2)])]

    def row(self, slot: int) -> int:
        """Value of a pool row."""
        return column(self.pool.storage(KEY).reshape(16, 2)[slot : slot + 1])[0]


def test_writes_go_in_order_through_the_whole_chain() -> None:
    """First in, first out; each action is told once; pages are let go and `done` is set."""
    parts = Parts()
    tasks = [parts.immediate(0, [0, 1], 10), parts.deferred(1, [4], 20)]
    for task in tasks:
        parts.controller.submit(task)
        assert task.state is TaskState.WRITTEN
        assert task.done.is_set()
    steps = ("queue_task", "claim_copy", "finish_copy", "write_pool")
    assert parts.actions == [f"{step} {task.task_id}" for task in tasks for step in steps]
    assert [parts.row(s) for s in (0, 1, 2, 4)] == [10, 10, 0, 20]
    assert parts.staging.holders() == ((), ())
    assert parts.controller.take_finished() == tasks
    assert parts.controller.take_finished() == []
    assert parts.controller.in_flight() == ()
    assert all(len(piece.rows) == 0 for task in tasks for piece in task.pieces)


@pytest.mark.parametrize("kind", ["immediate", "deferred"])
def test_rows_of_a_lost_tenancy_are_skipped(kind: str) -> None:
    """Only slots that still have the claimed version are written; the others are counted."""
    parts = Parts()
    late = parts.immediate(0, [0, 1, 2], 10) if kind == "immediate" else parts.deferred(0, [0, 1, 2], 10)
    parts.controller.submit(parts.immediate(1, [1], 20))
    parts.controller.submit(late)
    assert [parts.row(s) for s in (0, 1, 2)] == [10, 20, 10]
    assert parts.counters.snapshot().rows_lost == 1


def test_failure_is_recorded_before_anybody_wakes_and_fails_the_rest() -> None:
    """The waiter of a failed write finds the record; the next one is refused, FAILED and its page let go."""
    parts = Parts(gather_to_host=1)
    seen: list[bool] = []

    class Watched(DeferredWrite):
        def wake(self) -> None:
            seen.append(parts.controller.failed)
            super().wake()

    task = Watched(0, 0, parts.runtime, req_id="A", write_n=1, first_chunk=0)
    parts.pieces(task, [0], 10)
    with pytest.raises(OmniPrefixCacheWriteError, match=r"write 0 \(deferred.*'A'\) failed: OSError"):
        parts.controller.submit(task)
    assert seen == [True]
    behind = parts.immediate(1, [1], 20)
    with pytest.raises(OmniPrefixCacheWriteError, match="write 0"):
        parts.controller.submit(behind)
    for failed in (task, behind):
        assert failed.state is TaskState.FAILED
        with pytest.raises(OmniPrefixCacheWriteError, match="write 0"):
            parts.controller.join(failed, Deadline(parts.runtime, 1.0))
    assert parts.staging.holders() == ((), ())
    assert parts.row(0) == parts.row(1) == 0
    assert parts.controller.take_finished() == [task, behind]


def test_first_failure_is_the_one_that_is_told() -> None:
    """A later failure does not replace the record."""
    parts = Parts()
    parts.controller.check()
    parts.controller.fail_all("the first", ValueError("a"))
    parts.controller.fail_all("the second", ValueError("b"))
    with pytest.raises(OmniPrefixCacheWriteError, match="the first failed: ValueError: a") as told:
        parts.controller.check()
    assert isinstance(told.value.__cause__, ValueError)


def test_interrupt_during_a_write_is_passed_on_and_sticks() -> None:
    """Ctrl-C is not swallowed, and the half-written state is a failure."""
    parts = Parts()
    task = parts.deferred(0, [0], 1)

    class Interrupting:
        @property
        def shape(self) -> tuple[int, ...]:
            raise KeyboardInterrupt

    task.pieces[0].rows = [Interrupting()]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        parts.controller.submit(task)
    assert task.state is TaskState.FAILED
    with pytest.raises(OmniPrefixCacheWriteError, match="KeyboardInterrupt"):
        parts.controller.check()


def test_join_has_a_deadline_and_names_the_task() -> None:
    """A write that does not end is waited for until the deadline; the error says which and where it stands."""
    parts = Parts()
    task = parts.deferred(7, [0], 1)
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"write 7 .*PENDING after 3 s \(staging_claim_timeo"):
        parts.controller.join(task, Deadline(parts.runtime, 3.0))
    assert parts.runtime.now == 3.0
    parts.controller.submit(task)
    parts.controller.join(task, Deadline(parts.runtime, 3.0))
    assert parts.runtime.now == 3.0
