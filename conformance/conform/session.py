"""A session: traces run by a crew, until the budget is spent or enough has failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conformance.conform import checkpoint
from conformance.conform.coverage import Coverage
from conformance.conform.plan import Part, Plan
from conformance.conform.workers import Crew
from conformance.mutants.runner import STRIDE

ENOUGH = 10
"""Failures at which a session ends: they tell little more than the first ones."""
SAVE_S = 5.0
"""Seconds between two checkpoints."""


@dataclass(frozen=True)
class Budget:
    """Traces, or seconds, or both: whichever is spent first."""

    traces: int | None
    seconds: float | None = None

    @property
    def last(self) -> int:
        """One behind the last trace."""
        return STRIDE if self.traces is None else self.traces


@dataclass
class Session:
    """What was done so far, whole parts only; `interrupted` if somebody ended it early."""

    plan: Plan
    done: Part
    interrupted: bool = False
    unsaved: OSError | None = None
    """Why the newest checkpoint is not the newest state: the disk is full, say."""

    @classmethod
    def begin(cls, plan: Plan, path: Path | None) -> Session:
        """A new session, or the one that a checkpoint was left of. Raises `ValueError` if it was another's."""
        if path is not None and path.exists():
            return cls(plan, checkpoint.load(path, plan))
        return cls(plan, Part(0, 0, Coverage(), []))

    def run(
        self, budget: Budget, workers: int, path: Path | None = None, tell: Callable[[Part], None] | None = None
    ) -> None:
        """Run until the budget is spent, `ENOUGH` failed, or Ctrl-C. `tell` is called after each part.

        The checkpoint at `path` is written every few seconds, and at the end, however it ends. Main thread.

        Raises:
            OSError: the checkpoint cannot be written; nothing was run. Later on that only makes it an older one.
        """
        if path is not None:
            checkpoint.save(path, self.plan, self.done)
        # Ctrl-C is taken note of, and looked at between two parts: never in the middle of adding one up.
        before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._run(budget, workers, path, tell)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._save(path)

    def _save(self, path: Path | None) -> None:
        if path is None:
            return
        try:
            checkpoint.save(path, self.plan, self.done)
            self.unsaved = None
        except OSError as error:
            self.unsaved = error

    def _interrupt(self, *_: object) -> None:
        self.interrupted = True

    def _run(self, budget: Budget, workers: int, path: Path | None, tell: Callable[[Part], None] | None) -> None:
        begin = saved = time.monotonic()
        if self.done.last >= budget.last or len(self.done.found) >= ENOUGH:
            return
        with Crew(self.plan, workers) as crew:
            for part in crew.parts(self.done.last, budget.last):
                now = time.monotonic()
                if part is not None:
                    self.done.merge(part)
                    if tell is not None:
                        tell(self.done)
                    if now - saved > SAVE_S:
                        self._save(path)
                        saved = now
                if (
                    self.interrupted
                    or len(self.done.found) >= ENOUGH
                    or (budget.seconds is not None and now - begin > budget.seconds)
                ):
                    return
