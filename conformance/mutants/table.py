"""The table of seeded faults: name, what is broken, where it comes from, and the class that breaks it."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.mutants import faults as f
from omni_prefix_ref import EagerDriver, Machine


@dataclass(frozen=True)
class Mutant:
    """One seeded fault. `rule` is the rule of the architecture page that it breaks; `cases` names reported faults."""

    name: str
    fault: str
    rule: str
    machine: type[Machine] = Machine
    driver: type[EagerDriver] = EagerDriver
    cases: tuple[str, ...] = ()


MUTANTS = (
    Mutant("skip_version_bump", "a claim does not raise the version", "claim_all", f.SkipVersionBump),
    Mutant(
        "claim_only_emitted",
        "keys that the step does not emit keep the former tenant's rows",
        "claim_all",
        f.ClaimOnlyEmitted,
    ),
    Mutant(
        "zero_instead_of_absent",
        "rows of unemitted keys are zeroed, not marked absent",
        "claim_all",
        f.ZeroInsteadOfAbsent,
    ),
    Mutant(
        "unsaved_step_keeps_rows",
        "slots of a step that is never saved keep the former tenant's rows",
        "rows_are_right",
        driver=f.UnsavedStepKeepsRows,
        cases=("E41",),
    ),
    Mutant(
        "resolve_deferred_at_fetch",
        "a planned deferred row is looked up again when fetched",
        "planned_read_names_rows",
        f.ResolveDeferredAtFetch,
    ),
    Mutant(
        "plan_at_materialize",
        "holes are planned again when the rows are asked for",
        "plan_once",
        f.PlanAgainAtMaterialize,
    ),
    Mutant(
        "plan_same_step_once",
        "a read whose producer is in the batch keeps its first plan",
        "plan_once",
        f.PlanSameStepOnce,
    ),
    Mutant(
        "hole_reads_buffer",
        "a hole reads whatever stands in the pool",
        "hit_is_whole_or_fatal",
        f.HoleReadsBuffer,
        cases=("E12",),
    ),
    Mutant(
        "no_preserve",
        "planned rows are not fetched before their slot is claimed",
        "planned_read_names_rows",
        f.NoCopyAside,
        cases=("E16",),
    ),
    Mutant(
        "preserve_only_committed",
        "planned rows in transit are not fetched before their slot is claimed",
        "planned_read_names_rows",
        f.PreserveOnlyCommitted,
    ),
    Mutant("plan_without_pin", "a plan pins nothing", "planned_read_names_rows", f.PlanWithoutPin),
    Mutant(
        "chunk_freed_under_reader",
        "a plan does not hold the chunks that it names",
        "planned_read_names_rows",
        f.ChunkFreedUnderReader,
    ),
    Mutant(
        "fetch_before_done",
        "a read does not wait for the write of its rows",
        "rows_are_right",
        f.FetchBeforeDone,
        cases=("E14",),
    ),
    Mutant(
        "absent_hidden_is_miss",
        "an absent hidden row is handed over as zeros",
        "hit_is_whole_or_fatal",
        f.AbsentHiddenIsMiss,
        cases=("E41",),
    ),
    Mutant(
        "oversized_key_left_out",
        "the widest key is silently not cached",
        "span_owed_until_emitted",
        f.OversizedKeyLeftOut,
        cases=("E04",),
    ),
    Mutant(
        "hit_rows_left_out",
        "only this step's rows are handed over",
        "span_owed_until_emitted",
        f.HitRowsLeftOut,
        cases=("E01",),
    ),
    Mutant(
        "partial_block_dropped",
        "a hit span that starts within a block starts at the next",
        "rows_are_right",
        f.PartialBlockDropped,
        cases=("E06",),
    ),
    Mutant(
        "resume_gap_not_marked",
        "a resumed request is not owed what it was never handed",
        "span_owed_until_emitted",
        f.ResumeGapNotMarked,
        cases=("E24",),
    ),
    Mutant(
        "continuation_is_hit",
        "rows that were handed over are handed over again",
        "span_owed_until_emitted",
        f.ContinuationIsHit,
        cases=("E21", "E26"),
    ),
    Mutant(
        "unemitted_key_dropped",
        "cached rows of a key are lost if the step does not emit it",
        "span_owed_until_emitted",
        f.UnemittedKeyDropped,
        cases=("D1",),
    ),
    Mutant(
        "split_by_prompt_length",
        "the batch is split by whole lengths, not by computed tokens",
        "rows_are_right",
        f.SplitByPromptLength,
        cases=("E02", "E08"),
    ),
    Mutant(
        "builder_reads_live_batch",
        "the builder reads the newest step's rows",
        "step_consumed_once",
        f.BuilderReadsLiveBatch,
        cases=("E19", "E20"),
    ),
    Mutant(
        "new_before_finished",
        "admissions are handled before finished ids",
        "step_consumed_once",
        driver=f.NewBeforeFinished,
    ),
    Mutant(
        "drop_aborted_write",
        "the open write of a finished request is dropped",
        "abort_still_lands",
        f.DropAbortedWrite,
        cases=("E28",),
    ),
    Mutant("old_owner_writes", "a write writes slots that it lost", "one_writer", f.OldOwnerWrites),
    Mutant("commit_lost_slot", "a write commits slots that it lost", "one_writer", f.CommitLostSlot),
    Mutant(
        "append_to_lost_task",
        "rows appended to an open write keep the version first claimed for their slot",
        "abort_still_lands",
        f.AppendToLostTask,
    ),
    Mutant("skip_chain_step", "a task goes from QUEUED to HOST_READY", "strict_chain", f.SkipChainStep),
    Mutant(
        "two_writers",
        "a second task is claimed while one is being written",
        "one_writer",
        f.ClaimWhileBusy,
        f.TwoPoolWriters,
    ),
    Mutant(
        "page_freed_at_materialize",
        "a page is free once its step is taken, whoever writes from it",
        "page_held_while_read",
        f.PageFreedAtMaterialize,
    ),
    Mutant(
        "page_reused_before_taken",
        "a page is free once it is written, whoever has to build from it",
        "page_held_while_read",
        f.PageReusedBeforeTaken,
        cases=("E20",),
    ),
    Mutant(
        "discard_keeps_page",
        "a discarded step holds its page for ever",
        "page_held_while_read",
        f.DiscardKeepsPage,
        cases=("E32", "E35"),
    ),
    Mutant("reuse_step_id", "the id of an unconsumed step is issued again", "step_consumed_once", driver=f.ReuseStepId),
    Mutant("step_consumed_twice", "a consumed step can be taken again", "step_consumed_once", f.StepConsumedTwice),
    Mutant(
        "refused_call_consumes",
        "a refused materialize consumes the step",
        "step_consumed_once",
        driver=f.RefusedCallConsumes,
    ),
    Mutant(
        "uncharge_per_task",
        "a chunk's bytes are given back by each write that lets go of it",
        "budget_charged_once",
        f.UnchargePerTask,
    ),
    Mutant(
        "budget_not_enforced",
        "clones are made whether or not they fit",
        "budget_charged_once",
        f.ReserveRegardless,
        f.BudgetNotEnforced,
        cases=("E33",),
    ),
    Mutant(
        "running_request_keeps_write",
        "the open write of a running request is never forced out",
        "budget_charged_once",
        f.RunningRequestKeepsWrite,
        cases=("E33",),
    ),
    Mutant(
        "oversized_chunk_deferred",
        "a chunk larger than the whole budget is deferred",
        "budget_charged_once",
        f.OversizedChunkDeferred,
    ),
    Mutant(
        "reservation_leaks",
        "a save that fails does not give back what it reserved",
        "budget_charged_once",
        f.ReservationLeaks,
    ),
    Mutant(
        "read_keeps_chunk",
        "a fetched read holds its chunks for ever",
        "budget_charged_once",
        f.ReadKeepsChunk,
        cases=("E35",),
    ),
    Mutant(
        "wake_before_record",
        "waiters wake before the failure is recorded",
        "failure_is_loud_and_sticky",
        driver=f.WakeBeforeRecord,
        cases=("E31",),
    ),
    Mutant(
        "failure_swallowed",
        "a failed write leaves no record",
        "failure_is_loud_and_sticky",
        f.FailureSwallowed,
        cases=("E31",),
    ),
    Mutant(
        "failure_forgotten",
        "the next step starts as if nothing had failed",
        "failure_is_loud_and_sticky",
        f.FailureForgotten,
        cases=("E31",),
    ),
    Mutant(
        "unknown_finish_raises",
        "a finished id never seen is an error",
        "abort_still_lands",
        f.UnknownFinishRaises,
        cases=("E29",),
    ),
    Mutant(
        "finish_leaves_bookkeeping",
        "the watermark of a finished request stays",
        "span_owed_until_emitted",
        f.FinishLeavesBookkeeping,
        cases=("E35",),
    ),
)
"""Every seeded fault."""

NOT_EXPRESSIBLE = {
    "E03": "the model resolves slot by slot and has no notion of a writer's whole prefix; tested by a scenario",
    "E07": "whether a tensor has a row a token is decided before the machine sees rows",
    "E10": "refused at the gate",
    "E11": "a wrong width is refused before any action; random traces ask for it, a mutant would be the missing check",
    "E15": "binding a plan to a staged page does not exist here: a plan names the pool row and its writer",
    "E17": "concerns what is done under a lock; the model has actions, not locks",
    "E23": "a missing block table is refused before any action; random traces ask for it",
    "E25": "a prompt replaced under a live id cannot be told from a continuation by what the scheduler says",
    "E36": "garbage collection",
    "E37": "counts copies, which the model does not make",
    "E38": "page sizes: refused before any action; tested by a scenario",
    "E39": "footprints",
    "E40": "pinned memory",
    "E42": "identity of content is the engine's; traces have salts, so that equal tokens may be different content",
    "E43": "refused at the gate",
    "E44": "counters",
    "E45": "recovery at the lowest key is the consumer's; rows of each key are handed over with their positions",
    "E46": "rows that a model emits before they are valid; the cache hands over what was emitted last",
    "E47": "another table, with the same rules",
    "E48": "phases of a prefill; random traces have chunks of one token",
    "D2": "feature dimensions",
    "D3": "a key first seen in the step of a hit reads zeros, by the same rule as any hole",
    "D4": "retry after a failing consumer is the caller's; a step is consumed once",
}
"""Reported faults that no mutant of the model stands for, with the reason."""
