"""The rules of an interleaved run see what breaks them."""

from __future__ import annotations

import pytest

from conformance.drivers.asynchronous import AsynchronousFast
from conformance.drivers.rules import OneWriter, UnderLock
from conformance.mutants.fast_edit import Edit, FastMutant
from conformance.schedules import generate
from omni_prefix_fast.machine import PrefixCacheMachine


def test_one_write_after_another_is_one_writer() -> None:
    """Written or failed, the next may be claimed; failing what is queued is none of it."""
    rule = OneWriter()
    for action, task in (
        ("claim_copy", 1),
        ("fail_task", 2),
        ("write_pool", 1),
        ("claim_copy", 3),
        ("fail_task", 3),
        ("claim_copy", 4),
    ):
        rule.see(action, {"task": task})
    rule.see("open_step", {"step": 1})
    assert rule.broken is None


def test_two_writers_are_seen() -> None:
    """A write that is claimed before the one at hand is written or failed; the first such pair is told."""
    rule = OneWriter()
    for task in (1, 2, 3):
        rule.see("claim_copy", {"task": task})
    assert rule.broken == "write 2 is claimed while write 1 is being written"


@pytest.mark.parametrize(
    ("action", "what"),
    [
        ("finish_request", "requests.finish"),
        ("start_request", "requests.start"),
        ("plan_reads", "table.pin"),
        ("unplan_reads", "table.stamp"),
        ("publish", "table.open_key"),
        ("take_step", "steps.take"),
        ("let_go", "table.unpin"),
        ("reserve_budget", "budget.reserve"),
        ("cancel", "budget.release"),
        ("clear", "steps.clear"),
    ],
)
def test_a_lock_that_is_left_out_is_seen(action: str, what: str) -> None:
    """Code between two points is atomic, lock or not: that a table is touched without the lock is told all the same."""
    unlocked = FastMutant(
        "unlocked", "", "", (Edit(PrefixCacheMachine, action, "with self.lock, self.held:", "if True:"),)
    )
    subject = AsynchronousFast()
    with unlocked.applied():
        failures = (subject.run(generate(seed).trace, seed=seed).failure for seed in range(60))
        first = next(failure for failure in failures if failure is not None)
    assert first.kind == "rule"
    assert first.what == f"{what} is called without the lock {UnderLock.LOCK!r}"
