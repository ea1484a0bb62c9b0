"""`SerialRuntime`: locks, conditions, events, threads and the clock of a run that one baton goes through.

Points stand before an acquire, a wait and a join, and behind a release, a set, a look at an event and a start of a
thread. Code between two points is atomic; `point` adds more of them by hand, and `trace_lines` one a line. A *coarse*
runtime has no points behind anything: as good where code between two operations touches nothing that is shared, and
cheaper to search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from conformance.interleave.baton import Baton
from conformance.interleave.primitives import SerialCondition, SerialEvent, SerialLock, SerialThread
from conformance.interleave.strategies import Strategy
from omni_prefix_fast import runtime as fast_runtime

POINTS = 200_000
"""Points that a run may have."""


class SerialRuntime:
    """A `Runtime` for one run of one program.

    Args:
        strategy: decides who goes on.
        limit: points that the run may have.
        quiet: names of locks and conditions whose acquire and release are no points: those that guard a few lines
            without a point in them.
        first: name of the thread that runs the program.
        coarse: see the module.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        limit: int = POINTS,
        quiet: Collection[str] = (),
        first: str = "engine",
        coarse: bool = False,
    ) -> None:
        self.baton = Baton(strategy, limit=limit, first=first)
        self.baton.behind = _no_point if coarse else self.baton.point
        self.past = 0
        """Of the explicit points: they are in one order."""
        self.prunes = False
        """Whether the search leaves out what differs in the order of independent operations only."""
        self._quiet = frozenset(quiet)
        self._jumped = 0.0

    def point(self, _name: str = "") -> None:
        """Here another thread may go on. On the running thread."""
        baton = self.baton
        if baton.keeps_pasts:
            baton.touch(self)
        baton.point()

    @property
    def explored(self) -> bool:
        """Whether an exhaustive search tries other interleavings here. A program may say so, part by part."""
        return self.baton.explored

    @explored.setter
    def explored(self, explored: bool) -> None:
        self.baton.explored = explored
        self.baton.keeps_pasts = explored and self.prunes

    @property
    def points(self) -> int:
        """Points so far."""
        return self.baton.points

    @property
    def switches(self) -> list[tuple[int, str]]:
        """What a `Replay` does to run the same."""
        return list(self.baton.switches)

    @property
    def thread(self) -> str:
        """Name of the thread that runs."""
        return self.baton.running.name

    def run(self, program: Callable[[], None]) -> None:
        """Run the program on the calling thread, and see its threads end. See `Baton.run`."""
        self.baton.run(program)

    def trace_lines(self, modules: Collection[str]) -> None:
        """From now on each line of these modules is a point, on every thread started later and on this one."""
        names = frozenset(modules)

        def of_frame(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_globals.get("__name__") not in names:
                return None
            if event == "line":
                self.baton.point()
            return of_frame

        self.baton.tracer = of_frame
        sys.settrace(of_frame)

    # ------------------------------------------------------------------------- what the code under test calls

    def monotonic(self) -> float:
        """Seconds of the virtual clock, and what it has jumped."""
        return self.baton.now + self._jumped

    def jump(self, seconds: float) -> None:
        """The clock moves on, though nobody waited. Whoever waits goes on waiting as long as before."""
        self._jumped += seconds

    def lock(self, name: str) -> fast_runtime.Lock:
        """See `Runtime`."""
        return SerialLock(self.baton, name, quiet=name in self._quiet)

    def condition(self, name: str) -> fast_runtime.Condition:
        """See `Runtime`."""
        return SerialCondition(self.baton, name, quiet=name in self._quiet)

    def event(self, name: str) -> fast_runtime.Event:
        """See `Runtime`."""
        return SerialEvent(self.baton, name)

    def spawn(self, name: str, target: Callable[[], None]) -> fast_runtime.Thread:
        """See `Runtime`."""
        thread = SerialThread(self.baton, self.baton.start(name, target))
        self.baton.behind()
        return thread


def _no_point() -> None:
    """Nobody else goes on here."""
