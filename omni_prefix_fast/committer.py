"""`OmniPrefixCacheController`: the queue of writes and the one writer of pool rows.

First in, first out. Guarantees:

- a task is taken from the queue and claimed (COPYING) in one critical section;
- a row is written only if its slot still has the version that the task claimed; rows of a lost tenancy are skipped;
- a failure is recorded before any waiter wakes, fails every task behind it, and is raised by `check` from then on;
- every join has a deadline, and its error names the task and its state.

It never takes the manager's state lock. `eager`: the queue is emptied inside `submit`, on the caller's thread.
Otherwise by one thread, the committer, which alone waits for the device.
"""

from __future__ import annotations

import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch

from omni_prefix_fast.config import PrefixCacheConfig
from omni_prefix_fast.device import Device
from omni_prefix_fast.errors import (
    OmniPrefixCacheClosedError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheWriteError,
)
from omni_prefix_fast.metrics import Counters
from omni_prefix_fast.pool import ByteRows, PrefixBlockPool
from omni_prefix_fast.runtime import Deadline, Event, Runtime, Thread, serve
from omni_prefix_fast.slots import SlotTable
from omni_prefix_fast.staging import StagingBufferPool
from omni_prefix_fast.tasks import ImmediateWrite, WriteTask
from omni_prefix_fast.types import Holder, TaskState


class OmniPrefixCacheController:
    """Moves rows of write tasks to the host and into the pool."""

    def __init__(  # noqa: PLR0913 - the parts it works on, and how
        self,
        pool: PrefixBlockPool,
        table: SlotTable,
        staging: StagingBufferPool,
        config: PrefixCacheConfig,
        *,
        runtime: Runtime,
        device: Device,
        counters: Counters,
        eager: bool = True,
    ) -> None:
        self._pool = pool
        self._table = table
        self._staging = staging
        self._config = config
        self._runtime = runtime
        self._device = device
        self._counters = counters
        self._eager = eager
        self._wake = runtime.condition("committer queue")
        self._queue: deque[WriteTask] = deque()
        self._running: WriteTask | None = None
        self._finished: deque[WriteTask] = deque()
        self._failure: tuple[str, BaseException] | None = None
        self._closed = False
        self._thread: Thread | None = None

    @property
    def failed(self) -> bool:
        """Whether a write has failed."""
        return self._failure is not None

    def check(self) -> None:
        """Raise `OmniPrefixCacheWriteError` if a write has failed, naming the first one."""
        if self._failure is not None:
            what, cause = self._failure
            raise OmniPrefixCacheWriteError(
                f"{what} failed: {type(cause).__name__}: {cause}. Rows behind published block hashes are lost, so the "
                "cache refuses every call; restart the stage"
            ) from cause

    def in_flight(self) -> tuple[WriteTask, ...]:
        """Tasks that are queued or being written."""
        with self._wake:
            return (*((self._running,) if self._running else ()), *self._queue)

    def submit(self, task: WriteTask) -> None:
        """Queue a task whose rows are complete; when eager, write it. Raises as `check` does if that fails."""
        with self._wake:
            accepted = self._failure is None and not self._closed
            if accepted and self._thread is None and not self._eager:
                try:
                    self._thread = self._runtime.spawn("committer", self._work)
                except RuntimeError as error:
                    self._failure = (f"starting the committer thread for {task}", error)
                    accepted = False
            if accepted:
                task.move(TaskState.QUEUED)
                self._queue.append(task)
                self._counters.trace("queue_task", task=task.task_id)
                if not self._eager:
                    self._wake.notify_all()
        if not accepted:
            self._fail([task])
            self.check()
            raise OmniPrefixCacheClosedError(f"{task} was submitted after shutdown")
        if self._eager:
            while self._run_next():
                pass
            self.check()

    def join(self, task: WriteTask, deadline: Deadline) -> None:
        """Wait until a task's rows are in the pool.

        Raises:
            OmniPrefixCacheWriteError: it, or a write before it, failed.
            OmniPrefixCacheStagingTimeoutError: the deadline passed.
            OmniPrefixCacheClosedError: the cache was shut down first.
        """
        self._wait(task, task.done, deadline, "done")

    def join_host_ready(self, task: WriteTask, deadline: Deadline) -> None:
        """Wait until a task's rows are on the host. Raises as `join` does."""
        self._wait(task, task.host_ready, deadline, "host_ready")

    @property
    def has_finished(self) -> bool:
        """Whether `take_finished` has something to give."""
        return bool(self._finished)

    def take_finished(self) -> list[WriteTask]:
        """Tasks that became WRITTEN or FAILED since the last call, oldest first."""
        finished: list[WriteTask] = []
        while self._finished:
            finished.append(self._finished.popleft())
        return finished

    def fail_all(self, what: str, cause: BaseException) -> None:
        """Record a failure that no write of its own has, and fail all that is queued."""
        self._fail(self._give_up(what, cause))

    def close(self, deadline: Deadline) -> None:
        """Fail what is queued and end the committer thread. Waits for the write in progress, until the deadline."""
        with self._wake:
            self._closed = True
            queued, self._queue = list(self._queue), deque()
            self._wake.notify_all()
        self._fail(queued)
        if self._thread is not None:
            self._thread.join(deadline.remaining())

    def _wait(self, task: WriteTask, event: Event, deadline: Deadline, what: str) -> None:
        if not event.is_set():
            self._counters.trace("wait_task", task=task.task_id, until=what)
            if not event.wait(deadline.remaining()):
                raise OmniPrefixCacheStagingTimeoutError(
                    f"{task} is still {task.state.name} after {deadline.seconds:g} s (staging_claim_timeout_s)"
                )
        if task.state is TaskState.FAILED:
            self.check()
            raise OmniPrefixCacheClosedError(f"{task} was dropped by shutdown")

    @property
    def _work(self) -> Callable[[], None]:
        """What the committer thread runs: until closed, or until a write fails."""
        cls = type(self)
        return partial(
            serve, weakref.ref(self), self._wake, self._config.staging_claim_timeout_s, cls._is_idle, cls._run_next
        )

    def _is_idle(self) -> bool:
        return not self._queue and not self._closed

    def _run_next(self) -> bool:
        """Write the oldest queued task; whether to go on. The committer thread waits for one."""
        with self._wake:
            while not self._queue and not self._eager and not self._closed:
                self._wake.wait(self._config.staging_claim_timeout_s)
            if not self._queue or self._running is not None:
                return False
            task = self._running = self._queue.popleft()
            task.move(TaskState.COPYING)
        try:
            self._counters.trace("claim_copy", task=task.task_id)
            self._write(task, self._copy(task))
        except BaseException as error:
            self._fail([task, *self._give_up(str(task), error)])
            if self._eager and not isinstance(error, Exception):
                raise
            return False
        self._running = None
        task.move(TaskState.WRITTEN)
        self._end(task)
        return not self._eager or bool(self._queue)

    def _copy(self, task: WriteTask) -> Sequence[torch.Tensor | ByteRows]:
        """Bring the rows of each piece to the host."""
        host_rows: list[torch.Tensor | ByteRows]
        if isinstance(task, ImmediateWrite):
            task.transfer.wait()  # lands in the staging page
            host_rows = [part for piece in task.pieces for part in piece.rows]
        else:
            chunk_bytes = self._config.copy_chunk_bytes
            parts = [cast("Sequence[torch.Tensor]", piece.rows) for piece in task.pieces]  # of log chunks
            gathered = [self._device.gather_to_host(of_piece, chunk_bytes) for of_piece in parts]
            self._counters.add_all(host_copies=len(gathered), host_copy_bytes=sum(t.nbytes for t in gathered))
            host_rows = list(gathered)
        task.move(TaskState.HOST_READY)
        self._counters.trace("finish_copy", task=task.task_id)
        task.wake()
        return host_rows

    def _write(self, task: WriteTask, host_rows: Sequence[torch.Tensor | ByteRows]) -> None:
        for piece, rows in zip(task.pieces, host_rows, strict=True):
            owned = self._table.still_owned(piece.slots, piece.versions, piece.claims)
            if owned.all():
                self._pool.write(piece.key, piece.slots, rows)
            else:
                kept = np.flatnonzero(owned)
                self._counters.add("rows_lost", piece.slots.shape[0] - kept.shape[0])
                self._pool.write(piece.key, piece.slots, rows, kept)
        self._counters.trace("write_pool", task=task.task_id)

    def _give_up(self, what: str, cause: BaseException) -> list[WriteTask]:
        """Record a failure and take all that is queued, at once: nothing is queued behind a failure."""
        traceback.clear_frames(cause.__traceback__)  # the record is kept: it must not keep device rows alive
        with self._wake:
            if self._failure is None:
                self._failure = (what, cause)
            queued, self._queue = list(self._queue), deque()
            self._running = None
        return queued

    def _fail(self, tasks: list[WriteTask]) -> None:
        for task in tasks:
            task.move(TaskState.FAILED)
            self._counters.trace("fail_task", task=task.task_id)
            self._end(task)
        self._staging.wake()

    def _end(self, task: WriteTask) -> None:
        task.drop_rows()
        if isinstance(task, ImmediateWrite):
            self._staging.release(task.page, Holder("write", task.task_id))
        self._finished.append(task)
        task.wake()
