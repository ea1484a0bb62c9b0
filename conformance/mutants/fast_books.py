"""Faults of the production package in what it keeps count of: pages, budget, steps, requests, failures."""

from __future__ import annotations

from conformance.mutants.fast_edit import Edit, Edits, FastMutant
from omni_prefix_fast.committer import OmniPrefixCacheController
from omni_prefix_fast.log import BudgetTicket, DeferredLog, DeviceBudget
from omni_prefix_fast.machine import PrefixCacheMachine
from omni_prefix_fast.manager import OmniPrefixCacheManager
from omni_prefix_fast.requests import RequestTable
from omni_prefix_fast.staging import StagingBufferPool
from omni_prefix_fast.steps import StepTable

_FINISH_THEM = "        for req_id in events.finished:\n            self._machine.finish_request(req_id)\n"

REQUESTS = (
    FastMutant(
        "new_before_finished",
        "admissions are handled before finished ids",
        "span_owed_until_emitted",
        (
            Edits(
                OmniPrefixCacheManager,
                "new_step_starts",
                (
                    (_FINISH_THEM, ""),
                    (
                        "        if problems:\n",
                        _FINISH_THEM + "        if problems:\n",
                    ),
                ),
            ),
        ),
    ),
    FastMutant(
        "drop_aborted_write",
        "the open write of a finished request is dropped",
        "abort_still_lands",
        (Edit(PrefixCacheMachine, "finish_request", "self.write(task)", "self.log.written(task)"),),
        cases=("E28",),
    ),
    FastMutant(
        "unknown_finish_raises",
        "a finished id never seen is an error",
        "abort_still_lands",
        (Edit(RequestTable, "finish", "self._emitted.pop(req_id, None)", "self._emitted.pop(req_id)"),),
        cases=("E29",),
    ),
    FastMutant(
        "short_table_taken",
        "a block table that does not cover the hit is not refused",
        "span_owed_until_emitted",
        (Edit(RequestTable, "owed", "if blocks.shape[0] < needed:", "if not blocks.shape[0]:"),),
        cases=("E23",),
    ),
    FastMutant(
        "finish_leaves_watermark",
        "the watermark of a finished request stays",
        "at_rest",
        (Edit(RequestTable, "finish", "self._emitted.pop(req_id, None)", "self._emitted.get(req_id)"),),
        cases=("E35",),
    ),
    FastMutant(
        "finish_leaves_write_n",
        "deferred writes of a request are counted on under an id used again",
        "abort_still_lands",
        (Edit(RequestTable, "finish", "self._write_n.pop(req_id, None)", "pass"),),
        cases=("E35",),
    ),
    FastMutant(
        "sealed_write_short",
        "a sealed write ends before its last chunk",
        "abort_still_lands",
        (Edit(DeferredLog, "seal", "self.next_chunk", "max(task.first_chunk + 1, self.next_chunk - 1)"),),
        cases=("E28",),
    ),
)

STEPS = (
    FastMutant(
        "step_consumed_twice",
        "a consumed step can be taken again",
        "step_consumed_once",
        (Edit(StepTable, "take", "del self._open[step_id]", "pass"),),
    ),
    FastMutant(
        "refused_call_consumes",
        "a refused materialize consumes the step",
        "step_consumed_once",
        (
            Edits(
                StepTable,
                "take",
                (
                    ("self._open.get(step_id) if", "self._open.pop(step_id, None) if"),
                    ("del self._open[step_id]", "pass"),
                ),
            ),
        ),
    ),
    FastMutant(
        "reuse_step_id",
        "the id of an unconsumed step is issued again",
        "step_consumed_once",
        (Edit(StepTable, "issue", "step_id = self._next", "step_id = len(self._open)"),),
    ),
    FastMutant(
        "call_after_shutdown",
        "a call after shutdown answers as if there had been none",
        "failure_is_loud_and_sticky",
        (Edit(OmniPrefixCacheManager, "_check_usable", "if self._closed:", "if False:"),),
    ),
    FastMutant(
        "discard_keeps_page",
        "a discarded step holds its page for ever",
        "page_held_while_read",
        (
            Edit(
                OmniPrefixCacheManager,
                "discard_step",
                "try:\n            self._machine.let_go(context)",
                "try:\n            pass",
            ),
        ),
        cases=("E32", "E35"),
    ),
    FastMutant(
        "failed_save_keeps_page",
        "a save that fails before it claims keeps its page",
        "page_held_while_read",
        (Edit(OmniPrefixCacheManager, "_land", "machine.release_page(layout.step_id, page)", "pass"),),
        cases=("E32",),
    ),
    FastMutant(
        "page_reused_before_taken",
        "a page is free once it is written, whoever has to build from it",
        "page_held_while_read",
        (
            Edit(
                StagingBufferPool,
                "release",
                ".discard(holder)",
                ".difference_update(tuple(self._holders[page]) if holder.kind == 'write' else (holder,))",
            ),
        ),
        cases=("E20",),
    ),
    FastMutant(
        "wait_without_limit",
        "a save waits for a page for as long as it takes",
        "waits_have_limits",
        (Edit(StagingBufferPool, "claim", "self._freed.wait(remaining)", "self._freed.wait()"),),
        cases=("E32",),
    ),
)

BUDGET = (
    FastMutant(
        "uncharged_by_first_write",
        "the first write that is done with a chunk gives its bytes back",
        "budget_charged_once",
        (
            Edit(
                DeferredLog,
                "written",
                "chunk.unwritten.discard(task.req_id)",
                "chunk.unwritten.discard(task.req_id); chunk.ticket.release()",
            ),
        ),
    ),
    FastMutant(
        "uncharge_per_release",
        "a charge is given back each time that it is released",
        "budget_charged_once",
        (
            Edit(BudgetTicket, "release", "self._budget = None", "pass"),
            Edit(DeferredLog, "written", "self._let_go(chunk)", "chunk.ticket.release(); self._let_go(chunk)"),
        ),
    ),
    FastMutant(
        "charged_per_row",
        "a chunk is charged the bytes of one token",
        "budget_charged_once",
        (Edit(OmniPrefixCacheManager, "_land", "row_bytes * layout.num_tokens", "row_bytes"),),
        cases=("E33",),
    ),
    FastMutant(
        "budget_not_enforced",
        "clones are made whether or not they fit",
        "budget_charged_once",
        (Edit(DeviceBudget, "reserve", "self.charged + nbytes > self.limit", "nbytes > self.limit"),),
        cases=("E33",),
    ),
    FastMutant(
        "oversized_chunk_deferred",
        "a chunk larger than the whole budget is waited for",
        "budget_charged_once",
        (Edit(PrefixCacheMachine, "reserve_budget", "if nbytes > self.budget.limit:", "if False:"),),
    ),
    FastMutant(
        "running_request_keeps_write",
        "the open write of a running request is never forced out",
        "budget_charged_once",
        (
            Edit(
                PrefixCacheMachine,
                "_force_out",
                "writes = self.log.seal_chunk(chunk)",
                "writes = self.log.seal_chunk(chunk)[:0]",
            ),
        ),
        cases=("E33",),
    ),
    FastMutant(
        "reservation_leaks",
        "a save that fails does not give back what it reserved",
        "budget_charged_once",
        (Edit(OmniPrefixCacheManager, "_land", "machine.cancel(ticket)", "pass"),),
    ),
    FastMutant(
        "read_keeps_chunk",
        "a fetched read holds its chunks for ever",
        "budget_charged_once",
        (Edit(DeferredLog, "release", "chunk.readers -= 1", "pass"),),
        cases=("E35",),
    ),
)

FAILURES = (
    FastMutant(
        "failure_swallowed",
        "a failed write leaves no record",
        "failure_is_loud_and_sticky",
        (Edit(OmniPrefixCacheController, "_give_up", "self._failure = (what, cause)", "pass"),),
        cases=("E31",),
    ),
    FastMutant(
        "failure_forgotten",
        "a failure is told once",
        "failure_is_loud_and_sticky",
        (
            Edit(
                OmniPrefixCacheController,
                "check",
                "what, cause = self._failure",
                "(what, cause), self._failure = self._failure, None",
            ),
        ),
        cases=("E31",),
    ),
    FastMutant(
        "chain_step_skipped",
        "a task is never marked as being on the host",
        "strict_chain",
        (Edit(OmniPrefixCacheController, "_copy", "task.move(TaskState.HOST_READY)", "pass"),),
    ),
    FastMutant(
        "failed_write_commits",
        "rows of a failed write are committed all the same",
        "failure_is_loud_and_sticky",
        (
            Edit(PrefixCacheMachine, "commit_tasks", "if task.state is TaskState.WRITTEN:", "if True:"),
            Edit(OmniPrefixCacheController, "_give_up", "self._failure = (what, cause)", "pass"),
        ),
        cases=("E31",),
    ),
)

BOOKS = (*REQUESTS, *STEPS, *BUDGET, *FAILURES)
