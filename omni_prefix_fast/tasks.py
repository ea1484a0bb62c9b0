"""Write tasks: what moves rows into the pool, and the strict chain of states that each goes through.

`LEGAL_MOVES` is the chain. Guarantees: no state is skipped or entered twice; WRITTEN and FAILED are final; `done` is
set after the state says why, and never before the failure record is published (see `committer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from omni_prefix_fast.device import Landed, Transfer
from omni_prefix_fast.pool import ByteRows
from omni_prefix_fast.runtime import Latch, Runtime
from omni_prefix_fast.types import IntArray, Key, ReqId, StepId, TaskId, TaskState, WriteSchedule

LEGAL_MOVES: Mapping[TaskState, frozenset[TaskState]] = MappingProxyType(
    {
        TaskState.PENDING: frozenset({TaskState.QUEUED, TaskState.FAILED}),
        TaskState.QUEUED: frozenset({TaskState.COPYING, TaskState.FAILED}),
        TaskState.COPYING: frozenset({TaskState.HOST_READY, TaskState.FAILED}),
        TaskState.HOST_READY: frozenset({TaskState.WRITTEN, TaskState.FAILED}),
        TaskState.WRITTEN: frozenset(),
        TaskState.FAILED: frozenset(),
    }
)

ENDED = frozenset({TaskState.WRITTEN, TaskState.FAILED})
"""States that are never left."""


class IllegalMoveError(AssertionError):
    """A task was told to skip or repeat a state. A fault of the cache itself, never of its caller."""


@dataclass(slots=True)
class WritePiece:
    """Rows of one key on their way: where they go, as whose tenancy, and where they are."""

    key: Key
    slots: IntArray
    versions: IntArray
    """Version of each slot when it was claimed for this row."""
    rows: Sequence[torch.Tensor | ByteRows]
    """Parts that make up `(len(slots), *feature)`: host views of a staging page, or device rows of log chunks."""
    claims: int | None = None
    """`SlotTable.claims` right after the claim; None for rows of several claims."""


class WriteTask:
    """One write. Its state is changed by the committer only."""

    schedule: ClassVar[WriteSchedule]

    def __init__(self, task_id: TaskId, step_id: StepId, runtime: Runtime) -> None:
        self.task_id = task_id
        self.step_id = step_id
        """Step that registered the write; of a deferred one, the step of its first rows."""
        self.pieces: list[WritePiece] = []
        self.state = TaskState.PENDING
        self.host_ready = Latch(runtime, f"write {task_id} host ready")
        self.done = Latch(runtime, f"write {task_id} done")

    def move(self, to: TaskState) -> None:
        """Take one step along the chain. Raises `IllegalMoveError` for any other move."""
        if to not in LEGAL_MOVES[self.state]:
            raise IllegalMoveError(f"{self}: {self.state.name} -> {to.name} is no legal move")
        self.state = to

    def wake(self) -> None:
        """Set what the current state entitles waiters to see."""
        state = self.state
        if state is TaskState.HOST_READY or state in ENDED:
            self.host_ready.set()
        if state in ENDED:
            self.done.set()

    def drop_rows(self) -> None:
        """Let go of the row tensors; slots and versions stay for the commit."""
        for piece in self.pieces:
            piece.rows = ()


class ImmediateWrite(WriteTask):
    """A step's rows of every immediate key, viewed in its staging page, where `transfer` brings them."""

    schedule = WriteSchedule.JOIN_NEXT_STEP

    def __init__(
        self, task_id: TaskId, step_id: StepId, runtime: Runtime, page: int, transfer: Transfer | None = None
    ) -> None:
        super().__init__(task_id, step_id, runtime)
        self.page = page
        self.transfer = transfer or Landed()

    def drop_rows(self) -> None:
        """See `WriteTask`. The device rows that the transfer reads from go as well."""
        super().drop_rows()
        self.transfer = Landed()

    def __str__(self) -> str:
        return f"write {self.task_id} (step {self.step_id})"


class DeferredWrite(WriteTask):
    """A request's rows of the deferred keys since the write was opened, in the log until it is sealed."""

    schedule = WriteSchedule.JOIN_ON_FINISH

    def __init__(
        self, task_id: TaskId, step_id: StepId, runtime: Runtime, *, req_id: ReqId, write_n: int, first_chunk: int
    ) -> None:
        super().__init__(task_id, step_id, runtime)
        self.req_id = req_id
        self.write_n = write_n
        """How manieth deferred write of its request, from 1."""
        self.first_chunk = first_chunk
        """Id of the first log chunk with rows of this write; once written, of the first that it still holds."""
        self.end_chunk: int | None = None
        """Id after the last one, once the write is sealed; later chunks belong to the request's next write."""

    def __str__(self) -> str:
        return f"write {self.task_id} (deferred write {self.write_n} of request {self.req_id!r})"
