"""`EagerDriver`: the actions in the order of a step, behind the public contract. Whatever may run later runs at once.

The calls are those of the production cache, with plain values in place of tensors and scheduler objects. A driver with
other ideas about time (a committer that lags, a builder that overlaps a save) overrides `between` and `dispatch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from omni_prefix_ref.errors import (
    NotEnabled,
    OmniPrefixCacheContractError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheUnmatchError,
)
from omni_prefix_ref.machine import Machine
from omni_prefix_ref.state import BatchItem, Key, Outputs, Req, Rows, Settings, Slot, StepId, TaskId, TaskState


@dataclass(frozen=True)
class Admission:
    """A request that comes in, or back, with its whole block table (None: the engine told none)."""

    req: Req
    computed: int
    blocks: tuple[int, ...] | None


@dataclass(frozen=True)
class StepStart:
    """What the scheduler says of a step: finished ids, admissions, and the tokens to compute by request."""

    finished: tuple[Req, ...] = ()
    admitted: tuple[Admission, ...] = ()
    scheduled: Mapping[Req, int] = field(default_factory=dict)


class Observer(Protocol):
    """Is told of each action, with the states before and after it."""

    def __call__(self, action: str, args: tuple[Any, ...], before: Machine, after: Machine) -> None: ...


class EagerDriver:
    """The reference cache. `machine` is its present state.

    `fail_next` ("copy" or "write") makes the next copy to the host or write to the pool fail, `fail_clone` the clone
    that a save makes of its deferred rows.
    """

    def __init__(
        self, settings: Settings, *, machine: type[Machine] = Machine, observers: Sequence[Observer] = ()
    ) -> None:
        self.machine = machine.start(settings)
        self.observers = tuple(observers)
        self.fail_next: str | None = None
        self.fail_clone = False
        self._scheduled: Mapping[Req, int] | None = None
        self._unsaved: tuple[Slot, ...] = ()

    # ------------------------------------------------------------------------- the public contract

    def new_step_starts(self, start: StepStart) -> None:
        """Finished ids first, then admissions, then the plans of their reads.

        A request told of wrongly is reported once the others are served.
        """
        self.machine.check_usable()
        self._scheduled = None
        self.give_up_step()
        self.finish_requests(start.finished)
        self.machine.check_usable()
        problems = self.start_requests(start.admitted)
        if problems:
            self.do("abandon_reads")
            raise OmniPrefixCacheContractError("; ".join(problems))
        for read, hit in tuple(self.machine.reads.items()):
            if hit.step is None:
                self.do("plan_read", read)
        self._scheduled = {req: n for req, n in start.scheduled.items() if n}

    def save_outputs(
        self, batch: tuple[BatchItem, ...], rows: Rows, *, widths: Mapping[Key, int] | None = None
    ) -> StepId:
        """Save one step: its rows by key, request after request. Returns the step's id."""
        self.machine.check_usable()
        self._check_save(batch, rows, widths or {})
        slots = tuple(slot for item in batch for slot in item.slots)
        emits = frozenset(rows)
        deferred, num_bytes = self._deferred(emits, len(slots))
        step = self.issue_step()
        self.wait("claim_page", step, rows)
        try:
            if num_bytes:
                self.make_room(num_bytes)
                self.do("reserve_budget", num_bytes)
            self.do("unplan_reads", slots)
            self.clone(num_bytes)
            self.wait("preserve_reads", slots)
        except (OmniPrefixCacheUnmatchError, MemoryError):
            self.do("cancel_step", step)
            raise
        self.do("claim_slots", step, slots, emits)
        if emits - deferred:
            self.do("register_write", step, slots, emits - deferred)
        if deferred:
            self.do("append_rows", batch, {key: rows[key] for key in deferred}, num_bytes)
        self.plan_again()
        self.do("open_step", step, batch, emits)
        self._scheduled = None
        self.dispatch()
        self.machine.check_usable()
        return step

    def materialize(self, step: StepId, reqs: tuple[Req, ...]) -> Outputs:
        """Hand over the step's rows of these requests."""
        self.machine.check_usable()
        self.do("take_step", step, reqs)
        try:
            for req, read in tuple(self.machine.steps[step].reads.items()):
                if req in reqs:
                    self.wait("fetch_read", read)
            outputs = self.machine.outputs(step)
            self.tell("outputs", (step, outputs), self.machine)
            return outputs
        finally:
            self.do("release_step", step)

    def discard_step(self, step: StepId) -> None:
        """Consume the step and hand nothing over."""
        self.machine.check_usable()
        self.do("discard_step", step)

    def shutdown(self) -> None:
        """Let every write land, then answer no more. Again: nothing."""
        if self.machine.closed:
            return
        for req in tuple(self.machine.open_write):
            self.do("seal_write", req)
        self.queue_tasks()
        while self.commit_some():
            pass
        self.do("shut_down")

    def forward_not_saved(self, slots: tuple[Slot, ...]) -> None:
        """The engine computed these slots, and `save_outputs` is never called for them."""
        self._unsaved = slots

    # ------------------------------------------------------------------------- the engine thread's parts

    def give_up_step(self) -> None:
        """A step that was never saved is over: its reads are dropped, and its slots claimed with no rows."""
        self.do("abandon_reads")
        if self._unsaved:
            self.wait("preserve_reads", self._unsaved)
            self.do("claim_slots", self.machine.next_id, self._unsaved, frozenset())
            self._unsaved = ()

    def finish_requests(self, reqs: Sequence[Req]) -> None:
        """Seal what the finished requests wrote, and see it on its way."""
        for req in reqs:
            self.do("finish_request", req)
        self.dispatch()

    def start_requests(self, admitted: Sequence[Admission]) -> list[str]:
        """Admit each request; return what is wrong with the others, one line each."""
        problems: list[str] = []
        for admission in admitted:
            if admission.blocks is None and admission.computed:
                problems.append(f"request {admission.req!r} came without a block table")
                continue
            try:
                self.do("start_request", admission.req, admission.computed, admission.blocks or ())
            except OmniPrefixCacheContractError as error:
                problems.append(str(error))
        return problems

    def issue_step(self) -> StepId:
        """The id of the step to be saved: one never issued before."""
        return self.machine.next_id

    def make_room(self, num_bytes: int) -> None:
        """Until so many bytes fit: take the oldest chunk, seal the writes and fetch the reads that hold its rows."""
        while self.machine.charged + num_bytes > self.machine.settings.budget_bytes and self.machine.log:
            oldest = min(self.machine.log)
            for kind, number in sorted(self.machine.log[oldest].holders):
                if kind == "read":
                    self.wait("fetch_read", number)
                elif number in self.machine.open_write.values():
                    self.do("seal_write", self.machine.tasks[number].req)
            self.dispatch()
            while oldest in self.machine.log:
                if not self.commit_some():
                    raise OmniPrefixCacheStagingTimeoutError(f"log chunk {oldest} is held: {self.machine.log[oldest]}")
            self.machine.check_usable()

    def clone(self, num_bytes: int) -> None:
        """Clone the step's deferred rows on the device, which may have no room whatever the budget says."""
        if num_bytes and self.fail_clone:
            raise MemoryError(f"the device has no room for {num_bytes} bytes")

    def plan_again(self) -> None:
        """The plans that were dropped because their producer is in this batch."""
        for read, hit in tuple(self.machine.reads.items()):
            if hit.step is None and hit.plan is None:
                self.do("plan_read", read)

    # ------------------------------------------------------------------------- the committer's part

    def dispatch(self) -> None:
        """What is ready to be written is queued and, being eager, written."""
        self.queue_tasks()
        while self.commit_some():
            pass

    def queue_tasks(self) -> None:
        """Queue every write that takes no more rows."""
        still_open = set(self.machine.open_write.values())
        for task, write in tuple(self.machine.tasks.items()):
            if write.state is TaskState.PENDING and task not in still_open:
                self.do("queue_task", task)

    def commit_some(self) -> bool:
        """The committer's next action, if it has one. After a failure it fails whatever it takes up."""
        for task, write in self.machine.tasks.items():
            match write.state:
                case TaskState.WRITTEN:
                    self.do("commit_task", task)
                case TaskState.COPYING if self.fail_next == "copy" or self.machine.failure:
                    self.fail(task, "device-to-host copy")
                case TaskState.COPYING:
                    self.do("finish_copy", task)
                case TaskState.HOST_READY if self.fail_next == "write":
                    self.fail(task, "pool write")
                case TaskState.HOST_READY:
                    self.do("write_pool", task)
                case _:
                    continue
            return True
        if self.machine.queue:
            self.do("claim_copy")
            return True
        return False

    def fail(self, task: TaskId, cause: str) -> None:
        """A write fails: the record first, then the task, which wakes its waiters."""
        self.fail_next = None
        self.do("publish_failure", task, cause)
        self.do("fail_task", task)

    # ------------------------------------------------------------------------- running actions

    def do(self, action: str, *args: Any) -> None:
        """Run one action and tell the observers."""
        before = self.machine
        after: Machine = getattr(before, action)(*args)
        self.machine = after
        self.tell(action, args, before)
        self.between()

    def tell(self, action: str, args: tuple[Any, ...], before: Machine) -> None:
        """Tell the observers of an action, or of the query `outputs`, that led to the present state."""
        for observer in self.observers:
            observer(action, args, before, self.machine)

    def wait(self, action: str, *args: Any) -> None:
        """Run an action once it is enabled. Only the committer can help; when it has nothing to do, time runs out."""
        while True:
            try:
                self.do(action, *args)
            except NotEnabled:
                if not self.commit_some():
                    raise self._timed_out(action) from None
            else:
                return

    def between(self) -> None:
        """Between any two actions, where other threads may run. Eager: none does."""

    # ------------------------------------------------------------------------- checks

    def _check_save(self, batch: tuple[BatchItem, ...], rows: Rows, widths: Mapping[Key, int]) -> None:
        settings = self.machine.settings
        scheduled = self._scheduled
        if scheduled is None:
            raise OmniPrefixCacheContractError("save_outputs without a new_step_starts of its own")
        if {item.req: len(item.slots) for item in batch} != dict(scheduled):
            raise OmniPrefixCacheContractError(f"the batch {batch} is not what was scheduled: {dict(scheduled)}")
        count = sum(scheduled.values())
        if count > settings.page_rows:
            raise OmniPrefixCacheContractError(f"a step of {count} tokens does not fit a page of {settings.page_rows}")
        for key in settings.keys:
            if widths.get(key.name, key.row_bytes) != key.row_bytes:
                raise OmniPrefixCacheContractError(f"rows of {key.name!r} have {widths[key.name]} bytes")
        for key_name, column in rows.items():
            if key_name not in settings.key_names or len(column) != count:
                raise OmniPrefixCacheContractError(f"{len(column)} rows of {key_name!r} for {count} tokens")

    def _deferred(self, emits: frozenset[Key], num_rows: int) -> tuple[frozenset[Key], int]:
        """The keys of a step whose rows go to the log, and the bytes that they take there."""
        keys = [key for key in self.machine.settings.keys if key.deferred and key.name in emits]
        num_bytes = sum(key.row_bytes for key in keys) * num_rows
        if not self.machine.defers(num_bytes):
            return frozenset(), 0
        return frozenset(key.name for key in keys), num_bytes

    def _timed_out(self, action: str) -> OmniPrefixCacheStagingTimeoutError:
        steps = sorted(self.machine.steps)
        states = {task: write.state.value for task, write in self.machine.tasks.items()}
        return OmniPrefixCacheStagingTimeoutError(f"{action}: unconsumed step ids {steps}, tasks {states}")


def slots_of(blocks: Sequence[int], start: int, end: int, block_size: int) -> tuple[Slot, ...]:
    """Slots of the positions `[start, end)` of a request with this block table."""
    return tuple(blocks[p // block_size] * block_size + p % block_size for p in range(start, end))
