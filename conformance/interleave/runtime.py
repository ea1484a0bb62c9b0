"""`SerialRuntime`: locks, conditions, events, threads and the clock of a run that one baton goes through.

Points stand before an acquire, a wait and a join, and behind a release, a set, a look at an event and a start of a
thread. Code between two points is atomic; `point` adds more of them by hand, and `trace_lines` one a line. A *coarse*
runtime has no points behind anything: as good where code between two operations touches nothing that is shared, and
cheaper to search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType, TracebackType
from typing import Any

from conformance.interleave.baton import Baton, DeadlockError, Task
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
        """Seconds of the virtual clock."""
        return self.baton.now

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


class SerialLock:
    """Not re-entrant. Who waits for it can go on as soon as it is free; who is chosen first has it."""

    __slots__ = ("_baton", "_quiet", "name", "owner", "past", "waiters")

    def __init__(self, baton: Baton, name: str, *, quiet: bool = False) -> None:
        self._baton = baton
        self._quiet = quiet
        self.name = name
        self.owner: Task | None = None
        self.waiters: list[Task] = []
        self.past = 0

    def told(self) -> str:
        """See `Awaited`."""
        return f"lock {self.name!r}, which {self.owner.name if self.owner else 'nobody'!r} holds"

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        baton = self._baton
        if not self._quiet:
            baton.point()
        if self.owner is None:
            self._take()
            return True
        return blocking and timeout != 0 and self._wait(None if timeout < 0 else timeout)

    def _wait(self, limit_s: float | None) -> bool:
        baton = self._baton
        if self.owner is baton.running and limit_s is None:
            twice = f"thread {baton.running.name!r} takes lock {self.name!r} twice"
            baton.fail(DeadlockError(f"{twice}\n{baton.report()}"))
        while self.owner is not None:
            if not baton.block(self, limit_s) and self.owner is not None:
                return False
        self._take()
        return True

    def _take(self) -> None:
        self.owner = running = self._baton.running
        if self._baton.keeps_pasts:
            self._baton.touch(self)
        if not self._quiet:
            running.holds.append(self.name)
        for waiter in self.waiters:
            self._baton.make_unready(waiter)

    def release(self) -> None:
        baton = self._baton
        self._free()
        if not self._quiet:
            baton.behind()

    def _free(self) -> None:
        baton = self._baton
        if self.owner is not baton.running:
            if baton.over is not None:  # a wait was broken off
                return
            raise RuntimeError(f"thread {baton.running.name!r} releases lock {self.name!r}, which it does not hold")
        if baton.keeps_pasts:
            baton.touch(self)
        if not self._quiet:
            self.owner.holds.remove(self.name)
        self.owner = None
        for waiter in self.waiters:
            baton.make_ready(waiter)

    def __enter__(self) -> bool:
        if self._quiet and self.owner is None and not self.waiters:  # the common case, and the cheap one
            self.owner = self._baton.running
            if self._baton.keeps_pasts:
                self._baton.touch(self)
            return True
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        if self._quiet and not self.waiters:
            self.owner = None
        else:
            self.release()


class _Signal:
    """What waiters of a condition wait for, before they wait for its lock."""

    __slots__ = ("name", "past", "waiters")

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiters: list[Task] = []
        self.past = 0

    def told(self) -> str:
        """See `Awaited`."""
        return f"condition {self.name!r} to be notified"


class SerialCondition(SerialLock):
    """A condition variable, with its lock."""

    __slots__ = ("_signal",)

    def __init__(self, baton: Baton, name: str, *, quiet: bool = False) -> None:
        super().__init__(baton, name, quiet=quiet)
        self._signal = _Signal(name)

    def wait(self, timeout: float | None = None) -> bool:
        baton = self._baton
        if self.owner is not baton.running:
            raise RuntimeError(f"thread {baton.running.name!r} waits on {self.name!r} without its lock")
        self._free()
        if timeout is not None and timeout <= 0:
            baton.point()
            notified = False
        else:
            notified = baton.block(self._signal, timeout)
        self._wait(None)
        return notified

    def notify_all(self) -> None:
        baton = self._baton
        if self.owner is not baton.running:
            if baton.over is not None:
                return
            raise RuntimeError(f"thread {baton.running.name!r} notifies {self.name!r} without its lock")
        if baton.keeps_pasts:
            baton.touch(self._signal)
        for waiter in self._signal.waiters:
            # It needs the lock next, and can go on once that is free.
            waiter.waits, waiter.limit = self, None
            self.waiters.append(waiter)
        self._signal.waiters.clear()


class SerialEvent:
    """A flag that is set once."""

    __slots__ = ("_baton", "_set", "name", "past", "waiters")

    def __init__(self, baton: Baton, name: str) -> None:
        self._baton = baton
        self._set = False
        self.name = name
        self.waiters: list[Task] = []
        self.past = 0

    def told(self) -> str:
        """See `Awaited`."""
        return f"event {self.name!r} to be set"

    def set(self) -> None:
        if self._baton.keeps_pasts:
            self._baton.touch(self)
        self._set = True
        for waiter in self.waiters:
            self._baton.make_ready(waiter)
        self._baton.behind()

    def is_set(self) -> bool:
        if self._baton.keeps_pasts:
            self._baton.touch(self)
        found = self._set
        self._baton.behind()
        return found

    def wait(self, timeout: float | None = None) -> bool:
        self._baton.point()
        if self._baton.keeps_pasts:
            self._baton.touch(self)
        if not self._set and (timeout is None or timeout > 0):
            self._baton.block(self, timeout)
        return self._set


class SerialThread:
    """A thread of the run."""

    __slots__ = ("_baton", "_task")

    def __init__(self, baton: Baton, task: Task) -> None:
        self._baton = baton
        self._task = task

    def join(self, timeout: float | None = None) -> None:
        self._baton.point()
        if self._baton.keeps_pasts:
            self._baton.touch(self._task)
        if not self._task.done and (timeout is None or timeout > 0):
            self._baton.block(self._task, timeout)

    def is_alive(self) -> bool:
        if self._baton.keeps_pasts:
            self._baton.touch(self._task)
        alive = not self._task.done
        self._baton.behind()
        return alive
