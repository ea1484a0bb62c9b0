"""Calls that overlap are judged by when they began."""

from __future__ import annotations

from conformance.drivers.overlap import OverlappingJudge
from conformance.schedules.driver import Outcome
from conformance.schedules.trace import CLOSED, CONTRACT, WRITE, Discard, Fail, Shutdown, Start

OK, FAILED, REFUSED = Outcome(), Outcome(error=WRITE), Outcome(error=CONTRACT)
CALL = Discard(label=0)


def test_a_failure_is_no_excuse_before_a_write_was_made_to_fail() -> None:
    """Nothing may raise a write's error, unless the trace says that one fails."""
    judge = OverlappingJudge()
    assert judge.judge(0, CALL, FAILED, told_before=judge.begin()) is not None


def test_a_failure_is_sticky_for_whatever_begins_later() -> None:
    """A call that was under way may answer; one that begins afterwards raises what was told, even where it is wrong."""
    judge = OverlappingJudge()
    assert judge.judge(0, Fail(stage="copy"), OK, told_before=judge.begin()) is None
    under_way = judge.begin()
    assert judge.judge(1, CALL, FAILED, told_before=judge.begin()) is None
    assert judge.judge(2, CALL, OK, told_before=under_way) is None
    assert judge.judge(3, CALL, OK, told_before=judge.begin()) is not None
    assert judge.judge(4, Discard(label=0, error=CONTRACT), REFUSED, told_before=judge.begin()) is not None
    assert judge.judge(5, CALL, FAILED, told_before=judge.begin()) is None


def test_a_refusal_is_due_or_wrong() -> None:
    """Without a failure an outcome is the one due, whatever overlaps."""
    judge = OverlappingJudge()
    assert judge.judge(0, Discard(label=0, error=CONTRACT), REFUSED, told_before=judge.begin()) is None
    assert judge.judge(1, CALL, REFUSED, told_before=judge.begin()) is not None
    assert judge.judge(2, Start(error=CONTRACT), OK, told_before=judge.begin()) is not None


def test_a_shutdown_closes_for_whatever_was_posted_before() -> None:
    """A call of an earlier event finds the cache open or closed; a later one finds it closed."""
    judge = OverlappingJudge()
    closed = Outcome(error=CLOSED)
    assert judge.judge(3, CALL, closed, told_before=judge.begin()) is not None
    judge.shuts_down(5)
    assert judge.judge(5, Shutdown(), OK, told_before=judge.begin()) is None
    assert judge.judge(4, CALL, closed, told_before=judge.begin()) is None
    assert judge.judge(2, CALL, OK, told_before=judge.begin()) is None
    assert judge.judge(6, CALL, closed, told_before=judge.begin()) is not None
    assert judge.judge(7, Discard(label=0, error=CLOSED), closed, told_before=judge.begin()) is None
