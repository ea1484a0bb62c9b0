"""Situations that runs have to come to, or they say little: each is recognised in what a run told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from conformance.drivers.subject import Moment, Run
from conformance.page.tables import Read, Tables, number, text
from conformance.schedules.generator import Generated
from conformance.schedules.trace import TIMEOUT, Save, Shutdown, Start


@dataclass(frozen=True)
class Goal:
    """A situation. `threads`: only a driver with threads can come to it."""

    name: str
    threads: bool = False


SAME_STEP = Goal("same-step hit")
SAME_STEP_RECYCLED = Goal("same-step hit on a recycled block")
PRESERVED = Goal("a claim completes a read first")
PRESERVED_BUDGET = Goal("the byte budget completes a read first")
FLUSHED = Goal("flush of a running request")
LATE = Goal("late materialize after reuse")
ABORTED_OPEN = Goal("abort with open deferred rows")
RESUMED_ONTO = Goal("resume onto the same block with its deferred write open")
GAP = Goal("resume with a larger hit")
FROM_LOG = Goal("hit on deferred rows not yet in the pool")
FULL_STAGING = Goal("full staging pool")
GIVEN_UP = Goal("a step that is never saved is given up")
FAILED_WRITE = Goal("failed write")
FAILED_JOIN = Goal("failed write with a joiner waiting", threads=True)
FROM_FLIGHT = Goal("hit on a write in flight", threads=True)
LOST_SLOT = Goal("a write finds its slot claimed by another")
PREFETCHED = Goal("a read fetched by the prefetch thread", threads=True)
UNPLANNED_FETCHED = Goal("a read unplanned after it was fetched")
TWO_AT_A_READ = Goal("two threads at one read", threads=True)

GOALS = (
    SAME_STEP,
    SAME_STEP_RECYCLED,
    PRESERVED,
    PRESERVED_BUDGET,
    FLUSHED,
    LATE,
    ABORTED_OPEN,
    RESUMED_ONTO,
    GAP,
    FROM_LOG,
    FULL_STAGING,
    GIVEN_UP,
    FAILED_WRITE,
    FAILED_JOIN,
    FROM_FLIGHT,
    LOST_SLOT,
    PREFETCHED,
    UNPLANNED_FETCHED,
    TWO_AT_A_READ,
)


def reached(drawn: Generated, run: Run) -> Counter[str]:
    """How often a run came to each goal."""
    seen = _Watch(drawn)
    for moment in run.moments:
        seen.look(moment)
    for event in drawn.trace.events[: run.events]:
        if isinstance(event, Save) and event.error == TIMEOUT:
            seen.count(FULL_STAGING)
    return +seen.counts


class _Watch:
    """Looks at each moment with the tables as they are just before it."""

    def __init__(self, drawn: Generated) -> None:
        self.tables = Tables(drawn.trace)
        self.counts: Counter[str] = Counter()
        self.aborted = {(index, req) for index, req in drawn.aborts}
        self.preserved = 0
        """Reads completed early by the save in progress, since it last reserved bytes."""
        self.returned: dict[str, int] = {}
        """Live requests of the step that was started that were admitted again, with their open deferred write."""
        self.waiting: dict[str, int] = {}
        """The task that each waiting thread waits for."""
        self.hits: dict[int, list[Read]] = {}
        """Reads by step."""
        self.offered: dict[str, int] = {}
        """How far rows of each live request were offered."""

    def count(self, goal: Goal) -> None:
        self.counts[goal.name] += 1

    def look(self, moment: Moment) -> None:
        if moment.action not in {"fail_task", "block"}:
            self.waiting.pop(moment.thread, None)
        look = _LOOKS.get(moment.action)
        if look is not None:
            look(self, moment)
        self.tables.apply(moment)
        if moment.action == "plan_read":
            self.planned(moment)

    # ------------------------------------------------------------------------- one for each action

    def planned(self, moment: Moment) -> None:
        read = self.read_of(moment)
        if read is not None:
            self.hits.setdefault(read.step, []).append(read)
            self.counts[FROM_LOG.name] += read.from_log
            self.counts[FROM_FLIGHT.name] += read.from_flight

    def finish_request(self, moment: Moment) -> None:
        req = text(moment.details, "req_id")
        if (moment.event, req) in self.aborted and req in self.tables.open_writes:
            self.count(ABORTED_OPEN)
        self.offered.pop(req, None)

    def start_request(self, moment: Moment) -> None:
        req = text(moment.details, "req_id")
        if req in self.tables.live:
            if req in self.tables.open_writes:
                self.returned[req] = self.tables.open_writes[req]
            event = self.tables.events[moment.event]
            admission = next((a for a in event.admitted if a.req == req), None) if isinstance(event, Start) else None
            if admission is not None and 0 < self.offered.get(req, 0) < admission.computed:
                self.count(GAP)

    def unplan_read(self, moment: Moment) -> None:
        self.count(SAME_STEP)
        read = self.read_of(moment)
        event = self.tables.events[moment.event] if moment.event >= 0 else None
        if read is not None and isinstance(event, Save):
            computed = {slot for part in event.batch for slot in part.slots}
            if any(slot in computed and version for slot, version in read.identities):
                self.count(SAME_STEP_RECYCLED)
            if read.state == "fetched":
                self.count(UNPLANNED_FETCHED)

    def reserve_budget(self, _: Moment) -> None:
        self.counts[PRESERVED_BUDGET.name] += self.preserved
        self.preserved = 0

    def preserve_read(self, _: Moment) -> None:
        self.preserved += 1

    def claim_page(self, _: Moment) -> None:
        self.preserved = 0

    def claim_slots(self, moment: Moment) -> None:
        self.counts[PRESERVED.name] += self.preserved
        self.preserved = 0
        event = self.tables.events[moment.event] if moment.event >= 0 else None
        if isinstance(event, Save):
            size = self.tables.block_size
            for part in event.batch:
                self.offered[part.req] = part.start + len(part.slots)
                task = self.tables.tasks.get(self.returned.get(part.req, -1))
                blocks = {slot // size for slot in part.slots}
                if task is not None and any(slot // size in blocks for _, slot, _ in task.rows):
                    self.count(RESUMED_ONTO)
        elif not moment.details.get("emitted"):
            self.count(GIVEN_UP)
        self.returned = {}

    def seal_write(self, _: Moment) -> None:
        self.count(FLUSHED)

    def take_step(self, moment: Moment) -> None:
        step = self.tables.steps.get(number(moment.details, "step"))
        if step is None:
            return
        rows = [*step.claimed, *(i for read in self.hits.pop(step.id, ()) for i in read.identities)]
        if any(self.tables.version[slot] > version for slot, version in rows):
            self.count(LATE)

    def fetch_read(self, moment: Moment) -> None:
        if moment.thread == "prefetch":
            self.count(PREFETCHED)

    def wait_read(self, _: Moment) -> None:
        self.count(TWO_AT_A_READ)

    def wait_task(self, moment: Moment) -> None:
        self.waiting[moment.thread] = number(moment.details, "task")

    def fail_task(self, moment: Moment) -> None:
        event = self.tables.events[moment.event] if moment.event >= 0 else None
        if moment.thread != "committer" and (event is None or isinstance(event, Shutdown)):
            return  # nothing failed: a shutdown drops what is queued
        self.count(FAILED_WRITE)
        if number(moment.details, "task") in [t for thread, t in self.waiting.items() if thread != moment.thread]:
            self.count(FAILED_JOIN)

    def write_pool(self, moment: Moment) -> None:
        task = self.tables.tasks.get(number(moment.details, "task"))
        if task is not None and any(self.tables.version[slot] != version for _, slot, version in task.rows):
            self.count(LOST_SLOT)

    def read_of(self, moment: Moment) -> Read | None:
        return self.tables.reads.get((number(moment.details, "step"), text(moment.details, "req_id")))


_LOOKS: dict[str, Callable[[_Watch, Moment], None]] = {
    look.__name__: look
    for look in (
        _Watch.finish_request,
        _Watch.start_request,
        _Watch.unplan_read,
        _Watch.reserve_budget,
        _Watch.preserve_read,
        _Watch.claim_page,
        _Watch.claim_slots,
        _Watch.seal_write,
        _Watch.take_step,
        _Watch.fetch_read,
        _Watch.wait_read,
        _Watch.wait_task,
        _Watch.fail_task,
        _Watch.write_pool,
    )
}
