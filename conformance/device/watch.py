"""`WatchedRuntime`: real threads that tell who waited for what, and what each held meanwhile.

A thread's name is its role: "engine" for the main thread, "committer" and "prefetch" for the cache's own, and whatever
name a test gives its own threads. Only waits that block are recorded: an event that was not set, a condition, a lock
that somebody else held, a thread that had not ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from omni_prefix_fast.runtime import Condition, Event, Lock, Thread, ThreadRuntime

STATE_LOCK = "manager state"
"""Name of the lock that covers tables only."""

_PREFIX = "omni-prefix "


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait that blocked."""

    thread: str
    kind: str
    """"event", "condition", "lock" or "join"."""
    name: str
    held: tuple[str, ...]
    """Names of the locks that the thread held meanwhile."""
    limit_s: float | None
    """None: without a limit."""


def role() -> str:
    """Name of the calling thread."""
    thread = threading.current_thread()
    return "engine" if thread is threading.main_thread() else thread.name.removeprefix(_PREFIX)


class WatchedRuntime(ThreadRuntime):
    """Records waits and locks. `on_wait` is called before each wait that blocks, on its thread."""

    def __init__(self, on_wait: Callable[[Wait], None] | None = None) -> None:
        self.waits: list[Wait] = []
        self.taken: set[tuple[str, str]] = set()
        """Which thread took which lock."""
        self.order: set[tuple[str, str]] = set()
        """Which lock was held when which other one was asked for."""
        self._on_wait = on_wait
        self._local = threading.local()

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the locks that the calling thread holds."""
        return tuple(self._held)

    @property
    def _held(self) -> list[str]:
        names: list[str] | None = getattr(self._local, "names", None)
        if names is None:
            names = self._local.names = []
        return names

    def waits_of(self, thread: str, *kinds: str) -> list[Wait]:
        """Waits of one thread, of some kinds or of all, in order."""
        return [w for w in list(self.waits) if w.thread == thread and (not kinds or w.kind in kinds)]

    def waiting(self, kind: str, name: str, limit_s: float | None) -> None:
        """The calling thread is about to block."""
        wait = Wait(role(), kind, name, self.held, limit_s)
        self.waits.append(wait)
        if self._on_wait is not None:
            self._on_wait(wait)

    def asking(self, name: str) -> None:
        """The calling thread asks for a lock."""
        self.order.update((held, name) for held in self._held)

    def took(self, name: str) -> None:
        """The calling thread has a lock now."""
        self.taken.add((role(), name))
        self._held.append(name)

    def let_go(self, name: str) -> None:
        """The calling thread has it no more."""
        self._held.remove(name)

    def lock(self, name: str) -> Lock:
        """See `Runtime`."""
        return _WatchedLock(self, name)

    def condition(self, name: str) -> Condition:
        """See `Runtime`."""
        return _WatchedCondition(self, name)

    def event(self, name: str) -> Event:
        """See `Runtime`."""
        return _WatchedEvent(self, name)

    def spawn(self, name: str, target: Callable[[], None]) -> Thread:
        """See `Runtime`."""
        return _WatchedThread(self, name, super().spawn(name, target))


class _WatchedLock:
    def __init__(self, runtime: WatchedRuntime, name: str) -> None:
        self._runtime, self._name = runtime, name
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._runtime.asking(self._name)
        taken = self._lock.acquire(blocking=False)
        if not taken and blocking:
            self._runtime.waiting("lock", self._name, None if timeout < 0 else timeout)
            taken = self._lock.acquire(timeout=timeout)
        if taken:
            self._runtime.took(self._name)
        return taken

    def release(self) -> None:
        self._runtime.let_go(self._name)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()


class _WatchedCondition(_WatchedLock):
    def __init__(self, runtime: WatchedRuntime, name: str) -> None:
        super().__init__(runtime, name)
        self._condition = threading.Condition(self._lock)

    def wait(self, timeout: float | None = None) -> bool:
        self._runtime.let_go(self._name)
        self._runtime.waiting("condition", self._name, timeout)
        try:
            return self._condition.wait(timeout)
        finally:
            self._runtime.took(self._name)

    def notify_all(self) -> None:
        self._condition.notify_all()


class _WatchedEvent:
    def __init__(self, runtime: WatchedRuntime, name: str) -> None:
        self._runtime, self._name = runtime, name
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._event.is_set():
            self._runtime.waiting("event", self._name, timeout)
        return self._event.wait(timeout)


class _WatchedThread:
    def __init__(self, runtime: WatchedRuntime, name: str, thread: Thread) -> None:
        self._runtime, self._name, self._thread = runtime, name, thread

    def join(self, timeout: float | None = None) -> None:
        if self._thread.is_alive():
            self._runtime.waiting("join", self._name, timeout)
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        return self._thread.is_alive()


def cycle(order: Sequence[tuple[str, str]] | set[tuple[str, str]]) -> list[str]:
    """A cycle among (held, asked for) pairs of locks, or nothing: two threads could not block each other for ever."""
    after: dict[str, set[str]] = {}
    for held, asked in order:
        after.setdefault(held, set()).add(asked)
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for other in sorted(after.get(name, ())):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    for name in sorted(after):
        if found := visit(name, []):
            return found
    return []
