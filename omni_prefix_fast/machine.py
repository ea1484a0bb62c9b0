"""`PrefixCacheMachine`: the actions of docs/machine.md, one method each, and the only place that takes the state lock.

Guarantees: under the state lock there is only table work, never a wait, a row copy or a pool allocation. The engine
thread alone plans, claims and commits; other threads take steps and unpin what they fetched. Lock order: a read's
lock, then the state lock, then a staging page's or the committer's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from omni_prefix_fast.committer import OmniPrefixCacheController
from omni_prefix_fast.config import PrefixCacheConfig
from omni_prefix_fast.device import Device, Landed, Transfer
from omni_prefix_fast.errors import (
    OmniPrefixCacheClosedError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheUnmatchError,
)
from omni_prefix_fast.events import Admitted
from omni_prefix_fast.intake import Leftover
from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.log import BudgetTicket, DeferredLog, DeviceBudget, LogChunk
from omni_prefix_fast.metrics import Counters, HoldTimes, LockTimes
from omni_prefix_fast.pool import PrefixBlockPool, RowSpec
from omni_prefix_fast.prefetch import Prefetcher
from omni_prefix_fast.reads import HitRead, ReadState
from omni_prefix_fast.recycler import OutputAllocator
from omni_prefix_fast.requests import RequestTable
from omni_prefix_fast.runtime import Deadline, Runtime
from omni_prefix_fast.slots import SlotTable
from omni_prefix_fast.staging import StagingBufferPool
from omni_prefix_fast.steps import StepContext, StepTable
from omni_prefix_fast.tasks import DeferredWrite, ImmediateWrite, WritePiece, WriteTask
from omni_prefix_fast.types import Holder, IntArray, Key, ReqId, StepId, TaskId, TaskState

CHUNKS_AT_ONCE = 256
"""Log chunks that are let go of before the state lock is."""


@dataclass(slots=True)
class StepRows:
    """Rows of a step, ready to be published."""

    layout: StepLayout
    page: int
    staged: tuple[Key, ...]
    """Per-token keys whose rows stand in the page, hidden states first."""
    leftovers: Mapping[Key, Leftover]
    deferred_keys: frozenset[Key]
    """Keys that the policy defers, emitted or not."""
    clones: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    """Device clones of the deferred keys' rows; empty where they do not fit the budget or there are none."""
    ticket: BudgetTicket | None = None
    """The charge for `clones`."""
    transfer: Transfer = field(default_factory=Landed)
    """Brings the staged rows to the page."""


class PrefixCacheMachine:
    """Tables, pool, pages, log and steps of one cache, and the actions on them."""

    def __init__(
        self,
        config: PrefixCacheConfig,
        *,
        runtime: Runtime,
        device: Device,
        counters: Counters,
        allocate: OutputAllocator,
        eager: bool,
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._counters = counters
        self._timeout_s = config.staging_claim_timeout_s
        self._allocate = allocate
        self.lock = runtime.lock("manager state")
        self.held = HoldTimes(runtime.monotonic)
        self.table = SlotTable(config.num_slots)
        self.pool = PrefixBlockPool(config, pin=device.pins_memory)
        self.staging = StagingBufferPool(config, runtime, pin=device.pins_memory)
        self.controller = OmniPrefixCacheController(
            self.pool,
            self.table,
            self.staging,
            config,
            runtime=runtime,
            device=device,
            counters=counters,
            eager=eager,
        )
        self.prefetcher = None if eager else Prefetcher(self._prefetch, runtime, self._timeout_s)
        self.budget = DeviceBudget(config.gpu_staging_bytes)
        self.log = DeferredLog()
        self.steps = StepTable()
        self.requests = RequestTable(config, counters)
        self.writers: dict[StepId, ImmediateWrite] = {}
        """Immediate writes not committed yet, by step."""
        self.planned: dict[HitRead, None] = {}
        """Reads that pin rows or hold chunks: of the step that starts, of saved steps, of steps being handed over."""
        self.starting: dict[ReqId, HitRead] = {}
        """Hit reads of the step that was started and is not saved yet."""
        self._next_task: TaskId = 0

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        """The one deadline of a public call; `staging_claim_timeout_s` if not given."""
        return Deadline(self._runtime, self._timeout_s if timeout_s is None else timeout_s)

    def lock_times(self) -> LockTimes:
        """How long the state lock has been held. Takes it."""
        with self.lock:
            return self.held.totals()

    def _tell_taken(self, give_back: Callable[[], None], action: str, **acted_on: object) -> None:
        """Trace an action that took something, which nobody would give back if the sink was interrupted."""
        try:
            self._counters.trace(action, **acted_on)
        except BaseException:
            give_back()
            raise

    # ---------------------------------------------------------------- step start (engine thread)

    def finish_request(self, req_id: ReqId) -> None:
        """`FinishRequest`: seal and write its deferred rows, forget it. An id never seen is ignored."""
        with self.lock, self.held:
            known = self.requests.finish(req_id)
            task = self.log.seal(req_id)
        self._counters.trace("finish_request", req_id=req_id, known=known)
        if task is not None:
            self.log.fill(task)
            self.write(task)

    def start_request(self, admitted: Admitted, step_id: StepId, scheduled: int) -> None:
        """`StartRequest`: make it live; open a hit read if it is owed cached rows. Raises `ValueError`, see `owed`."""
        owed = self.requests.owed(admitted)
        with self.lock, self.held:
            self.requests.start(admitted, scheduled)
        if owed is not None:
            read = HitRead(admitted.req_id, step_id, owed.span, owed.slots, self._runtime, owed.blocks)
            read.tail = scheduled
            self.starting[admitted.req_id] = read
        self._counters.trace(
            "start_request", req_id=admitted.req_id, computed=admitted.computed, blocks=admitted.block_ids
        )

    def plan_reads(self) -> None:
        """`PlanRead` for every read of the step that starts."""
        if not self.starting:
            return
        with self.lock, self.held:
            for read in self.starting.values():
                self._plan(read)
        if self.prefetcher is not None:
            self.prefetcher.enqueue(self.starting.values())

    def drop_starting(self) -> None:
        """The step that was started is not going to be saved."""
        with self.lock, self.held:
            for read in self.starting.values():
                self._release(read, ReadState.DROPPED)
            self.starting = {}

    def _plan(self, read: HitRead) -> None:
        # A write that failed meanwhile is no longer in the tables by which a plan would name it or its chunk.
        self.controller.check()
        read.plan(self.table.open_keys(), self.table, self.log, self.writers)
        self.planned[read] = None
        self._counters.add("reads_planned")
        self._counters.trace(
            "plan_read", req_id=read.req_id, step=read.step_id, span=(read.start, read.end), plans=read.plans
        )

    def _release(self, read: HitRead, state: ReadState) -> None:
        read.release(self.table, self.log, state)
        self.planned.pop(read, None)

    # ---------------------------------------------------------------- save (engine thread)

    def claim_page(self, step_id: StepId, deadline: Deadline) -> int:
        """`ClaimPage`: a staging page for the step, waiting for one until the deadline."""
        page = self.staging.claim(Holder("step", step_id), deadline, self.controller.check)
        self._tell_taken(lambda: self.release_page(step_id, page), "claim_page", step=step_id, page=page)
        return page

    def cancel(self, ticket: BudgetTicket) -> None:
        """Give back a reservation whose clone is not going to be published."""
        with self.lock, self.held:
            ticket.release()

    def release_page(self, step_id: StepId, page: int) -> None:
        """The step does not need its page any more."""
        self.staging.release(page, Holder("step", step_id))

    def open_keys(self, specs: Mapping[Key, RowSpec], deferred: Collection[Key], *, resident: bool = False) -> None:
        """Allocate pool, pages and table of the keys that have none. No lock: nothing looks there before `publish`."""
        for key, spec in specs.items():
            spec = self.pool.spec(key) if key in self.pool else spec  # noqa: PLW2901 - the one that is kept
            self.staging.open(key, spec, resident=resident)
            self.table.prepare_key(key, deferred=key in deferred)
            self.pool.open(key, spec, resident=resident)  # last: whoever finds it there finds all of it

    def unplan_reads(self, layout: StepLayout) -> None:
        """`UnplanReads`: this step's reads on slots that it computes resolved to an older tenant at the start."""
        if not self.starting:
            return
        with self.lock, self.held:
            epoch = self.table.stamp(layout.slots)
            for req_id in [r for r in self.starting if r not in layout.index]:
                self._release(self.starting.pop(req_id), ReadState.DROPPED)
            for req_id, read in self.starting.items():
                if read.state is not ReadState.UNPLANNED and self.table.stamped(read.slots, epoch):
                    read.unplan(self.table, self.log)
                    self.planned.pop(read, None)
                    self._counters.trace("unplan_read", req_id=req_id, step=layout.step_id)

    def reserve_budget(self, nbytes: int, deadline: Deadline) -> BudgetTicket | None:
        """`ReserveBudget`: charge device bytes, forcing older deferred rows out; None if they can never fit."""
        if nbytes > self.budget.limit:
            return None
        while True:
            with self.lock, self.held:
                ticket = self.budget.reserve(nbytes)
                oldest = self.log.oldest()
            if ticket is not None:
                self._tell_taken(partial(self.cancel, ticket), "reserve_budget", bytes=nbytes)
                return ticket
            if oldest is None:
                raise AssertionError(f"{self.budget.charged} device bytes are charged but no chunk is held")
            self._force_out(oldest, deadline)

    def _force_out(self, chunk: LogChunk, deadline: Deadline) -> None:
        """`SealWrite` for every request with rows in the chunk, and complete the reads that name rows of it."""
        with self.lock, self.held:
            writes = self.log.seal_chunk(chunk)
            self._counters.add("writes_forced", len(writes))
        for task in writes:
            self._counters.trace("seal_write", task=task.task_id)
            self.log.fill(task)
            self.write(task)
        with self.lock, self.held:
            in_flight = self.log.sealed_of(chunk)
        for task in in_flight:
            self.controller.join(task, deadline)
        self.commit_tasks()
        with self.lock, self.held:
            holding = [read for read in self.planned if read.holds(chunk)]
        self._complete(holding, deadline)
        if chunk.chunk_id in self.log.chunks:
            raise AssertionError(f"chunk {chunk.chunk_id} is held by {chunk.unwritten} and {chunk.readers} reads")

    def preserve_reads(self, slots: IntArray, deadline: Deadline) -> None:
        """`PreserveReads`: complete each planned read that names the pool row of one of `slots`, before its claim."""
        if self.planned:  # by this thread; others only take away from it
            with self.lock, self.held:
                touched: list[HitRead] = []
                if self.table.any_pinned(slots):
                    epoch = self.table.stamp(slots)
                    touched = [read for read in self.planned if self.table.stamped(read.pinned, epoch)]
            if touched:
                self._complete(touched, deadline)
        self._counters.trace("preserve_reads", slots=slots)

    def _complete(self, reads: list[HitRead], deadline: Deadline) -> None:
        for read in reads:
            self._counters.trace("preserve_read", req_id=read.req_id, step=read.step_id)
            self.fetch_read(read, deadline)
        with self.lock, self.held:
            self._counters.add("reads_preserved", len(reads))

    def give_up_slots(self, layout: StepLayout) -> None:
        """`ClaimSlots` for a step that is never saved: no row of any key; a later hit there fails instead of lying."""
        with self.lock, self.held:
            self._claim(layout, ())
            self._counters.add("steps_abandoned")

    def publish(self, rows: StepRows, *, hands_hidden: bool) -> ImmediateWrite | None:
        """`ClaimSlots`, `RegisterWrite`, `AppendRows`, `PlanRead` of same-step hits and `OpenStep`: one table update.

        Returns the immediate write, to be handed to `write` outside the lock.
        """
        layout = rows.layout
        with self.lock, self.held:
            for key in rows.leftovers:
                self._demote(key)
            for key in rows.staged:
                self.table.open_key(key, deferred=key in rows.deferred_keys)
            versions = self._claim(layout, rows.staged)
            immediate = [key for key in rows.staged if key not in rows.clones]
            in_flight = bool(immediate) or not rows.transfer.landed()
            task = self._register_write(immediate, rows, versions) if in_flight else None
            if rows.ticket is not None:
                self._append_rows(layout, versions, rows.clones, rows.ticket)
            same_step = [read for read in self.starting.values() if read.state is ReadState.UNPLANNED]
            for read in same_step:
                self._plan(read)
                self._counters.add("reads_same_step")
            for read in self.starting.values():
                read.settle(owes_hidden=hands_hidden)
                if read.failure is not None:  # nobody will fetch it: it holds nothing
                    self._release(read, ReadState.DROPPED)
            landing = None if rows.transfer.landed() else task
            context = StepContext(layout, rows.page, rows.staged, rows.leftovers, self.starting, hands_hidden, landing)
            self.starting = {}
            self._open_step(context)
        if self.prefetcher is not None and same_step:
            self.prefetcher.enqueue(same_step)
        return task

    def _claim(self, layout: StepLayout, emitted: Iterable[Key]) -> IntArray:
        emitted = tuple(emitted)
        if self.planned and self.table.any_pinned(layout.slots):
            raise AssertionError(f"step {layout.step_id} claims a slot whose row a planned read still needs")
        versions = self.table.claim(layout.slots, layout.step_id, emitted)
        self._counters.trace("claim_slots", step=layout.step_id, slots=layout.slots, versions=versions, emitted=emitted)
        return versions

    def _demote(self, key: Key) -> None:
        """A key that had rows turns out not to be per token: nobody is handed its rows any more."""
        if self.table.has_key(key):
            self.table.close_key(key)
            for read in self.starting.values():
                read.forget(key, self.log)
            self._counters.add("keys_demoted")

    def _register_write(self, keys: Iterable[Key], rows: StepRows, versions: IntArray) -> ImmediateWrite:
        layout, page = rows.layout, rows.page
        task = ImmediateWrite(self._issue_task(), layout.step_id, self._runtime, page=page, transfer=rows.transfer)
        count, slots, claims = layout.num_tokens, layout.slots, self.table.claims
        task.pieces = [
            WritePiece(key, slots, versions, (self.staging.byte_rows(page, key, count),), claims) for key in keys
        ]
        self.staging.bind(page, Holder("write", task.task_id))
        self.writers[layout.step_id] = task
        self._counters.trace("register_write", task=task.task_id, step=layout.step_id)
        return task

    def _append_rows(
        self, layout: StepLayout, versions: IntArray, clones: Mapping[Key, torch.Tensor], ticket: BudgetTicket
    ) -> None:
        chunk = self.log.append(layout, versions, clones, ticket)
        for key in clones:
            self.table.log_append(key, layout.slots, chunk.chunk_id)
        opened = [r for r in layout.req_ids if r not in self.log.open_writes]
        for req_id in opened:
            self.log.open_writes[req_id] = DeferredWrite(
                self._issue_task(),
                layout.step_id,
                self._runtime,
                req_id=req_id,
                write_n=self.requests.next_write_n(req_id),
                first_chunk=chunk.chunk_id,
            )
        self._counters.add("writes_deferred", len(opened))
        writes = [self.log.open_writes[r].task_id for r in opened]
        self._counters.trace(
            "append_rows", step=layout.step_id, keys=tuple(clones), opened=tuple(opened), tasks=tuple(writes)
        )

    def _issue_task(self) -> TaskId:
        task_id = self._next_task
        self._next_task += 1
        return task_id

    def _open_step(self, context: StepContext) -> None:
        self.steps.open(context)
        layout = context.layout
        self.requests.advance(layout.req_ids, layout.ends)
        self._counters.add_all(steps_saved=1, rows_saved=layout.num_tokens)
        self._counters.trace("open_step", step=layout.step_id)

    def write(self, task: WriteTask) -> None:
        """Hand a write to the committer, and take in what it finished. If it fails, everything is let go of."""
        try:
            self.controller.submit(task)
        except OmniPrefixCacheUnmatchError:  # the record is there, or the cache is closed
            self.commit_tasks()
            self.clear()
            raise
        except BaseException as error:  # interrupted: recorded before anything is let go of
            self.fail(str(task), error)
            raise
        self.commit_tasks()

    def commit_tasks(self) -> None:
        """`CommitTask` for every write that ended since the last call."""
        if not self.controller.has_finished:
            return
        for task in self.controller.take_finished():
            let_go = True
            with self.lock, self.held:
                if task.state is TaskState.WRITTEN:
                    for piece in task.pieces:
                        self.table.commit(piece.key, piece.slots, piece.versions, piece.claims)
                    self._counters.trace("commit_task", task=task.task_id)
                if isinstance(task, DeferredWrite):
                    let_go = self.log.written(task, CHUNKS_AT_ONCE)
                else:
                    self.writers.pop(task.step_id, None)
            while isinstance(task, DeferredWrite) and not let_go:  # of a long request: not all under one lock
                with self.lock, self.held:
                    let_go = self.log.written(task, CHUNKS_AT_ONCE)

    def drain(self, deadline: Deadline) -> None:
        """Wait until every sealed or immediate write is committed and the prefetch thread has nothing to do."""
        with self.lock, self.held:
            in_flight = [*self.writers.values(), *self.log.sealed.values()]
        for task in in_flight:
            self.controller.join(task, deadline)
        self.commit_tasks()
        if self.prefetcher is not None and not self.prefetcher.wait_idle(deadline):
            raise OmniPrefixCacheStagingTimeoutError(f"hits are still being gathered after {deadline.seconds:g} s")

    # ---------------------------------------------------------------- handover (any thread)

    def take_step(self, step_id: StepId, req_ids: Collection[ReqId]) -> StepContext:
        """`TakeStep`: consume a saved step. Raises as `StepTable.take` does, and consumes nothing then."""
        context: StepContext | None = None
        try:
            with self.lock, self.held:
                context = self.steps.take(step_id, req_ids)
            self._counters.trace("take_step", step=step_id, req_ids=tuple(req_ids))
        except BaseException:
            if context is not None:
                self.let_go(context)
            raise
        return context

    def fetch_read(self, read: HitRead, deadline: Deadline) -> None:
        """`FetchRead`: gather a planned read, unless somebody did. Waits for the writes that it was planned on."""
        self._hold(read, deadline)
        try:
            while not self._gather(read, deadline):
                pass
        finally:
            read.lock.release()

    def _gather(self, read: HitRead, deadline: Deadline) -> bool:
        """Gather what is planned now; False if the plan changed meanwhile. Under the read's lock."""
        with self.lock, self.held:
            if read.state is not ReadState.PLANNED:
                return True
            generation, plans, waits = read.generation, dict(read.plans), read.waits
        for task in waits:
            self.controller.join(task, deadline)
        rows = read.gather(plans, self.pool, self._device, self._allocate)
        with self.lock, self.held:
            if read.generation != generation or read.state is not ReadState.PLANNED:
                return False
            read.rows = {key: of_key for key, of_key in rows.items() if key in read.plans}
            self._release(read, ReadState.FETCHED)
            self._counters.trace("fetch_read", req_id=read.req_id, step=read.step_id)
        return True

    def _prefetch(self, read: HitRead) -> None:
        self.fetch_read(read, self.deadline())

    def check_fetched(self, reads: Iterable[HitRead]) -> None:
        """Raise if one of the reads was dropped before it was fetched: by a failure, or by shutdown."""
        if any(read.state is not ReadState.FETCHED for read in reads):
            self.controller.check()
            raise OmniPrefixCacheClosedError("the prefix cache was shut down while the step was being materialized")

    def let_go(self, context: StepContext) -> None:
        """The step is consumed: its page, and whatever its reads still hold, are free.

        Waits for nobody: a gather in progress is thrown away by whoever does it.
        """
        try:
            if context.reads:
                with self.lock, self.held:
                    for read in context.reads.values():
                        self._release(read, ReadState.DROPPED)
                        read.rows = {}
                    self._counters.trace("release_step", step=context.layout.step_id)
            else:  # it holds nothing in the tables, whoever is busy there
                self._counters.trace("release_step", step=context.layout.step_id)
        finally:
            self.release_page(context.layout.step_id, context.page)

    def _hold(self, read: HitRead, deadline: Deadline) -> None:
        if read.lock.acquire(blocking=False):
            return
        self._counters.trace("wait_read", req_id=read.req_id, step=read.step_id)
        if not read.lock.acquire(timeout=deadline.remaining()):
            raise OmniPrefixCacheStagingTimeoutError(
                f"another thread has been gathering the rows that request {read.req_id!r} hit in step {read.step_id} "
                f"for more than {deadline.seconds:g} s (staging_claim_timeout_s)"
            )

    def count_discarded(self) -> None:
        """Count a step that nobody wanted."""
        self._counters.add("steps_discarded")

    def count_handed_over(self, reads: Iterable[HitRead]) -> None:
        """Count a materialized step and the rows that its fetched reads hand over."""
        self._counters.add("steps_materialized")
        for read in reads:
            with self.lock, self.held:
                for key, plan in read.plans.items():
                    self._counters.add_rows_hit(key, len(read) - plan.holes.shape[0])

    def fail(self, what: str, cause: BaseException) -> None:
        """Give the cache up: `what` failed for a reason that no write has. Sticky."""
        self.controller.fail_all(what, cause)
        self.commit_tasks()
        self.clear()

    def close(self) -> None:
        """End the threads, waiting for what they are in the middle of, and let go of everything."""
        deadline = self.deadline()
        self.controller.close(deadline)  # first: it wakes whoever waits for a write that will never be done
        if self.prefetcher is not None:
            self.prefetcher.close(deadline.remaining())
        self.commit_tasks()
        self.clear()

    def clear(self) -> None:
        """Let go of everything, at shutdown or after a failure: steps, pages, open writes, device bytes."""
        with self.lock, self.held:
            contexts = self.steps.clear()
            for read in list(self.planned):
                self._release(read, ReadState.DROPPED)
            for task in self.log.open_writes.values():
                task.move(TaskState.FAILED)
                task.wake()
            self.log.clear()
            self.requests.clear()
            writers, self.writers = list(self.writers.values()), {}
            self.starting = {}
        for context in contexts:
            self.release_page(context.layout.step_id, context.page)
        for write in writers:
            self.staging.release(write.page, Holder("write", write.task_id))
