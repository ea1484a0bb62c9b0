"""Faults of the production package that hand over wrong rows, or rows of nobody: claims, plans, gathers."""

# ruff: noqa: SLF001 - a fault reaches into the machine that it breaks, and says what it does
from __future__ import annotations

from typing import Any

import numpy as np
import torch

from conformance.mutants.fast_edit import Edit, Edits, FastMutant, Function, Wrap
from omni_prefix_fast import merge
from omni_prefix_fast.committer import OmniPrefixCacheController
from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.log import DeferredLog
from omni_prefix_fast.machine import PrefixCacheMachine
from omni_prefix_fast.manager import OmniPrefixCacheManager
from omni_prefix_fast.pool import PrefixBlockPool
from omni_prefix_fast.reads import HitRead, ReadState
from omni_prefix_fast.runtime import Deadline
from omni_prefix_fast.slots import SlotTable
from omni_prefix_fast.steps import StepContext
from omni_prefix_fast.tasks import DeferredWrite
from omni_prefix_fast.types import Occupancy

# ------------------------------------------------------------------------- faults of more than a line


def _zeroing(claim: Function) -> Function:
    def _claim(self: PrefixCacheMachine, step: StepLayout, emitted: Any) -> Any:
        emitted = tuple(emitted)
        quiet = [key for key in self.table.open_keys() if key not in emitted]
        had = {key: step.slots[self.table.occupancy(key, step.slots) != Occupancy.ABSENT] for key in quiet}
        versions = claim(self, step, emitted)
        for key, slots in had.items():
            self.table._occupancy[key][slots] = Occupancy.COMMITTED
            self.pool.storage(key).flatten(0, 1)[torch.from_numpy(slots)] = 0
        return versions

    return _claim


def _keeping_first_versions(fill: Function) -> Function:
    def changed(self: DeferredLog, task: DeferredWrite) -> None:
        fill(self, task)
        for piece in task.pieces:
            first: dict[int, int] = {}
            pairs = zip(piece.slots.tolist(), piece.versions.tolist(), strict=True)
            piece.versions = np.array([first.setdefault(slot, version) for slot, version in pairs], dtype=np.int64)

    return changed


def _planning_log_rows_again(fetch: Function) -> Function:
    def fetch_read(self: PrefixCacheMachine, read: HitRead, deadline: Deadline) -> None:
        with self.lock:
            if read.state is ReadState.PLANNED and any(plan.log for plan in read.plans.values()):
                read.unplan(self.table, self.log)
                self._plan(read)
        fetch(self, read, deadline)

    return fetch_read


def _planning_again(take: Function) -> Function:
    def take_step(self: PrefixCacheMachine, *args: Any) -> StepContext:
        context: StepContext = take(self, *args)
        with self.lock:
            for read in context.reads.values():
                if read.state is ReadState.PLANNED:
                    read.unplan(self.table, self.log)
                    self._plan(read)
        return context

    return take_step


# ------------------------------------------------------------------------- the table

CLAIMS = (
    FastMutant(
        "skip_version_bump",
        "a claim does not raise the version",
        "claim_all",
        (Edit(SlotTable, "claim", "self.version[slots] += 1", "pass"),),
    ),
    FastMutant(
        "claim_only_emitted",
        "keys that the step does not emit keep the former tenant's rows",
        "claim_all",
        (
            Edit(
                SlotTable,
                "claim",
                "in self._occupancy.items():",
                "in ((k, o) for k, o in self._occupancy.items() if k in emitted):",
            ),
        ),
    ),
    FastMutant(
        "zero_instead_of_absent",
        "rows of keys that the step does not emit are zeroed, not marked absent",
        "claim_all",
        (Wrap(PrefixCacheMachine, "_claim", _zeroing, "storage[slots] = 0; occupancy[slots] = COMMITTED"),),
    ),
    FastMutant(
        "log_pointer_survives_claim",
        "a slot claimed for rows that go to the pool keeps the former tenant's place in the log",
        "claim_all",
        (Edit(SlotTable, "claim", "log.chunk[slots] = NO_CHUNK", "pass"),),
    ),
    FastMutant(
        "commit_ignores_versions",
        "a write commits slots that it lost",
        "one_writer",
        (Edit(SlotTable, "commit", "slots[self.version[slots] == versions]", "slots"),),
    ),
    FastMutant(
        "old_owner_writes",
        "a write writes slots that it lost",
        "one_writer",
        (Edit(OmniPrefixCacheController, "_write", "if owned.all():", "if True:"),),
    ),
    FastMutant(
        "kept_rows_shifted",
        "of a write that lost slots, the first rows are written, not those of the slots that are left",
        "one_writer",
        (Edit(PrefixBlockPool, "write", "source[kept]", "source[: kept.size]"),),
    ),
    FastMutant(
        "append_to_lost_task",
        "rows appended to an open write keep the version first claimed for their slot",
        "abort_still_lands",
        (Wrap(DeferredLog, "fill", _keeping_first_versions, "versions = first.setdefault(slot, version)"),),
    ),
    FastMutant(
        "unsaved_step_keeps_rows",
        "slots of a step that is never saved keep the former tenant's rows",
        "rows_are_right",
        (Edit(OmniPrefixCacheManager, "_give_up_unsaved_step", "if not started.events.total:", "if True:"),),
        cases=("E41",),
    ),
    FastMutant(
        "oversized_key_left_out",
        "deferred rows without a clone are not written at all",
        "span_owed_until_emitted",
        (Edit(PrefixCacheMachine, "publish", "not in rows.clones]", "not in rows.deferred_keys]"),),
        cases=("E04",),
    ),
)

READS = (
    FastMutant(
        "no_preserve",
        "planned rows are not fetched before their slot is claimed",
        "planned_read_names_rows",
        (Edit(SlotTable, "any_pinned", "bool(self.pins[slots].any())", "False"),),
        cases=("E16",),
    ),
    FastMutant(
        "preserve_only_committed",
        "planned rows that were in transit are not fetched before their slot is claimed",
        "planned_read_names_rows",
        (
            Edit(
                PrefixCacheMachine,
                "preserve_reads",
                "(read.pinned, epoch)]",
                "(read.pinned, epoch) and not read.waits]",
            ),
        ),
    ),
    FastMutant(
        "gather_without_pins",
        "a plan pins nothing",
        "planned_read_names_rows",
        (Edit(HitRead, "plan", "self.pinned = self.slots[named]", "self.pinned = NOTHING"),),
    ),
    FastMutant(
        "chunk_released_under_reader",
        "a plan does not hold the chunks that it names",
        "planned_read_names_rows",
        (
            Edit(DeferredLog, "hold", "chunk.readers += 1", "pass"),
            Edit(DeferredLog, "release", "chunk.readers -= 1", "pass"),
        ),
    ),
    FastMutant(
        "resolve_deferred_at_fetch",
        "a planned deferred row is looked up again when it is fetched",
        "planned_read_names_rows",
        (Wrap(PrefixCacheMachine, "fetch_read", _planning_log_rows_again, "read.unplan(...); self._plan(read)"),),
    ),
    FastMutant(
        "plan_at_materialize",
        "unfetched reads are planned again when the rows are asked for",
        "plan_once",
        (Wrap(PrefixCacheMachine, "take_step", _planning_again, "read.unplan(...); self._plan(read)"),),
    ),
    FastMutant(
        "plan_same_step_once",
        "a read whose producer is in the batch keeps its first plan",
        "plan_once",
        (Edit(PrefixCacheMachine, "unplan_reads", "if read.state is not ReadState.UNPLANNED and", "if False and"),),
    ),
    FastMutant(
        "absent_hidden_is_miss",
        "absent hidden rows are handed over as zeros",
        "hit_is_whole_or_fatal",
        (Edit(HitRead, "settle", "if not owes_hidden:", "if True:"),),
        cases=("E41",),
    ),
    FastMutant(
        "hole_reads_buffer",
        "a hole reads whatever stands in the output's memory",
        "hit_is_whole_or_fatal",
        (Edit(HitRead, "_gather_key", "if plan.holes.size:", "if False:"),),
        cases=("E12",),
    ),
    FastMutant(
        "unknown_prefix_reads_buffer",
        "the cached prefix of a key without any row is whatever stands in the output's memory",
        "hit_is_whole_or_fatal",
        (Edit(merge, "_merged", "merged[: len(read)].zero_()", "pass"),),
        cases=("E12", "D3"),
    ),
    FastMutant(
        "log_rows_from_the_first",
        "rows of a chunk are taken from its first row on, whoever's they are",
        "rows_are_right",
        (Edit(HitRead, "_plan_key", "logged.row[positions], positions)", "np.arange(positions.size), positions)"),),
    ),
    FastMutant(
        "pool_rows_not_spread",
        "pool rows between holes and log rows are put one after another",
        "rows_are_right",
        (
            Edit(
                HitRead,
                "_gather_key",
                "self.slots[plan.pool], out, plan.pool)",
                "self.slots[plan.pool], out[: plan.pool.size])",
            ),
        ),
    ),
    FastMutant(
        "block_gather_of_parts",
        "a span that ends or begins within a block is gathered as whole blocks",
        "rows_are_right",
        (
            Edits(
                PrefixBlockPool,
                "_whole_blocks",
                (
                    ("slots.shape[0] == 0 or slots.shape[0] % self.block_size", "slots.shape[0] == 0"),
                    (
                        "(first % self.block_size).any() or not np.array_equal(whole.reshape(-1), slots)",
                        "not whole.size",
                    ),
                ),
            ),
        ),
        cases=("E06",),
    ),
    FastMutant(
        "wrong_dtype_view",
        "hit rows of four bytes are handed over as integers",
        "rows_are_right",
        (
            Edit(
                HitRead,
                "_gather_key",
                "*storage.shape[2:]), storage.dtype)",
                "*storage.shape[2:]), torch.int32 if storage.dtype.itemsize == 4 else storage.dtype)",
            ),
        ),
        cases=("E11",),
    ),
    FastMutant(
        "failed_read_keeps_pins",
        "a read that can never be fetched keeps what it pinned",
        "at_rest",
        (Edit(PrefixCacheMachine, "publish", "if read.failure is not None:", "if False:"),),
    ),
    FastMutant(
        "discard_keeps_pins",
        "the reads of a step that nobody wants stay planned",
        "at_rest",
        (Edit(PrefixCacheMachine, "let_go", "self._release(read, ReadState.DROPPED)", "pass"),),
        cases=("E35",),
    ),
    FastMutant(
        "refused_start_keeps_pins",
        "the reads of a step that is not going to be saved stay planned",
        "at_rest",
        (Edit(PrefixCacheMachine, "drop_starting", "self._release(read, ReadState.DROPPED)", "pass"),),
    ),
)

ROWS = (*CLAIMS, *READS)
