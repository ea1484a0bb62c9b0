"""One baton among real threads: exactly one thread runs at any time, and who is next is a strategy's choice.

Only who has the baton touches anything here, so nothing here is locked. Handing it over is one raw lock released and
another one awaited; going on costs a comparison. The clock is virtual: it moves only when nobody can go on and somebody
waits with a limit, and then to the earliest limit. Nothing hangs: a run in which nobody can ever go on, or that has too
many points, ends with an error that tells what each thread does, and every thread is unwound and ended.
"""

from __future__ import annotations

import sys
import threading
from bisect import insort
from collections.abc import Callable
from typing import Any, NoReturn

from conformance.interleave.report import told
from conformance.interleave.strategies import Strategy
from conformance.interleave.tasks import (
    Awaited,
    CrashError,
    DeadlockError,
    EndlessError,
    LeftBehindError,
    RunError,
    Task,
    Touched,
    Unwind,
)

IDLE_LIMIT = 20
"""Times that the clock may move, with nobody woken by anybody, before a wait without a limit counts as endless."""
LOOK_UP_S = 0.5
"""Real seconds after which a parked main thread takes note of an interrupt, at the latest."""
PATIENCE_S = 20.0
"""Real seconds that a thread may take to come to its next point, once the run is over."""


class Baton:
    """The threads of one run. The thread that makes it is the first of them."""

    def __init__(self, strategy: Strategy, *, limit: int, first: str) -> None:
        self.points = 0
        """Points so far."""
        self.now = 0.0
        self.switches: list[tuple[int, str]] = []
        """Where somebody went on who would not have done so by himself: `Interleaving.switches`."""
        self.preemptions = 0
        self.behind: Callable[[], None] = self.point
        """Called behind operations that others can see."""
        self.explored = True
        """See `SerialRuntime.explored`."""
        self.keeps_pasts = False
        """Whether operations are noted, for `past`. Needed only where something is explored."""
        self.over: BaseException | None = None
        """Why the run has to end."""
        self.on_turn: Callable[[str, Task], None] | None = None
        """Called as a thread stops to wait ("block") and as it goes on behind another one ("run")."""
        self.tracer: Callable[..., Any] | None = None
        """`sys.settrace`'s, for each thread that is started."""
        self._strategy = strategy
        self._limit = limit
        self._idle = 0
        self._main = Task(0, first)
        self._main.ident = threading.get_ident()
        self.tasks = [self._main]
        self._ready = [self._main]
        self.running = self._main
        self._look = 0

    # ------------------------------------------------------------------------- points

    def point(self, _what: str = "") -> None:
        """The running thread comes to a point: here another one may go on."""
        number = self.points
        self.points = number + 1
        if number >= self._look:
            self._consider(number)

    def _consider(self, number: int) -> None:
        if self.over is not None:
            raise Unwind
        if number >= self._limit:
            self.fail(EndlessError(f"more than {self._limit} points: does somebody spin?\n{self.report()}"))
        chosen = running = self.running
        if len(self._ready) > 1:
            chosen = self._chosen(number, running)
        self._look = min(self._limit, self._strategy.next_look(number + 1))
        if chosen is not running:
            self.preemptions += 1
            self.switches.append((number, chosen.name))
            self._hand_over(chosen)

    def _chosen(self, number: int, running: Task | None) -> Task:
        names = [task.name for task in self._ready]
        name = self._strategy.choose(number, None if running is None else running.name, names)
        return self._ready[names.index(name)]

    def _hand_over(self, to: Task) -> None:
        me = self.running
        self.running = to
        to.gate.release()
        # The main thread looks up now and then: an interrupt that comes just before a wait does not end the wait.
        while not me.gate.acquire(timeout=LOOK_UP_S if me is self._main else -1):
            pass
        if self.over is not None:
            raise Unwind
        if self.on_turn is not None:
            self.on_turn("run", me)

    # ------------------------------------------------------------------------- what happened before

    def touch(self, touched: Touched) -> None:
        """The running thread does something to a thing that others can see: it comes behind all that they did to it."""
        me = self.running
        me.past = touched.past = hash((me.past, touched.past, me.index))

    @property
    def past(self) -> int:
        """Which operations happened, and which of them before which others, as a hash.

        Two runs that come to the same one differ in the order of operations on different things only.
        """
        return hash((self.now, *(task.past for task in self.tasks)))

    # ------------------------------------------------------------------------- waiting

    def block(self, awaited: Awaited, limit_s: float | None) -> bool:
        """The running thread waits, until `make_ready`; False if the limit passed first."""
        if self.over is not None:
            raise Unwind
        me = self.running
        number = self.points
        self.points = number + 1
        me.waits = awaited
        me.limit = None if limit_s is None else self.now + limit_s
        if self.keeps_pasts:
            self.touch(awaited)
        awaited.waiters.append(me)
        me.ready = False
        self._ready.remove(me)
        if self.on_turn is not None:
            self.on_turn("block", me)
        try:
            to = self._next(number)
            if to is not me:
                self._hand_over(to)
        finally:
            me.waits.waiters.remove(me)
            me.waits, me.limit = None, None
            timed_out, me.timed_out = me.timed_out, False
        if self.keeps_pasts:
            self.touch(awaited)
        return not timed_out

    def make_ready(self, task: Task) -> None:
        """A thread that waits can go on."""
        if not task.ready:
            task.ready = True
            insort(self._ready, task)
            self._idle = 0
            if self._strategy.looks_at_wakes and self.over is None:
                self._look = min(self._look, self.points)

    def make_unready(self, task: Task) -> None:
        """A thread that could have gone on cannot any more: somebody was faster."""
        if task.ready and not task.timed_out:
            task.ready = False
            self._ready.remove(task)

    def _next(self, number: int) -> Task:
        """Who goes on where the running thread stops."""
        if number >= self._limit:
            self.fail(EndlessError(f"more than {self._limit} points: does somebody spin?\n{self.report()}"))
        while not self._ready:
            self._let_time_pass()
        if len(self._ready) == 1:
            return self._ready[0]
        chosen = self._chosen(number, None)
        if chosen is not self._ready[0]:
            self.switches.append((number, chosen.name))
        return chosen

    def _let_time_pass(self) -> None:
        blocked = [task for task in self.tasks if not task.done]
        limits = [task.limit for task in blocked if task.limit is not None]
        self._idle += 1
        if not limits or (self._idle > IDLE_LIMIT and len(limits) < len(blocked)):
            self.fail(DeadlockError(f"nobody can ever go on\n{self.report()}"))
        self.now = min(limits)
        for task in blocked:
            if task.limit is not None and task.limit <= self.now:
                task.timed_out = task.ready = True
                insort(self._ready, task)
        if self._strategy.looks_at_wakes:
            self._look = min(self._look, self.points)

    # ------------------------------------------------------------------------- threads

    def start(self, name: str, target: Callable[[], None]) -> Task:
        """Start a thread. It is ready, and does not run before it is chosen."""
        if self.over is not None:
            raise Unwind
        same = sum(task.name.split(" #")[0] == name for task in self.tasks)
        task = Task(len(self.tasks), f"{name} #{same + 1}" if same else name)
        if self.keeps_pasts:
            self.touch(task)
        self.tasks.append(task)
        insort(self._ready, task)
        if self._strategy.looks_at_wakes:
            self._look = min(self._look, self.points)
        threading.Thread(target=self._work, args=(task, target), name=f"serial {task.name}", daemon=True).start()
        return task

    def _work(self, task: Task, target: Callable[[], None]) -> None:
        task.gate.acquire()
        task.ident = threading.get_ident()
        try:
            if self.over is None:
                if self.tracer is not None:
                    sys.settrace(self.tracer)
                target()
        except Unwind:
            pass
        except BaseException as error:  # noqa: BLE001 - told by `run`, on the thread that runs the program
            if self.over is None:
                self._stop(CrashError(f"thread {task.name!r} raised {type(error).__name__}: {error}"), error)
        finally:
            sys.settrace(None)
            self._ended(task)

    def _ended(self, task: Task) -> None:
        task.done = True
        task.ready = False
        if self.keeps_pasts:
            task.past = hash((task.past, "ended"))
        self._ready.remove(task) if task in self._ready else None
        for waiter in list(task.waiters):
            self.make_ready(waiter)
        to = self._main
        if self.over is None:
            number = self.points
            self.points = number + 1
            try:
                to = self._next(number)
            except Unwind:
                to = self._main
        self.running = to
        to.gate.release()

    # ------------------------------------------------------------------------- the end

    def fail(self, error: BaseException) -> NoReturn:
        """The run is over; the calling thread is unwound, the others are as they come to a point."""
        self._stop(error)
        raise Unwind

    def _stop(self, error: BaseException, cause: BaseException | None = None) -> None:
        if self.over is None:
            error.__cause__ = cause
            self.over = error
        self._look = -1

    def run(self, program: Callable[[], None]) -> None:
        """Run a program on the calling thread, and see every thread of it end.

        Raises:
            RunError: see its kinds.
            BaseException: what the program raised; every thread is ended then, too.
        """
        try:
            program()
            self._see_all_end()
        except Unwind:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again below, once all threads have ended
            self._stop(error)
        if self.over is not None:
            over = self.over
            self._unwind_all()
            raise over

    def _see_all_end(self) -> None:
        for task in self.tasks[1:]:
            try:
                while not task.done:
                    self.block(task, None)
            except Unwind:
                if isinstance(self.over, DeadlockError):
                    self.over = LeftBehindError(f"thread {task.name!r} never ends\n{self.over}")
                raise

    def _unwind_all(self) -> None:
        # An interrupt comes while another thread runs: that one is unwound at its next point, and hands over to here.
        if self.running is not self._main and not self._main.gate.acquire(timeout=PATIENCE_S):
            raise self._stuck(self.running) from self.over
        for task in self.tasks[1:]:
            if not task.done:
                self.running = task
                task.gate.release()
                if not self._main.gate.acquire(timeout=PATIENCE_S):
                    raise self._stuck(task) from self.over
        self.running = self._main

    def _stuck(self, task: Task) -> RunError:
        return EndlessError(f"thread {task.name!r} comes to no point in {PATIENCE_S:g} s\n{self.report()}")

    def report(self) -> str:
        """What each thread that has not ended does: what it holds, what it waits for, where it stands."""
        return told(self.tasks, self.running)
