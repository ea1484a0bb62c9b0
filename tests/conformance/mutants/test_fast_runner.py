"""The hunt on the production package: what is sound is not caught, what is faulty is, and each catch replays."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from conformance.mutants.fast_edit import FastMutant
from conformance.mutants.fast_runner import hunt, report, run_once
from conformance.mutants.fast_table import FAST_MUTANTS

SOUND = {name: FastMutant("none", "nothing is broken", "none", (), name) for name in ("fast-eager", "fast-async")}
SOON = 40
"""Traces within which a fault that is not rare is caught."""
RARE = {
    "log_pointer_survives_claim",
    "old_owner_writes",
    "kept_rows_shifted",
    "no_preserve",
    "preserve_only_committed",
    "resolve_deferred_at_fetch",
    "plan_at_materialize",
    "refused_start_keeps_pins",
    "resume_off_by_one",
    "partial_block_dropped",
    "failure_swallowed",
    "failed_write_commits",
    "failed_read_keeps_pins",
    "block_gather_of_parts",
    "write_does_not_hold_page",
    "page_freed_at_materialize",
    "stale_generation_kept",
    "unplanned_read_delivered",
    "fetch_unpins_first",
    "waits_for_oldest_write",
    "wake_before_record",
    "pop_outside_section",
    "failure_keeps_queue",
    "shutdown_leaves_waiter",
    "prefetch_dies_of_failure",
    "let_go_without_lock",
    "short_table_taken",
}
"""Faults that take dozens of traces or more: `make mutants` hunts for them, five seeds each."""
COMMON = [mutant for mutant in FAST_MUTANTS if mutant.name not in RARE]


@pytest.mark.parametrize("name", SOUND)
def test_the_sound_package_is_not_caught(name: str) -> None:
    """On the traces that catch the faults, nothing fails."""
    for seed in range(SOON):
        assert run_once(SOUND[name], seed).failure is None


@pytest.mark.parametrize("mutant", COMMON, ids=lambda mutant: mutant.name)
def test_a_fault_is_caught_and_the_catch_replays(mutant: FastMutant) -> None:
    """Within a few traces; the trace's seed gives the same failure again, though nothing stayed changed meanwhile."""
    caught = hunt(mutant, 0, limit=SOON)
    assert caught is not None
    assert run_once(SOUND[mutant.subject], caught.trace_seed).failure is None
    assert run_once(mutant, caught.trace_seed).failure == caught.failure


def test_rare_faults_are_faults() -> None:
    """No name is left over from a fault that is gone."""
    assert {mutant.name for mutant in FAST_MUTANTS} >= RARE
    assert len(RARE) < len(FAST_MUTANTS) / 3


def test_survivors_are_told() -> None:
    """A fault that is not caught makes the report fail, by name."""
    console = Console(record=True, width=160, file=io.StringIO())
    assert not report(console, [SOUND["fast-eager"]], limit=1)
    assert "not caught within 1 traces: none" in console.export_text()


def test_the_report_tells_the_median() -> None:
    """One line a fault: traces until caught for each seed, and their median."""
    console = Console(record=True, width=200, file=io.StringIO())
    first = next(mutant for mutant in FAST_MUTANTS if mutant.name == "skip_version_bump")
    assert report(console, [first], limit=20)
    assert "all 1 caught, 5 seeds of 5" in console.export_text()
