"""The faults, each a class that overrides what it breaks. `table` names them and says where they come from."""

# ruff: noqa: SLF001 - a fault reaches into the machine that it breaks, and `table` says what it does
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from omni_prefix_ref import Admission, BatchItem, EagerDriver, Machine, Outputs
from omni_prefix_ref.errors import NotEnabled, OmniPrefixCacheContractError
from omni_prefix_ref.state import (
    ZEROS,
    ChunkId,
    HitRead,
    Holder,
    Key,
    LogRow,
    Occupancy,
    Page,
    ReadId,
    Req,
    Row,
    Rows,
    Slot,
    Source,
    StepId,
    TaskId,
    TaskState,
    WriteTask,
    at,
    drop,
    put,
)

M = TypeVar("M", bound=Machine)

# ----------------------------------------------------------------------------------------- claims and tenancies


class SkipVersionBump(Machine):
    def claim_slots(self, step: StepId, slots: tuple[Slot, ...], emits: frozenset[Key]) -> Self:
        return replace(super().claim_slots(step, slots, emits), version=self.version)


class ClaimOnlyEmitted(Machine):
    def claim_slots(self, step: StepId, slots: tuple[Slot, ...], emits: frozenset[Key]) -> Self:
        claimed = super().claim_slots(step, slots, emits)
        quiet = [key for key in self.settings.key_names if key not in emits]
        return replace(
            claimed,
            occupancy={**claimed.occupancy, **{key: self.occupancy[key] for key in quiet}},
            log_row={**claimed.log_row, **{key: self.log_row[key] for key in quiet}},
        )


class ZeroInsteadOfAbsent(Machine):
    def claim_slots(self, step: StepId, slots: tuple[Slot, ...], emits: frozenset[Key]) -> Self:
        claimed = super().claim_slots(step, slots, emits)
        occupancy, pool = dict(claimed.occupancy), dict(claimed.pool)
        for key in set(self.settings.key_names) - emits:
            had = [slot for slot in slots if self.occupancy[key][slot] is not Occupancy.ABSENT]
            occupancy[key] = at(occupancy[key], dict.fromkeys(had, Occupancy.COMMITTED))
            pool[key] = at(pool[key], dict.fromkeys(had, ZEROS))
        return replace(claimed, occupancy=occupancy, pool=pool)


class UnsavedStepKeepsRows(EagerDriver):
    def give_up_step(self) -> None:
        self._unsaved = ()
        super().give_up_step()


# ----------------------------------------------------------------------------------------- reads


class _LateLookup(Machine):
    """Looks rows up again when they are fetched; subclasses say which."""

    def looks_again(self, source: Source) -> bool:
        raise NotImplementedError

    def fetch_read(self, read: ReadId) -> Self:
        hit, fetched = self.reads[read], super().fetch_read(read)
        if hit.rows is not None or hit.plan is None:
            return fetched
        rows = {
            key: tuple(
                self.row_now(key, slot) if self.looks_again(source) else found
                for slot, source, found in zip(hit.slots, sources, (fetched.reads[read].rows or {})[key], strict=True)
            )
            for key, sources in hit.plan.items()
        }
        return fetched._set_read(read, replace(fetched.reads[read], rows=rows))

    def row_now(self, key: Key, slot: Slot) -> Row | None:
        source = self._resolve(key, slot)
        return None if source is None else self._row(key, source)


class ResolveDeferredAtFetch(_LateLookup):
    def looks_again(self, source: Source) -> bool:
        return isinstance(source, LogRow)


class PlanAgainAtMaterialize(Machine):
    def take_step(self, step: StepId, reqs: tuple[Req, ...]) -> Self:
        state = super().take_step(step, reqs)
        for read in state.steps[step].reads.values():
            hit = state.reads[read]
            if hit.rows is None:
                fresh = HitRead(hit.req, hit.start, hit.slots)
                state = state._release_plan(read)._set_read(read, fresh).plan_read(read)
                state = state._set_read(read, replace(state.reads[read], step=step))
        return state


class HoleReadsBuffer(_LateLookup):
    def looks_again(self, source: Source) -> bool:
        return source is None

    def row_now(self, key: Key, slot: Slot) -> Row | None:
        return self.pool[key][slot]


class NoCopyAside(Machine):
    def preserve_reads(self, slots: Iterable[Slot]) -> Self:  # noqa: ARG002
        return self


class PreserveOnlyCommitted(Machine):
    def preserve_reads(self, slots: Iterable[Slot]) -> Self:
        committed = [
            slot
            for slot in slots
            if all(column[slot] is not Occupancy.IN_TRANSIT for column in self.occupancy.values())
        ]
        return super().preserve_reads(committed)


class PlanWithoutPin(Machine):
    def _pin(self, hit: HitRead, by: int) -> Self:  # noqa: ARG002
        return self


class PlanSameStepOnce(Machine):
    def unplan_reads(self, slots: Iterable[Slot]) -> Self:  # noqa: ARG002
        return self


class FetchBeforeDone(Machine):
    def fetch_read(self, read: ReadId) -> Self:
        hurried = self._set_read(read, replace(self.reads[read], writers=frozenset()))
        return super(FetchBeforeDone, hurried).fetch_read(read)


class AbsentHiddenIsMiss(Machine):
    def open_step(self, step: StepId, batch: tuple[BatchItem, ...], emits: frozenset[Key]) -> Self:
        return _nothing_fails(self, super().open_step(step, batch, emits), step)


def _nothing_fails(before: M, opened: M, step: StepId) -> M:
    """The step is open, and its reads with holes in hidden rows are as planned as ever."""
    for read in opened.steps[step].reads.values():
        if opened.reads[read].failed:
            planned = replace(before.reads[read], step=step)
            opened = opened._pin(planned, 1)._hold_chunks(planned, ("read", read))._set_read(read, planned)
    return opened


class OversizedKeyLeftOut(Machine):
    def _resolve(self, key: Key, slot: Slot) -> Source:
        cap = max(spec.row_bytes for spec in self.settings.keys)
        left_out = next(spec.name for spec in self.settings.keys if spec.row_bytes == cap)
        return None if key == left_out else super()._resolve(key, slot)


# ----------------------------------------------------------------------------------------- spans


class HitRowsLeftOut(Machine):
    def start_request(self, req: Req, computed: int, blocks: tuple[int, ...]) -> Self:
        return replace(super().start_request(req, computed, blocks), reads=self.reads)


class PartialBlockDropped(Machine):
    def start_request(self, req: Req, computed: int, blocks: tuple[int, ...]) -> Self:
        started = super().start_request(req, computed, blocks)
        reads = {}
        for read, hit in started.reads.items():
            cut = -hit.start % self.settings.block_size if read not in self.reads else 0
            if cut < len(hit.slots):
                reads[read] = replace(hit, start=hit.start + cut, slots=hit.slots[cut:])
        return replace(started, reads=reads)


class ResumeGapNotMarked(Machine):
    def start_request(self, req: Req, computed: int, blocks: tuple[int, ...]) -> Self:
        started = super().start_request(req, computed, blocks)
        return replace(started, reads=self.reads) if req in self.emitted else started


class ContinuationIsHit(Machine):
    def start_request(self, req: Req, computed: int, blocks: tuple[int, ...]) -> Self:
        return super(ContinuationIsHit, replace(self, emitted=drop(self.emitted, req))).start_request(
            req, computed, blocks
        )


class UnemittedKeyDropped(Machine):
    def outputs(self, step: StepId) -> Outputs:
        found = super().outputs(step)
        emits = self.steps[step].emits
        return replace(found, rows={key: rows for key, rows in found.rows.items() if key in emits})


class SplitByPromptLength(Machine):
    def _parts(self, batch: tuple[BatchItem, ...]) -> list[slice]:
        parts, offset = [], 0
        for item in batch:
            parts.append(slice(offset, offset + len(item.slots)))
            offset += item.start + len(item.slots)
        return parts


class BuilderReadsLiveBatch(Machine):
    def outputs(self, step: StepId) -> Outputs:
        newest = self.steps[max(self.steps)].page
        live = put(self.steps, step, replace(self.steps[step], page=newest))
        return super(BuilderReadsLiveBatch, replace(self, steps=live)).outputs(step)


class NewBeforeFinished(EagerDriver):
    _finished: Sequence[Req] = ()

    def finish_requests(self, reqs: Sequence[Req]) -> None:
        self._finished = reqs

    def start_requests(self, admitted: Sequence[Admission]) -> list[str]:
        problems = super().start_requests(admitted)
        super().finish_requests(self._finished)
        return problems


# ----------------------------------------------------------------------------------------- write tasks


class DropAbortedWrite(Machine):
    def finish_request(self, req: Req) -> Self:
        task = self.open_write.get(req)
        finished = super().finish_request(req)
        if task is None:
            return finished
        dropped = finished._settle(self.tasks[task], Occupancy.ABSENT)
        return replace(dropped, tasks=drop(dropped.tasks, task))._let_go(("write", task))


class OldOwnerWrites(Machine):
    def write_pool(self, task: TaskId) -> Self:
        written = super().write_pool(task)
        pool = dict(written.pool)
        for entry in self.tasks[task].entries:
            pool[entry.key] = at(pool[entry.key], {entry.slot: self._row(entry.key, entry.source)})
        return replace(written, pool=pool)


class CommitLostSlot(Machine):
    def _settle(self, task: WriteTask, occupancy: Occupancy) -> Self:
        ours = [entry._replace(version=self.version[entry.slot]) for entry in task.entries]
        return super()._settle(replace(task, entries=tuple(ours)), occupancy)


class AppendToLostTask(Machine):
    def append_rows(self, batch: tuple[BatchItem, ...], rows: Rows, num_bytes: int) -> Self:
        appended = super().append_rows(batch, rows, num_bytes)
        for req, task in self.open_write.items():
            claimed = {(e.key, e.slot): e.version for e in reversed(self.tasks[task].entries)}
            if req in {item.req for item in batch}:
                grown = appended.tasks[task]
                stale = [e._replace(version=claimed.get((e.key, e.slot), e.version)) for e in grown.entries]
                appended = replace(appended, tasks=put(appended.tasks, task, replace(grown, entries=tuple(stale))))
        return appended


class SkipChainStep(Machine):
    def claim_copy(self) -> Self:
        task = self.queue[0] if self.queue else -1
        return super().claim_copy()._move(task, TaskState.COPYING, TaskState.HOST_READY)


class TwoPoolWriters(EagerDriver):
    def commit_some(self) -> bool:
        if self.machine.queue:
            self.do("claim_copy")
            return True
        return super().commit_some()


class ClaimWhileBusy(Machine):
    def claim_copy(self) -> Self:
        if not self.queue:
            raise NotEnabled
        return replace(self._move(self.queue[0], TaskState.QUEUED, TaskState.COPYING), queue=self.queue[1:])


# ----------------------------------------------------------------------------------------- pages and steps


class PageFreedAtMaterialize(Machine):
    def release_step(self, step: StepId) -> Self:
        page = self.steps[step].page
        released = super().release_step(step)
        return replace(released, pages=at(released.pages, {page: replace(self.pages[page], holders=frozenset())}))


class PageReusedBeforeTaken(Machine):
    def claim_page(self, step: StepId, rows: Rows) -> Self:
        freed = tuple(
            page if any(kind == "write" for kind, _ in page.holders) else Page(frozenset(), page.rows)
            for page in self.pages
        )
        return super(PageReusedBeforeTaken, replace(self, pages=freed)).claim_page(step, rows)


class DiscardKeepsPage(Machine):
    def discard_step(self, step: StepId) -> Self:
        return replace(super().discard_step(step), pages=self.pages)


class ReuseStepId(EagerDriver):
    def issue_step(self) -> StepId:
        return max(self.machine.steps, default=super().issue_step())


class StepConsumedTwice(Machine):
    def release_step(self, step: StepId) -> Self:
        context = replace(self.steps[step], taken=None)
        return replace(self, steps=put(self.steps, step, context))


class RefusedCallConsumes(EagerDriver):
    def do(self, action: str, *args: Any) -> None:
        try:
            super().do(action, *args)
        except OmniPrefixCacheContractError:
            if action == "take_step" and args[0] in self.machine.steps:
                self.machine = self.machine.discard_step(args[0])
            raise


# ----------------------------------------------------------------------------------------- budget


class UnchargePerTask(Machine):
    def _let_go(self, holder: Holder) -> Self:
        released = super()._let_go(holder)
        early = sum(
            chunk.num_bytes
            for number, chunk in self.log.items()
            if holder in chunk.holders and number in released.log and holder[0] == "write"
        )
        return replace(released, charged=released.charged - early)


class BudgetNotEnforced(EagerDriver):
    def make_room(self, num_bytes: int) -> None:
        """Nobody is made to give way."""


class ReserveRegardless(Machine):
    def reserve_budget(self, num_bytes: int) -> Self:
        return replace(self, charged=self.charged + num_bytes, reserved=self.reserved + num_bytes)


class RunningRequestKeepsWrite(Machine):
    def seal_write(self, req: Req) -> Self:
        return self if req in self.emitted else super().seal_write(req)

    def finish_request(self, req: Req) -> Self:
        return replace(super().finish_request(req), open_write=drop(self.open_write, req))


class OversizedChunkDeferred(Machine):
    def defers(self, num_bytes: int) -> bool:
        return num_bytes > 0


class ReservationLeaks(Machine):
    def cancel_step(self, step: StepId) -> Self:
        return self._let_go(("step", step))


class ReadKeepsChunk(Machine):
    def _release_plan(self, read: ReadId) -> Self:
        return self._pin(self.reads[read], -1)


class ChunkFreedUnderReader(Machine):
    def _hold_chunks(self, hit: HitRead, holder: Holder) -> Self:  # noqa: ARG002
        return self

    def _row(self, key: Key, source: Any) -> Row:
        lost = isinstance(source, LogRow) and source.chunk not in self._live_chunks()
        return ZEROS if lost else super()._row(key, source)

    def _live_chunks(self) -> set[ChunkId]:
        return set(self.log)


# ----------------------------------------------------------------------------------------- failure and finish


class WakeBeforeRecord(EagerDriver):
    def fail(self, task: TaskId, cause: str) -> None:
        self.fail_next = None
        self.do("fail_task", task)
        self.do("publish_failure", task, cause)


class FailureSwallowed(Machine):
    def publish_failure(self, task: TaskId, cause: str) -> Self:  # noqa: ARG002
        return self


class FailureForgotten(Machine):
    def abandon_reads(self) -> Self:
        return replace(super().abandon_reads(), failure=None)

    def check_usable(self) -> None:
        replace(self, failure=self.failure if self.steps else None)._check()

    def _check(self) -> None:
        super().check_usable()


class UnknownFinishRaises(Machine):
    def finish_request(self, req: Req) -> Self:
        if req not in self.emitted:
            raise OmniPrefixCacheContractError(f"request {req!r} was never started")
        return super().finish_request(req)


class FinishLeavesBookkeeping(Machine):
    def finish_request(self, req: Req) -> Self:
        return replace(super().finish_request(req), emitted=self.emitted, write_n=self.write_n)
