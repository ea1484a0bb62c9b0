"""Locks, conditions, events and threads of a serial run. Made by `SerialRuntime`, which says where their points are."""

from __future__ import annotations

from types import TracebackType

from conformance.interleave.baton import Baton
from conformance.interleave.tasks import DeadlockError, Task


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
