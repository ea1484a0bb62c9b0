"""A runtime for one thread: nothing waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from omni_prefix_fast import runtime as fast_runtime


class StandingRuntime:
    """A runtime for one thread: the clock stands still, and a wait that would block ends at once, empty-handed."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        """Always the same moment, but for jumps."""
        return self._now

    def jump(self, seconds: float) -> None:
        """The clock moves on."""
        self._now += seconds

    def lock(self, name: str) -> fast_runtime.Lock:
        """A lock; in one thread it is never contended."""
        return _FreeLock(name)

    def condition(self, name: str) -> fast_runtime.Condition:
        """A condition whose waits end at once."""
        return _StandingCondition(name)

    def event(self, name: str) -> fast_runtime.Event:
        """An event whose waits end at once."""
        return _StandingEvent(name)

    def spawn(self, name: str, target: Callable[[], None]) -> fast_runtime.Thread:  # noqa: ARG002
        """Refused: an eager cache has no thread."""
        raise AssertionError(f"an eager cache starts the thread {name!r}")


class _FreeLock:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: ARG002
        taken = self._lock.acquire(blocking=False)
        assert taken, f"lock {self._name!r} is taken twice by one thread"
        return taken

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _StandingCondition(_FreeLock):
    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None, f"a wait on {self._name!r} has no limit"
        return False

    def notify_all(self) -> None:
        """Nobody waits."""


class _StandingEvent:
    def __init__(self, name: str) -> None:
        self._name = name
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None, f"a wait on {self._name!r} has no limit"
        return self._set
