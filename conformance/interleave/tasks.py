"""Threads of a run, what they wait for, and how a run can end."""

from __future__ import annotations

import threading
from typing import Protocol


class RunError(Exception):
    """A run went wrong. The message tells what each thread does."""


class DeadlockError(RunError):
    """Nobody can ever go on."""


class EndlessError(RunError):
    """The run has more points than it may have."""


class CrashError(RunError):
    """A thread raised what nobody caught. It is the cause."""


class LeftBehindError(RunError):
    """The program has ended, and a thread of it never does."""


class Unwind(BaseException):
    """Raised at a thread's point to end it, since the run is over."""


class Touched(Protocol):
    """Something that several threads can see."""

    past: int


class Awaited(Touched, Protocol):
    """Something that a thread can wait for."""

    waiters: list[Task]

    def told(self) -> str:
        """What it is, and who can end the wait, in words."""
        ...


class Task:
    """A thread of the run."""

    __slots__ = (
        "done",
        "gate",
        "holds",
        "ident",
        "index",
        "limit",
        "name",
        "past",
        "ready",
        "timed_out",
        "waiters",
        "waits",
    )

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.gate = threading.Lock()
        """Held, but while the thread is being handed the baton."""
        self.gate.acquire()
        self.ident: int | None = None
        self.ready = True
        self.done = False
        self.waits: Awaited | None = None
        self.limit: float | None = None
        """When the wait ends at the latest, by the virtual clock."""
        self.timed_out = False
        self.holds: list[str] = []
        """Names of the locks that it has, for reports."""
        self.waiters: list[Task] = []
        """Who waits for its end."""
        self.past = index
        """Stands for all that happened before: a hash. See `Baton.touch`."""

    def __lt__(self, other: Task) -> bool:
        return self.index < other.index

    def told(self) -> str:
        """See `Awaited`."""
        return f"the end of thread {self.name!r}"
