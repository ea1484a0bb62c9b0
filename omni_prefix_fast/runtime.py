"""Locks, events and the clock, behind one small interface.

Everything that can block or that depends on time comes from a `Runtime`, so that a test harness can put its own in
place and decide who runs when. Guarantees: every wait takes a time limit; nothing here waits for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol, TypeVar


class Lock(Protocol):
    """A mutual exclusion lock. `with lock:` waits without a limit and is for table updates only."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...  # noqa: D102
    def release(self) -> None: ...  # noqa: D102
    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Condition(Protocol):
    """A condition variable with a lock of its own."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...  # noqa: D102
    def notify_all(self) -> None: ...  # noqa: D102


class Event(Protocol):
    """A flag that is set once."""

    def set(self) -> None: ...  # noqa: D102
    def is_set(self) -> bool: ...  # noqa: D102
    def wait(self, timeout: float | None = None) -> bool: ...  # noqa: D102


class Thread(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None: ...  # noqa: D102
    def is_alive(self) -> bool: ...  # noqa: D102


class Runtime(Protocol):
    """Source of every primitive that blocks, and of the time. `name` says what the primitive guards."""

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def lock(self, name: str) -> Lock:
        """Make a lock that is not re-entrant."""
        ...

    def condition(self, name: str) -> Condition:
        """Make a condition variable."""
        ...

    def event(self, name: str) -> Event:
        """Make an event."""
        ...

    def spawn(self, name: str, target: Callable[[], None]) -> Thread:
        """Start a thread that does not keep the process alive."""
        ...


class _Flag:
    """An `Event` on one raw lock, held until it is set. A `threading.Event` is dearer to make."""

    __slots__ = ("_closed", "_set")

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()
        self._set = False

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._open()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set and self._closed.acquire(timeout=-1 if timeout is None else timeout):
            self._open()  # for the next waiter
        return self._set

    def _open(self) -> None:
        with suppress(RuntimeError):  # two threads at once: the other one did it
            self._closed.release()


class _Condition:
    """A `Condition` that is entered and left in C, as its lock is.

    An interrupt never leaves it locked: a `threading.Condition` can be interrupted between its lock and its block.
    """

    __slots__ = ("_condition", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)

    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._lock.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302, PYI036 - a property, called without arguments
        return self._lock.__exit__

    def wait(self, timeout: float | None = None) -> bool:
        return self._condition.wait(timeout)

    def notify_all(self) -> None:
        self._condition.notify_all()


class Latch:
    """An `Event` that takes one of the runtime's only when somebody waits: most of a step's are never waited for.

    A waiter shows its event before it looks at the flag, `set` raises the flag before it looks for events; so one of
    the two sees the other.
    """

    __slots__ = ("_name", "_runtime", "_set", "_waited")

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._set = False
        self._waited: list[Event] = []

    def set(self) -> None:
        """See `Event`."""
        self._set = True
        for event in self._waited:
            event.set()

    def is_set(self) -> bool:
        """See `Event`."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """See `Event`."""
        if not self.is_set():
            event = self._runtime.event(self._name)
            self._waited.append(event)
            if not self.is_set():
                event.wait(timeout)
        return self.is_set()


class ThreadRuntime:
    """The real thing: `threading` and `time.monotonic`."""

    monotonic = staticmethod(time.monotonic)

    def lock(self, name: str) -> Lock:  # noqa: ARG002 - for harnesses that tell primitives apart
        """See `Runtime`."""
        return threading.Lock()

    def condition(self, name: str) -> Condition:  # noqa: ARG002 - for harnesses that tell primitives apart
        """See `Runtime`."""
        return _Condition()

    def event(self, name: str) -> Event:  # noqa: ARG002 - for harnesses that tell primitives apart
        """See `Runtime`."""
        return _Flag()

    def spawn(self, name: str, target: Callable[[], None]) -> Thread:
        """See `Runtime`."""
        thread = threading.Thread(target=target, name=f"omni-prefix {name}", daemon=True)
        thread.start()
        return thread


Owner = TypeVar("Owner")


def serve(
    of: Callable[[], Owner | None],
    wake: Condition,
    idle_s: float,
    is_idle: Callable[[Owner], bool],
    work: Callable[[Owner], bool],
) -> None:
    """What a thread of the cache runs: `work` as often as there is some, until it says that it was the last.

    Nothing of the cache is held while the thread waits. So one that is dropped without a shutdown is freed, and its
    threads end within `idle_s`.

    Args:
        of: whose thread it is, a weak reference.
        wake: notified when there is work.
        idle_s: limit of one wait.
        is_idle: whether there is nothing to do. Called under `wake`.
        work: do one piece of it; whether to go on.
    """
    owner = of()
    while owner is not None:
        with wake:
            while owner is not None and is_idle(owner):
                owner = None
                wake.wait(idle_s)
                owner = of()
        if owner is None or not work(owner):
            return


class Deadline:
    """A point in time shared by all the waits of one call, so that several short waits cannot add up."""

    __slots__ = ("_end", "_runtime", "seconds")

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        self._runtime = runtime
        self._end = runtime.monotonic() + seconds
        self.seconds = seconds

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - self._runtime.monotonic())
