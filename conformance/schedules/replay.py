"""Replay a trace against a driver, and compare each outcome with the one due."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.schedules.driver import INJECTED, Driver, Outcome
from conformance.schedules.trace import WRITE, Discard, Event, Fail, Materialize, Rest, Shutdown, Trace, Unsaved


@dataclass(frozen=True)
class Mismatch:
    """The first event of a trace that came to something else than was due."""

    index: int
    event: Event
    expected: str
    found: str

    def __str__(self) -> str:
        return f"event {self.index} ({self.event.event}): expected {self.expected}, found {self.found}"


class Judge:
    """Tells, event by event, whether an outcome is the one due. Knows that a failure may surface late but is sticky."""

    def __init__(self) -> None:
        self._may_fail = False
        self._failed = False

    def judge(self, index: int, event: Event, outcome: Outcome) -> Mismatch | None:
        """The mismatch, or None."""
        if isinstance(event, Fail):
            self._may_fail = True
        if isinstance(event, (Fail, Rest, Shutdown, Unsaved)):
            expected, due = None, None
            self._failed = self._failed and not isinstance(event, Shutdown)
        elif outcome.error == INJECTED and self._may_fail and not self._failed:
            # The failure came out of a call that had consumed its step by then.
            expected, due = (INJECTED if isinstance(event, (Materialize, Discard)) else None), None
        else:
            due = event.due if isinstance(event, Materialize) else None
            expected = event.error
            if self._failed or (self._may_fail and outcome.error == WRITE):
                self._failed, expected, due = True, WRITE, None
        if outcome.error != expected:
            found = "no error" if outcome.error is None else f"{outcome.error}: {outcome.detail}"
            return Mismatch(index, event, expected or "no error", found)
        if outcome.due != due:
            return Mismatch(index, event, str(due), str(outcome.due))
        return None


def replay(trace: Trace, driver: Driver) -> Mismatch | None:
    """Apply every event up to the first that comes to something else than was due."""
    judge = Judge()
    for index, event in enumerate(trace.events):
        mismatch = judge.judge(index, event, driver.apply(event))
        if mismatch is not None:
            return mismatch
    return None
