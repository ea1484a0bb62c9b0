"""The actions of the machine, one method each, in the order of a step.

A method returns the next state; the state it was called on stays as it was. It raises an error of the contract where
the contract says so, and `NotEnabled` where the action's guard is false. What must hold of every state and of every
action stands in `rules`; the order in which the actions run is the driver's.
"""

# ruff: noqa: SLF001 - each method calls the private parts of the next state, an object of its own class
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Self

from omni_prefix_ref.errors import (
    NotEnabled,
    OmniPrefixCacheClosedError,
    OmniPrefixCacheContractError,
    OmniPrefixCacheRowError,
    OmniPrefixCacheWriteError,
)
from omni_prefix_ref.state import (
    FINAL,
    HIDDEN_KEY,
    ZEROS,
    BatchItem,
    Chunk,
    ChunkId,
    Entry,
    Failure,
    HitRead,
    Holder,
    Key,
    LogRow,
    Occupancy,
    Outputs,
    Page,
    PageRow,
    PoolRow,
    ReadId,
    Req,
    Row,
    Rows,
    Settings,
    Slot,
    Source,
    StepContext,
    StepId,
    TaskId,
    TaskState,
    WriteTask,
    at,
    drop,
    put,
    replace,
)


@dataclass(frozen=True)
class Machine:
    """One state of the cache."""

    settings: Settings
    version: tuple[int, ...]
    owner: tuple[StepId | None, ...]
    occupancy: Mapping[Key, tuple[Occupancy, ...]]
    pool: Mapping[Key, tuple[Row, ...]]
    log: Mapping[ChunkId, Chunk]
    log_row: Mapping[Key, tuple[LogRow | None, ...]]
    pins: tuple[int, ...]
    tasks: Mapping[TaskId, WriteTask]
    queue: tuple[TaskId, ...]
    open_write: Mapping[Req, TaskId]
    write_n: Mapping[Req, int]
    reads: Mapping[ReadId, HitRead]
    steps: Mapping[StepId, StepContext]
    pages: tuple[Page, ...]
    charged: int
    reserved: int
    emitted: Mapping[Req, int]
    failure: Failure | None
    closed: bool
    next_id: int

    @classmethod
    def start(cls, settings: Settings) -> Self:
        """The state before the first step."""
        slots, keys = settings.num_slots, settings.key_names
        return cls(
            settings=settings,
            version=(0,) * slots,
            owner=(None,) * slots,
            occupancy=dict.fromkeys(keys, (Occupancy.ABSENT,) * slots),
            pool=dict.fromkeys(keys, (ZEROS,) * slots),
            log=MappingProxyType({}),
            log_row=dict.fromkeys(keys, (None,) * slots),
            pins=(0,) * slots,
            tasks=MappingProxyType({}),
            queue=(),
            open_write=MappingProxyType({}),
            write_n=MappingProxyType({}),
            reads=MappingProxyType({}),
            steps=MappingProxyType({}),
            pages=(Page(),) * settings.staging_depth,
            charged=0,
            reserved=0,
            emitted=MappingProxyType({}),
            failure=None,
            closed=False,
            next_id=1,
        )

    # ------------------------------------------------------------------------- engine thread: the step starts

    def check_usable(self) -> None:
        """Every public entry begins here: a failed write is raised again, and again; so is use after shutdown."""
        if self.closed:
            raise OmniPrefixCacheClosedError("the cache was shut down")
        if self.failure is not None:
            raise OmniPrefixCacheWriteError(f"write {self.failure.task} failed: {self.failure.cause}")

    def abandon_reads(self) -> Self:
        """Reads of a step that never saved are dropped: nobody can ask for their rows any more."""
        state = self
        for read in [r for r, hit in self.reads.items() if hit.step is None]:
            state = state._drop_read(read)
        return state

    def finish_request(self, req: Req) -> Self:
        """1. Seal the request's open deferred write, so that its rows land, and forget the request.

        An abort is the same. A request never seen is ignored.
        """
        state = self.seal_write(req)
        return replace(state, emitted=drop(state.emitted, req), write_n=drop(state.write_n, req))

    def seal_write(self, req: Req) -> Self:
        """The request's open deferred write takes no more rows. The next rows open another."""
        return replace(self, open_write=drop(self.open_write, req))

    def start_request(self, req: Req, computed: int, blocks: tuple[int, ...]) -> Self:
        """2. A request comes in, or back, with `computed` tokens computed.

        Rows `[emitted, computed)` are owed from the cache: nothing for a miss, a continuation or a smaller hit; the
        hit span for a fresh hit; the gap for a resume with a hit larger than what was handed over.
        """
        size = self.settings.block_size
        emitted = self.emitted.get(req, 0)
        if computed > max(emitted, len(blocks) * size):
            raise OmniPrefixCacheContractError(
                f"request {req!r} has {computed} computed tokens but a table of {len(blocks)} blocks of {size}"
            )
        state = replace(self, emitted=put(self.emitted, req, emitted))
        if computed <= emitted:
            return state
        slots = tuple(blocks[p // size] * size + p % size for p in range(emitted, computed))
        return replace(
            state, reads=put(state.reads, state.next_id, HitRead(req, emitted, slots)), next_id=state.next_id + 1
        )

    def plan_read(self, read: ReadId) -> Self:
        """3. and 10. Resolve each key and position to a row.

        That is an exact tenancy's pool row, an exact row of an exact chunk, or a hole.
        What the plan names is kept: pool slots are pinned, chunks held.
        """
        hit = self.reads[read]
        if hit.plan is not None or hit.step is not None:
            raise NotEnabled
        plan = {key: tuple(self._resolve(key, slot) for slot in hit.slots) for key in self.settings.key_names}
        waits = {
            self._writer_of(key, source)
            for key, sources in plan.items()
            for source in sources
            if isinstance(source, PoolRow) and self.occupancy[key][source.slot] is Occupancy.IN_TRANSIT
        }
        planned = replace(hit, plan=plan, writers=frozenset(w for w in waits if w is not None))
        return self._pin(planned, 1)._hold_chunks(planned, ("read", read))._set_read(read, planned)

    # ------------------------------------------------------------------------- engine thread: the step is saved

    def claim_page(self, step: StepId, rows: Rows) -> Self:
        """4. The step, its id issued first, takes a free staging page for its rows."""
        free = next((i for i, page in enumerate(self.pages) if not page.holders), None)
        if free is None:
            raise NotEnabled
        page = Page(frozenset({("step", step)}), MappingProxyType(dict(rows)))
        return replace(self, pages=at(self.pages, {free: page}), next_id=max(self.next_id, step + 1))

    def defers(self, num_bytes: int) -> bool:
        """Whether a chunk of so many bytes is deferred. One larger than the whole budget joins the immediate write."""
        return 0 < num_bytes <= self.settings.budget_bytes

    def reserve_budget(self, num_bytes: int) -> Self:
        """5. Charge the bytes of a device clone before it is made. Not enabled while they do not fit."""
        if self.charged + num_bytes > self.settings.budget_bytes:
            raise NotEnabled
        return replace(self, charged=self.charged + num_bytes, reserved=self.reserved + num_bytes)

    def unplan_reads(self, slots: Iterable[Slot]) -> Self:
        """6. Reads of this step that name a slot it computes go back to unplanned: their producer is in this batch."""
        step_slots = frozenset(slots)
        state = self
        for read, hit in self.reads.items():
            if hit.step is None and step_slots.intersection(hit.slots):
                state = state._release_plan(read)
                state = state._set_read(read, replace(hit, plan=None, rows=None, writers=frozenset()))
        return state

    def preserve_reads(self, slots: Iterable[Slot]) -> Self:
        """7. Planned reads that pin a slot about to be claimed are fetched first."""
        pinned = frozenset(slot for slot in slots if self.pins[slot])
        state = self
        for read, hit in self.reads.items():
            if pinned & hit.pinned:
                state = state.fetch_read(read)
        return state

    def claim_slots(self, step: StepId, slots: tuple[Slot, ...], emits: frozenset[Key]) -> Self:
        """8. A new tenancy of each slot, for every key: emitted keys are in transit, all others absent."""
        occupancy = {
            key: at(column, dict.fromkeys(slots, Occupancy.IN_TRANSIT if key in emits else Occupancy.ABSENT))
            for key, column in self.occupancy.items()
        }
        return replace(
            self,
            version=at(self.version, {slot: self.version[slot] + 1 for slot in slots}),
            owner=at(self.owner, dict.fromkeys(slots, step)),
            occupancy=occupancy,
            log_row={key: at(column, dict.fromkeys(slots)) for key, column in self.log_row.items()},
        )

    def register_write(self, step: StepId, slots: tuple[Slot, ...], keys: frozenset[Key]) -> Self:
        """9. The step's immediate write: all rows of these keys, from the step's page, which it holds."""
        page = self._page_of(step)
        entries = tuple(
            Entry(key, slot, self.version[slot], PageRow(page, i))
            for key in sorted(keys)
            for i, slot in enumerate(slots)
        )
        task = self.next_id
        held = replace(self.pages[page], holders=self.pages[page].holders | {("write", task)})
        return replace(
            self,
            tasks=put(self.tasks, task, WriteTask(TaskState.PENDING, entries)),
            pages=at(self.pages, {page: held}),
            next_id=task + 1,
        )

    def append_rows(self, batch: tuple[BatchItem, ...], rows: Rows, num_bytes: int) -> Self:
        """9. The step's deferred rows join the log as one chunk; each request's open write takes its part of it."""
        chunk = self.next_id
        state = replace(self, next_id=chunk + 1, reserved=self.reserved - num_bytes)
        holders: set[Holder] = set()
        index = 0
        for req, _, slots in batch:
            state, task = state._open_write_of(req)
            entries = tuple(
                Entry(key, slot, self.version[slot], LogRow(chunk, index + i))
                for key in sorted(rows)
                for i, slot in enumerate(slots)
            )
            taken = state.tasks[task]
            state = replace(state, tasks=put(state.tasks, task, replace(taken, entries=taken.entries + entries)))
            columns = {
                key: at(state.log_row[key], {slot: LogRow(chunk, index + i) for i, slot in enumerate(slots)})
                for key in rows
            }
            state = replace(state, log_row={**state.log_row, **columns})
            holders.add(("write", task))
            index += len(slots)
        return replace(state, log=put(state.log, chunk, Chunk(rows, num_bytes, frozenset(holders))))

    def open_step(self, step: StepId, batch: tuple[BatchItem, ...], emits: frozenset[Key]) -> Self:
        """11. Snapshot the step for its builder.

        Holes are final now: one in hidden rows fails its read. Each span is offered from the start of its hit to
        the end of what the step computes, and `emitted` moves there.
        """
        mine = {hit.req: read for read, hit in self.reads.items() if hit.step is None}
        reads = {item.req: mine[item.req] for item in batch if item.req in mine}
        spans: dict[Req, tuple[int, int]] = {}
        state = self
        for item in batch:
            start, end = item.start, item.start + len(item.slots)
            if item.req in reads:
                hit = self.reads[reads[item.req]]
                if hit.plan is None:
                    raise NotEnabled
                start = hit.start
                attached = replace(hit, step=step)
                if None in hit.plan.get(HIDDEN_KEY, ()):
                    state = state._release_plan(reads[item.req])
                    attached = replace(attached, failed=True)
                state = state._set_read(reads[item.req], attached)
            spans[item.req] = (start, end)
            state = replace(state, emitted=put(state.emitted, item.req, end))
        context = StepContext(self._page_of(step), batch, emits, MappingProxyType(spans), MappingProxyType(reads))
        return replace(state, steps=put(state.steps, step, context)).abandon_reads()

    def cancel_step(self, step: StepId) -> Self:
        """A save that fails between 4 and 8 gives back its page and what it reserved; no slot was claimed."""
        state = self._let_go(("step", step))
        return replace(state, charged=state.charged - state.reserved, reserved=0)

    # ------------------------------------------------------------------------- committer, the only writer

    def queue_task(self, task: TaskId) -> Self:
        """12. PENDING -> QUEUED, once no more rows can join."""
        if task in self.open_write.values():
            raise NotEnabled
        return replace(self._move(task, TaskState.PENDING, TaskState.QUEUED), queue=(*self.queue, task))

    def claim_copy(self) -> Self:
        """12. QUEUED -> COPYING for the task at the head of the queue, in one piece with taking it off the queue."""
        busy = any(t.state in (TaskState.COPYING, TaskState.HOST_READY) for t in self.tasks.values())
        if busy or not self.queue:
            raise NotEnabled
        return replace(self._move(self.queue[0], TaskState.QUEUED, TaskState.COPYING), queue=self.queue[1:])

    def finish_copy(self, task: TaskId) -> Self:
        """12. COPYING -> HOST_READY: the rows are on the host."""
        return self._move(task, TaskState.COPYING, TaskState.HOST_READY)

    def write_pool(self, task: TaskId) -> Self:
        """12. HOST_READY -> WRITTEN: the rows are in the pool, where the slot is still of the tenancy claimed."""
        state = self._move(task, TaskState.HOST_READY, TaskState.WRITTEN)
        pool = dict(state.pool)
        for key in state.settings.key_names:
            rows = {
                e.slot: state._row(key, e.source) for e in state.tasks[task].entries if e.key == key and state._owns(e)
            }
            pool[key] = at(pool[key], rows)
        return replace(state, pool=pool)

    def commit_task(self, task: TaskId) -> Self:
        """13. In transit -> committed for rows whose tenancy lasts; page and chunks are let go; the task is done."""
        done = self.tasks[task]
        if done.state is not TaskState.WRITTEN:
            raise NotEnabled
        state = self._settle(done, Occupancy.COMMITTED)
        return replace(state, tasks=drop(state.tasks, task))._let_go(("write", task))

    def publish_failure(self, task: TaskId, cause: str) -> Self:
        """12. Record that this write failed. The first record stays."""
        return self if self.failure is not None else replace(self, failure=Failure(task, cause))

    def fail_task(self, task: TaskId) -> Self:
        """12. Any state but WRITTEN -> FAILED, which wakes whoever waits for it; the record is there before.

        What it held is let go, and rows that it still owed are absent.
        """
        failed = self.tasks[task]
        if failed.state in FINAL:
            raise NotEnabled
        state = self._settle(failed, Occupancy.ABSENT)
        state = replace(state, queue=tuple(t for t in state.queue if t != task))
        return state._move(task, failed.state, TaskState.FAILED)._let_go(("write", task))

    # ------------------------------------------------------------------------- output builder, any thread

    def take_step(self, step: StepId, reqs: tuple[Req, ...]) -> Self:
        """14. The step is consumed, now and never again. A wrong id or request consumes nothing."""
        context = self.steps.get(step)
        if context is None or context.taken is not None:
            raise OmniPrefixCacheContractError(f"step {step} was never saved, or was consumed before")
        if outside := set(reqs) - {item.req for item in context.batch}:
            raise OmniPrefixCacheContractError(f"requests {sorted(outside)} are not in step {step}")
        return replace(self, steps=put(self.steps, step, replace(context, taken=reqs)))

    def fetch_read(self, read: ReadId) -> Self:
        """15. Gather the planned rows, then let go of them. Whoever comes first does it; nothing changes after."""
        hit = self.reads[read]
        if hit.failed:
            raise OmniPrefixCacheRowError(
                f"request {hit.req!r}: hidden rows are absent within positions "
                f"{hit.start}..{hit.start + len(hit.slots) - 1}, which the engine says are cached"
            )
        if hit.rows is not None:
            return self
        if hit.plan is None or any(w in self.tasks and self.tasks[w].state not in FINAL for w in hit.writers):
            raise NotEnabled
        if self.failure is not None:
            self.check_usable()
        rows = {
            key: tuple(None if s is None else self._row(key, s) for s in sources) for key, sources in hit.plan.items()
        }
        return self._release_plan(read)._set_read(read, replace(hit, rows=rows))

    def outputs(self, step: StepId) -> Outputs:
        """What the taken step hands over: hit rows (holes read zeros), then the step's own rows.

        A key that the step does not emit is still handed over where the hit has any row of it.
        """
        context = self.steps[step]
        own = self.pages[context.page].rows
        rows: dict[Key, dict[Req, tuple[Row, ...]]] = {}
        for item, part in zip(context.batch, self._parts(context.batch), strict=True):
            if item.req not in (context.taken or ()):
                continue
            read = context.reads.get(item.req)
            hit = self.reads[read].rows if read is not None else None
            for key in self.settings.key_names:
                cached = hit[key] if hit is not None else ()
                if key in context.emits or any(row is not None for row in cached):
                    filled = tuple(ZEROS if row is None else row for row in cached)
                    rows.setdefault(key, {})[item.req] = filled + own.get(key, ())[part]
        return Outputs(rows, {req: context.spans[req] for req in context.taken or ()})

    def release_step(self, step: StepId) -> Self:
        """The builder is done with a taken step: page, reads and context are let go."""
        context = self.steps[step]
        if context.taken is None:
            raise NotEnabled
        state = self
        for read in context.reads.values():
            state = state._drop_read(read)
        return replace(state, steps=drop(state.steps, step))._let_go(("step", step))

    def discard_step(self, step: StepId) -> Self:
        """14. Consume the step and hand nothing over."""
        return self.take_step(step, ()).release_step(step)

    def shut_down(self) -> Self:
        """No public call is answered any more."""
        return replace(self, closed=True)

    # ------------------------------------------------------------------------- parts of actions

    def _parts(self, batch: tuple[BatchItem, ...]) -> list[slice]:
        """Where each request's rows stand among the step's."""
        ends = tuple(accumulate(len(item.slots) for item in batch))
        return [slice(end - len(item.slots), end) for item, end in zip(batch, ends, strict=True)]

    def _resolve(self, key: Key, slot: Slot) -> Source:
        occupancy = self.occupancy[key][slot]
        if occupancy is Occupancy.ABSENT:
            return None
        if occupancy is Occupancy.IN_TRANSIT and (logged := self.log_row[key][slot]) is not None:
            return logged
        return PoolRow(slot, self.version[slot])

    def _writer_of(self, key: Key, row: PoolRow) -> TaskId | None:
        wanted = (key, row.slot, row.version)
        return next((t for t, task in self.tasks.items() if any(e[:3] == wanted for e in task.entries)), None)

    def _row(self, key: Key, source: PoolRow | LogRow | PageRow) -> Row:
        match source:
            case PoolRow(slot, _):
                return self.pool[key][slot]
            case LogRow(chunk, row):
                return self.log[chunk].rows[key][row]
            case PageRow(page, row):
                return self.pages[page].rows[key][row]

    def _owns(self, entry: Entry) -> bool:
        return self.version[entry.slot] == entry.version

    def _page_of(self, step: StepId) -> int:
        return next(i for i, page in enumerate(self.pages) if ("step", step) in page.holders)

    def _open_write_of(self, req: Req) -> tuple[Self, TaskId]:
        if req in self.open_write:
            return self, self.open_write[req]
        task, n = self.next_id, self.write_n.get(req, 0) + 1
        opened = replace(
            self,
            tasks=put(self.tasks, task, WriteTask(TaskState.PENDING, (), req, n)),
            open_write=put(self.open_write, req, task),
            write_n=put(self.write_n, req, n),
            next_id=task + 1,
        )
        return opened, task

    def _move(self, task: TaskId, expected: TaskState, state: TaskState) -> Self:
        found = self.tasks[task]
        if found.state is not expected:
            raise NotEnabled
        return replace(self, tasks=put(self.tasks, task, replace(found, state=state)))

    def _settle(self, task: WriteTask, occupancy: Occupancy) -> Self:
        """What was in transit under the task's tenancies no longer is."""
        table, logged = dict(self.occupancy), dict(self.log_row)
        for key in self.settings.key_names:
            slots = [e.slot for e in task.entries if e.key == key and self._owns(e)]
            table[key] = at(table[key], dict.fromkeys(slots, occupancy))
            logged[key] = at(logged[key], dict.fromkeys(slots))
        return replace(self, occupancy=table, log_row=logged)

    def _let_go(self, holder: Holder) -> Self:
        """`holder` needs no page and no chunk any more. A chunk that nobody holds is gone, and its charge with it."""
        pages = tuple(
            replace(page, holders=page.holders - {holder}) if holder in page.holders else page for page in self.pages
        )
        log, charged = dict(self.log), self.charged
        for chunk_id, chunk in self.log.items():
            if holder in chunk.holders:
                left = chunk.holders - {holder}
                if left:
                    log[chunk_id] = replace(chunk, holders=left)
                else:
                    del log[chunk_id]
                    charged -= chunk.num_bytes
        return replace(self, pages=pages, log=MappingProxyType(log), charged=charged)

    def _pin(self, hit: HitRead, by: int) -> Self:
        return replace(self, pins=at(self.pins, {slot: self.pins[slot] + by for slot in hit.pinned}))

    def _hold_chunks(self, hit: HitRead, holder: Holder) -> Self:
        log = dict(self.log)
        for chunk in hit.chunks:
            log[chunk] = replace(log[chunk], holders=log[chunk].holders | {holder})
        return replace(self, log=MappingProxyType(log))

    def _release_plan(self, read: ReadId) -> Self:
        """The read needs its planned rows no longer."""
        return self._pin(self.reads[read], -1)._let_go(("read", read))

    def _drop_read(self, read: ReadId) -> Self:
        state = self._release_plan(read)
        return replace(state, reads=drop(state.reads, read))

    def _set_read(self, read: ReadId, hit: HitRead) -> Self:
        return replace(self, reads=put(self.reads, read, hit))
