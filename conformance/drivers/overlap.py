"""Judges outcomes of calls that overlap."""

from __future__ import annotations

from conformance.schedules.driver import INJECTED, Outcome
from conformance.schedules.replay import Judge
from conformance.schedules.trace import CLOSED, WRITE, Discard, Event, Fail, Materialize, Shutdown


class OverlappingJudge:
    """As `Judge`, for calls on several threads: a failure is sticky for whatever begins after it was told.

    A call that was under way when another one told of the failure may still answer rightly. One that was posted before
    a shutdown began may find the cache open or closed.
    """

    def __init__(self) -> None:
        self.may_fail = False
        """Whether a write was made to fail."""
        self._told = False
        self._closes_at: int | None = None

    def shuts_down(self, index: int) -> None:
        """The trace's event of that index, a shutdown, begins."""
        if self._closes_at is None:
            self._closes_at = index

    def begin(self) -> bool:
        """A call begins; whether a failure was told before. To be given to `judge`."""
        return self._told

    def judge(self, index: int, event: Event, outcome: Outcome, *, told_before: bool) -> str | None:
        """What is wrong with what the call came to, or None."""
        if isinstance(event, Fail):
            self.may_fail = True
        if isinstance(event, Shutdown):
            self._told = False
        elif self.may_fail and outcome.error == WRITE:
            self._told = self._closes_at is None
            return None
        consumed = outcome.error == INJECTED and self.may_fail and isinstance(event, (Materialize, Discard))
        posted_before = outcome.error == CLOSED and self._closes_at is not None and index < self._closes_at
        if consumed or posted_before:
            return None
        if told_before and self._told and not _answers_always(event):
            return f"expected {WRITE}, which another call had told of before, found {outcome.error or 'no error'}"
        mismatch = Judge().judge(index, event, outcome)
        return None if mismatch is None else f"expected {mismatch.expected}, found {mismatch.found}"


def _answers_always(event: Event) -> bool:
    """Whether an event is no call of the cache's contract, or one that answers after a failure, too."""
    return event.event in {"fail", "rest", "shutdown", "unsaved"}
