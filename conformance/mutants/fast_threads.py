"""Faults of the production package that only threads bring out: who waits, who lets go when, who wakes whom."""

from __future__ import annotations

from conformance.mutants.fast_edit import Edit, Edits, FastMutant
from omni_prefix_fast.committer import OmniPrefixCacheController
from omni_prefix_fast.machine import PrefixCacheMachine
from omni_prefix_fast.manager import OmniPrefixCacheManager
from omni_prefix_fast.prefetch import Prefetcher
from omni_prefix_fast.reads import HitRead
from omni_prefix_fast.staging import StagingBufferPool

ASYNC = "fast-async"

LANDING = (
    FastMutant(
        "copy_before_landed",
        "rows are taken from the page before they have landed there",
        "rows_are_right",
        (Edit(OmniPrefixCacheController, "_copy", "task.transfer.wait()", "pass"),),
        ASYNC,
        cases=("E20",),
    ),
    FastMutant(
        "host_ready_before_landed",
        "a write says that its rows are on the host before it has waited for them",
        "rows_are_right",
        (
            Edit(
                OmniPrefixCacheController,
                "_copy",
                "task.transfer.wait()",
                "task.host_ready.set(); task.transfer.wait()",
            ),
        ),
        ASYNC,
    ),
    FastMutant(
        "builder_ignores_landing",
        "the builder does not wait until the step's rows are in its page",
        "rows_are_right",
        (Edit(OmniPrefixCacheManager, "materialize", "if context.landing is not None:", "if False:"),),
        ASYNC,
    ),
    FastMutant(
        "deferred_only_step_never_lands",
        "a step of deferred rows alone has no write that waits for its copies",
        "rows_are_right",
        (Edit(PrefixCacheMachine, "publish", "bool(immediate) or not rows.transfer.landed()", "bool(immediate)"),),
        ASYNC,
    ),
)

PAGES = (
    FastMutant(
        "write_does_not_hold_page",
        "a write in flight does not hold the page that it views",
        "page_held_while_read",
        (
            Edit(
                PrefixCacheMachine, "_register_write", 'self.staging.bind(page, Holder("write", task.task_id))', "pass"
            ),
        ),
        ASYNC,
    ),
    FastMutant(
        "page_freed_at_materialize",
        "a page is free once its step is taken, whoever writes from it",
        "page_held_while_read",
        (
            Edit(
                StagingBufferPool,
                "release",
                "self._holders[page].discard(holder)",
                "self._holders[page] &= set() if holder.kind == 'step' else self._holders[page] - {holder}",
            ),
        ),
        ASYNC,
    ),
    FastMutant(
        "page_freed_before_merge",
        "a page is given back before its rows are copied out",
        "page_held_while_read",
        (
            Edit(
                OmniPrefixCacheManager,
                "materialize",
                "deadline = machine.deadline()",
                "deadline = machine.deadline(); machine.release_page(context.layout.step_id, context.page)",
            ),
        ),
        ASYNC,
        cases=("E20",),
    ),
    FastMutant(
        "freed_page_wakes_nobody",
        "whoever waits for a page is not told that one became free",
        "waits_end",
        (Edit(StagingBufferPool, "release", "self._freed.notify_all()", "pass"),),
        ASYNC,
        cases=("E32",),
    ),
)

READS = (
    FastMutant(
        "fetch_before_done",
        "a read does not wait for the write of its rows",
        "rows_are_right",
        (Edit(PrefixCacheMachine, "_gather", "self.controller.join(task, deadline)", "pass"),),
        ASYNC,
        cases=("E14",),
    ),
    FastMutant(
        "fetch_once_on_host",
        "a read waits until its rows are on the host, not until they are in the pool",
        "rows_are_right",
        (Edit(PrefixCacheMachine, "_gather", "self.controller.join(", "self.controller.join_host_ready("),),
        ASYNC,
        cases=("E14",),
    ),
    FastMutant(
        "stale_generation_kept",
        "rows gathered before a read was unplanned are delivered",
        "plan_once",
        (Edit(PrefixCacheMachine, "_gather", "read.generation != generation or", "False or"),),
        ASYNC,
    ),
    FastMutant(
        "prefetched_read_stays",
        "a read that was prefetched is not unplanned by the step that computes its slots",
        "plan_once",
        (
            Edit(
                PrefixCacheMachine,
                "unplan_reads",
                "if read.state is not ReadState.UNPLANNED and",
                "if read.state is ReadState.PLANNED and",
            ),
        ),
        ASYNC,
    ),
    FastMutant(
        "unplanned_read_delivered",
        "what the prefetch thread gathers is delivered whatever became of the plan meanwhile",
        "plan_once",
        (
            Edit(
                PrefixCacheMachine,
                "_gather",
                "if read.generation != generation or read.state is not ReadState.PLANNED:",
                "if read.state is ReadState.FETCHED:",
            ),
        ),
        ASYNC,
    ),
    FastMutant(
        "fetch_unpins_first",
        "a read lets go of its rows before they are gathered",
        "planned_read_names_rows",
        (
            Edit(
                PrefixCacheMachine,
                "_gather",
                "            generation, plans, waits = read.generation, dict(read.plans), read.waits\n",
                "            generation, plans, waits = read.generation, dict(read.plans), read.waits\n"
                "            self.table.unpin(read.pinned); read.pinned = read.pinned[:0]\n",
            ),
        ),
        ASYNC,
        cases=("E16",),
    ),
    FastMutant(
        "waits_for_oldest_write",
        "a read of rows of several writes waits for the oldest only",
        "rows_are_right",
        (
            Edit(
                HitRead,
                "_plan_key",
                "np.unique(table.owner[self.slots[transit]]).tolist()",
                "np.unique(table.owner[self.slots[transit]]).tolist()[:1]",
            ),
        ),
        ASYNC,
    ),
)

COMMITTER = (
    FastMutant(
        "wake_before_record",
        "waiters of a failed write wake before the failure is recorded",
        "failure_is_loud_and_sticky",
        (
            Edit(
                OmniPrefixCacheController,
                "_run_next",
                "self._fail([task, *self._give_up(str(task), error)])",
                "self._fail([task]); self._fail(self._give_up(str(task), error))",
            ),
        ),
        ASYNC,
        cases=("E31",),
    ),
    FastMutant(
        "done_before_finished",
        "waiters wake before the write is among the finished ones",
        "strict_chain",
        (
            Edits(
                OmniPrefixCacheController,
                "_end",
                (
                    ("task.drop_rows()\n", "task.drop_rows()\n        task.wake()\n"),
                    ("self._finished.append(task)\n        task.wake()", "self._finished.append(task)"),
                ),
            ),
        ),
        ASYNC,
    ),
    FastMutant(
        "done_never_told",
        "waiters are woken before the write is marked as written",
        "waits_end",
        (
            Edit(
                OmniPrefixCacheController,
                "_run_next",
                "task.move(TaskState.WRITTEN)\n        self._end(task)",
                "self._end(task)\n        task.move(TaskState.WRITTEN)",
            ),
        ),
        ASYNC,
        cases=("E32",),
    ),
    FastMutant(
        "submit_wakes_nobody",
        "the committer is not told of a new write",
        "waits_end",
        (Edit(OmniPrefixCacheController, "submit", "self._wake.notify_all()", "pass"),),
        ASYNC,
        cases=("E32",),
    ),
    FastMutant(
        "pop_outside_section",
        "a write is taken from the queue after its critical section",
        "one_writer",
        (
            Edit(
                OmniPrefixCacheController,
                "_run_next",
                "            task = self._running = self._queue.popleft()\n            task.move(TaskState.COPYING)",
                "        task = self._running = self._queue.popleft()\n        task.move(TaskState.COPYING)",
            ),
        ),
        ASYNC,
    ),
    FastMutant(
        "two_writers",
        "two threads write the pool",
        "one_writer",
        (
            Edit(
                OmniPrefixCacheController,
                "submit",
                'self._thread = self._runtime.spawn("committer", self._work)',
                'self._runtime.spawn("second committer", self._work)\n'
                '                    self._thread = self._runtime.spawn("committer", self._work)',
            ),
            Edit(OmniPrefixCacheController, "_run_next", "or self._running is not None:", "or False:"),
        ),
        ASYNC,
    ),
    FastMutant(
        "failure_keeps_queue",
        "writes behind a failed one are left in the queue",
        "waits_end",
        (
            Edit(
                OmniPrefixCacheController, "_give_up", "queued, self._queue = list(self._queue), deque()", "queued = []"
            ),
        ),
        ASYNC,
        cases=("E31", "E32"),
    ),
    FastMutant(
        "shutdown_leaves_waiter",
        "writes that shutdown drops wake nobody",
        "waits_end",
        (Edit(OmniPrefixCacheController, "close", "self._fail(queued)", "pass"),),
        ASYNC,
        cases=("E32",),
    ),
    FastMutant(
        "shutdown_wakes_nobody",
        "the committer sleeps through a shutdown",
        "waits_end",
        (Edit(OmniPrefixCacheController, "close", "self._wake.notify_all()", "pass"),),
        ASYNC,
    ),
    FastMutant(
        "prefetch_sleeps_through_shutdown",
        "the prefetch thread is not told of a shutdown",
        "waits_end",
        (Edit(Prefetcher, "close", "self._wake.notify_all()", "pass"),),
        ASYNC,
    ),
    FastMutant(
        "prefetch_dies_of_failure",
        "the prefetch thread ends with the first read that it cannot fetch",
        "waits_end",
        (Edit(Prefetcher, "_work", "except Exception as error:", "except ZeroDivisionError as error:"),),
        ASYNC,
    ),
    FastMutant(
        "force_out_does_not_join",
        "the budget is used again before the writes that were forced out are done",
        "budget_charged_once",
        (Edit(PrefixCacheMachine, "_force_out", "self.controller.join(task, deadline)", "pass"),),
        ASYNC,
        cases=("E33",),
    ),
)

THREADS = (*LANDING, *PAGES, *READS, *COMMITTER)
