"""The hunt: what is sound is not caught, what is faulty is, and each catch replays from its seed alone."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from conformance.mutants.runner import hunt, report, run_once
from conformance.mutants.table import MUTANTS, Mutant
from conformance.schedules import generate

SOUND = Mutant("none", "nothing is broken", "none")
RARE = {
    "partial_block_dropped",
    "preserve_only_committed",
    "reservation_leaks",
    "resolve_deferred_at_fetch",
    "resume_gap_not_marked",
    "unsaved_step_keeps_rows",
    "new_before_finished",
}
"""Faults that take dozens of traces or more: `make mutants` hunts for them, five seeds each."""


def test_the_sound_model_is_not_caught() -> None:
    """No rule and no outcome speaks up on the traces that catch the faults."""
    for seed in range(30):
        for lag in (None, seed):
            assert run_once(SOUND, generate(seed).trace, lag=lag, checked=True) is None


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name not in RARE], ids=lambda m: m.name)
def test_a_fault_is_caught_and_the_catch_replays(mutant: Mutant) -> None:
    """Within 40 traces; the trace's seed, and how its threads lagged, give the same catch again."""
    caught = hunt(mutant, 0, checked=True, limit=40)
    assert caught is not None
    lag = caught.trace_seed if caught.lagging else None
    assert run_once(mutant, generate(caught.trace_seed).trace, lag=lag, checked=True) == caught.by


def test_survivors_are_told() -> None:
    """A fault that is not caught makes the report fail, by name."""
    console = Console(record=True, width=160, file=io.StringIO())
    assert not report(console, [SOUND], limit=1)
    assert "not caught within 1 traces: none" in console.export_text()
