"""The tables of docs/machine.md, followed from what a run told: who owns each version, what is in transit, who reads.

They are what the actions *ought to* leave. A faulty cache tells the same actions and holds something else, which is
what its failure says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from conformance.drivers.subject import Moment
from conformance.schedules.trace import Admission, Event, Part, Save, Start, Trace, Unsaved

Occupancy = Literal["absent", "transit", "committed"]
Identity = tuple[int, int]
"""A slot and a version: whose rows these are."""

CHAIN = {
    "queue_task": "QUEUED",
    "claim_copy": "COPYING",
    "finish_copy": "HOST_READY",
    "write_pool": "HOST_READY",
    "fail_task": "FAILED",
}
"""State of a task after an action."""


@dataclass
class Task:
    """A write. `rows` are the (key, slot, version) that it takes to the pool."""

    id: int
    step: int
    req: str | None
    """The request of a deferred write; None for an immediate one."""
    rows: list[tuple[str, int, int]] = field(default_factory=list)
    state: str = "PENDING"


@dataclass
class Read:
    """A hit read of one request in one step."""

    step: int
    req: str
    start: int
    end: int
    identities: tuple[Identity, ...] = ()
    """What its positions resolved to."""
    from_log: bool = False
    """A row of it was in transit and deferred when it was planned."""
    from_flight: bool = False
    """A row of it was on its way in an earlier step's immediate write when it was planned."""
    state: str = "planned"
    """planned, unplanned, preserved (being completed early), fetched, or released with its step."""


@dataclass
class Step:
    """A saved step: what it computes, and the identities that it claimed."""

    id: int
    label: int | None
    batch: Sequence[Part]
    claimed: tuple[Identity, ...]
    emitted: tuple[str, ...]
    deferred: tuple[str, ...] = ()
    writer: Task | None = None
    """Its immediate write."""
    consumed: bool = False


class Tables:
    """Apply moments in order; look at the fields in between."""

    def __init__(self, trace: Trace) -> None:
        self.events: Sequence[Event] = trace.events
        self.block_size = trace.header.block_size
        slots = trace.header.num_blocks * self.block_size
        self.version = [0] * slots
        self.owner: list[int | None] = [None] * slots
        self.occupancy: dict[str, list[Occupancy]] = {key.name: ["absent"] * slots for key in trace.header.keys}
        self.writer: dict[tuple[str, int], int] = {}
        """Task of an in-transit row, by key and slot."""
        self.tasks: dict[int, Task] = {}
        self.open_writes: dict[str, int] = {}
        self.reads: dict[tuple[int, str], Read] = {}
        self.steps: dict[int, Step] = {}
        self.live: set[str] = set()
        self.admitted: dict[str, Admission] = {}
        """Admissions of the step that was started last."""
        self._next_task = 0
        self._claimed: Step | None = None

    def apply(self, moment: Moment) -> None:
        """Take in one moment. Actions that change no table, and those of the harness, are passed over."""
        action = moment.action
        handle = self._HANDLERS.get(action)
        if handle is not None:
            handle(self, moment.details, self._event(moment.event))
        elif action in CHAIN:
            task = self.tasks.get(number(moment.details, "task"))
            if task is not None:
                task.state = CHAIN[action]

    def slots_of(self, admission: Admission, start: int, end: int) -> list[int]:
        """Slots of a request's positions, by the block table that it was admitted with."""
        size, blocks = self.block_size, admission.blocks or []
        return [blocks[p // size] * size + p % size for p in range(start, end) if p // size < len(blocks)]

    def _event(self, index: int) -> Event | None:
        return self.events[index] if 0 <= index < len(self.events) else None

    # ------------------------------------------------------------------------- requests and reads

    def _finish_request(self, details: Mapping[str, Any], _: Event | None) -> None:
        self.live.discard(text(details, "req_id"))
        self.open_writes.pop(text(details, "req_id"), None)

    def _start_request(self, details: Mapping[str, Any], event: Event | None) -> None:
        req = text(details, "req_id")
        self.live.add(req)
        if isinstance(event, Start):
            self.admitted = {admission.req: admission for admission in event.admitted}

    def _plan_read(self, details: Mapping[str, Any], _: Event | None) -> None:
        step, req = number(details, "step"), text(details, "req_id")
        start, end = (int(p) for p in details.get("span", (0, 0)))
        admission = self.admitted.get(req)
        slots = [] if admission is None else self.slots_of(admission, start, end)
        read = Read(step, req, start, end, tuple((slot, self.version[slot]) for slot in slots))
        for key, column in self.occupancy.items():
            for slot in slots:
                if column[slot] == "transit":
                    task = self.tasks.get(self.writer.get((key, slot), -1))
                    read.from_log |= task is not None and task.req is not None
                    read.from_flight |= task is not None and task.req is None and task.step != step
        self.reads[step, req] = read

    def _unplan_read(self, details: Mapping[str, Any], _: Event | None) -> None:
        self._set_read(details, "unplanned")

    def _preserve_read(self, details: Mapping[str, Any], _: Event | None) -> None:
        self._set_read(details, "preserved")

    def _fetch_read(self, details: Mapping[str, Any], _: Event | None) -> None:
        self._set_read(details, "fetched")

    def _set_read(self, details: Mapping[str, Any], state: str) -> None:
        read = self.reads.get((number(details, "step"), text(details, "req_id")))
        if read is not None:
            read.state = state

    # ------------------------------------------------------------------------- claims and writes

    def _claim_slots(self, details: Mapping[str, Any], event: Event | None) -> None:
        step, slots = number(details, "step"), numbers(details, "slots")
        emitted = tuple(str(key) for key in details.get("emitted", ()))
        for slot in slots:
            self.version[slot] += 1
            self.owner[slot] = step
            for key, column in self.occupancy.items():
                column[slot] = "transit" if key in emitted else "absent"
                self.writer.pop((key, slot), None)
        label = event.label if isinstance(event, Save) else None
        batch = event.batch if isinstance(event, (Save, Unsaved)) else ()
        claimed = tuple((slot, self.version[slot]) for slot in slots)
        self._claimed = self.steps[step] = Step(step, label, batch, claimed, emitted)

    def _append_rows(self, details: Mapping[str, Any], _: Event | None) -> None:
        step = self._claimed
        if step is None:
            return
        step.deferred = tuple(str(key) for key in details.get("keys", ()))
        for req in details.get("opened", ()):
            self.tasks[self._next_task] = Task(self._next_task, step.id, str(req))
            self.open_writes[str(req)] = self._next_task
            self._next_task += 1
        if step.writer is not None:  # registered before: it has the rows of the other keys only
            step.writer.rows = [row for row in step.writer.rows if row[0] not in step.deferred]
        for part in step.batch:
            opened = self.open_writes.get(part.req)
            if opened is not None:
                self._give(opened, step.deferred, part.slots)

    def _register_write(self, details: Mapping[str, Any], _: Event | None) -> None:
        task, step = number(details, "task"), self._claimed
        self._next_task = max(self._next_task, task + 1)
        if step is None:
            return
        step.writer = self.tasks[task] = Task(task, step.id, None)
        immediate = [key for key in step.emitted if key not in step.deferred]
        self._give(task, immediate, [slot for slot, _ in step.claimed])

    def _give(self, task: int, keys: Iterable[str], slots: Sequence[int]) -> None:
        for key in keys:
            for slot in slots:
                self.tasks[task].rows.append((key, slot, self.version[slot]))
                self.writer[key, slot] = task

    def _seal_write(self, details: Mapping[str, Any], _: Event | None) -> None:
        task = number(details, "task")
        self.open_writes = {req: opened for req, opened in self.open_writes.items() if opened != task}

    def _commit_task(self, details: Mapping[str, Any], _: Event | None) -> None:
        task = self.tasks.get(number(details, "task"))
        if task is None:
            return
        task.state = "WRITTEN"
        for key, slot, version in task.rows:
            if self.version[slot] == version and key in self.occupancy:
                self.occupancy[key][slot] = "committed"
                self.writer.pop((key, slot), None)

    def _take_step(self, details: Mapping[str, Any], _: Event | None) -> None:
        step = self.steps.get(number(details, "step"))
        if step is not None:
            step.consumed = True

    def _release_step(self, details: Mapping[str, Any], _: Event | None) -> None:
        for (step, _req), read in self.reads.items():
            if step == number(details, "step"):
                read.state = "released"

    _HANDLERS: ClassVar[Mapping[str, Callable[[Tables, Mapping[str, Any], Event | None], None]]] = {
        "finish_request": _finish_request,
        "start_request": _start_request,
        "plan_read": _plan_read,
        "unplan_read": _unplan_read,
        "preserve_read": _preserve_read,
        "fetch_read": _fetch_read,
        "claim_slots": _claim_slots,
        "append_rows": _append_rows,
        "register_write": _register_write,
        "seal_write": _seal_write,
        "commit_task": _commit_task,
        "take_step": _take_step,
        "release_step": _release_step,
    }


def text(details: Mapping[str, Any], name: str) -> str:
    """A detail that is a name; empty if it was not told."""
    return str(details.get(name, ""))


def number(details: Mapping[str, Any], name: str) -> int:
    """A detail that is a whole number; -1 if it was not told."""
    return int(details.get(name, -1))


def numbers(details: Mapping[str, Any], name: str) -> list[int]:
    """A detail that is a row of whole numbers."""
    return [int(value) for value in details.get(name, ())]
