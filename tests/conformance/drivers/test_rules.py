"""The rules of an interleaved run see what breaks them."""

from __future__ import annotations

from conformance.drivers.rules import OneWriter


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
