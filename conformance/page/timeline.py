"""Threads, tasks and reads as rows of spans over the moments of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from conformance.drivers.subject import Moment
from conformance.page.tables import Tables, Task
from conformance.page.words import ranges

OPEN = -1
"""End of a span that has not ended."""


@dataclass
class Bar:
    """A row: what one thread, task or read was in, from moment to moment."""

    name: str
    title: str
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """Moments `[from, to)` and the state."""
    ticks: list[int] = field(default_factory=list)
    """Moments at which a thread did something."""
    slots: list[int] = field(default_factory=list)
    """Slots that a read needs."""

    def enter(self, at: int, state: str) -> None:
        """From moment `at` on it is in `state`."""
        if self.spans and self.spans[-1][1] == OPEN:
            first, _, was = self.spans[-1]
            if was == state:
                return
            self.spans[-1] = (first, at, was)
        self.spans.append((at, OPEN, state))

    def leave(self, at: int) -> None:
        """From moment `at` on it is in no state."""
        if self.spans and self.spans[-1][1] == OPEN:
            first, _, was = self.spans[-1]
            self.spans[-1] = (first, at, was)

    def data(self, end: int) -> dict[str, Any]:
        """As the page has it; what is open still goes on to the end."""
        return asdict(self) | {"spans": [(a, end if b == OPEN else b, state) for a, b, state in self.spans]}


class Timeline:
    """Give it each moment, once the tables have taken it in."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._threads: dict[str, Bar] = {}
        self._tasks: dict[int, Bar] = {}
        self._reads: dict[tuple[int, str], Bar] = {}

    def add(self, at: int, moment: Moment) -> None:
        """The next moment."""
        self._thread(at, moment)
        for task in self._tables.tasks.values():
            bar = self._tasks.setdefault(task.id, Bar(f"task {task.id}", self._of_task(task)))
            if not bar.spans or bar.spans[-1][1] == OPEN:
                bar.enter(at, task.state)
                if task.state in {"WRITTEN", "FAILED"}:
                    bar.leave(at + 1)
        for key, read in self._tables.reads.items():
            label = self._label(read.step)
            slots = [slot for slot, _ in read.identities]
            title = f"{read.req} in step {label}: positions {read.start} to {read.end - 1}, slots {ranges(slots)}"
            bar = self._reads.setdefault(key, Bar("", title, slots=slots))
            bar.name = f"{read.req}, step {label}"  # the label is known once the step is saved
            bar.title = title
            if read.state == "released":
                bar.leave(at)
            else:
                bar.enter(at, read.state)

    def data(self, end: int) -> dict[str, list[dict[str, Any]]]:
        """All rows, as the page has them, of a run with so many moments."""
        return {
            "threads": _data(self._threads.values(), end),
            "tasks": _data(self._tasks.values(), end),
            "reads": _data(self._reads.values(), end),
        }

    def _thread(self, at: int, moment: Moment) -> None:
        bar = self._threads.setdefault(moment.thread, Bar(moment.thread, f"thread {moment.thread}"))
        match moment.action:
            case "call":
                bar.leave(at)
                bar.enter(at, "call")
            case "block":
                bar.enter(at, "blocked")
            case "run":
                bar.enter(at, "call" if moment.event >= 0 else "running")
            case "return":
                bar.leave(at + 1)
            case _:
                bar.ticks.append(at)
                if not bar.spans or bar.spans[-1][1] != OPEN:
                    bar.enter(at, "running")

    def _label(self, step: int) -> str:
        found = self._tables.steps.get(step)
        return f"id {step}" if found is None or found.label is None else str(found.label)

    def _of_task(self, task: Task) -> str:
        label = self._label(task.step)
        if task.req is None:
            return f"immediate write of step {label}"
        return f"deferred write of {task.req}, opened by step {label}"


def _data(bars: Iterable[Bar], end: int) -> list[dict[str, Any]]:
    return [bar.data(end) for bar in bars]
