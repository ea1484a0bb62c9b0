"""What the page draws, as plain data: moments in words, tables after each of them, tasks, reads and threads as spans.

The page's script knows none of the machine's rules: it draws what stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from conformance.drivers.subject import Moment, Run
from conformance.page.actions import moment_words
from conformance.page.tables import Tables, numbers
from conformance.page.timeline import Timeline
from conformance.page.words import Difference, event_name, event_words, failure_words, key_name
from conformance.schedules.trace import Materialize, Part, Save, Trace

LETTER = {"absent": "–", "transit": "t", "committed": "C"}
FAILURE = "failure"
"""Action of the moment that the page ends with, where a run failed."""


def page_data(trace: Trace, run: Run, *, driver: str, command: str) -> dict[str, Any]:
    """All that a page shows of a run that was recorded.

    Args:
        trace: what ran, up to `run.events` of its events.
        run: with its moments, if the driver tells any.
        driver: the driver's name.
        command: replays the trace.
    """
    return _Drawing(trace, run).data(driver, command)


class _Drawing:
    def __init__(self, trace: Trace, run: Run) -> None:
        self.trace = trace
        self.run = run
        self.moments = list(_with_calls(trace, run))
        self.tables = Tables(trace)
        self.keys = [key.name for key in trace.header.keys]
        self.tenants: dict[int, tuple[str, int]] = {}
        """Request and position whose rows a slot holds."""
        self.timeline = Timeline(self.tables)

    def data(self, driver: str, command: str) -> dict[str, Any]:
        told: list[dict[str, Any]] = []
        before = self._slots()
        for at, moment in enumerate(self.moments):
            self.tables.apply(moment)
            if moment.action == "claim_slots":
                self._tenants(moment)
            self.timeline.add(at, moment)
            after = self._slots()
            changed = [[slot, *state] for slot, state in enumerate(after) if state != before[slot]]
            before = after
            words = moment_words(moment, self.trace, self.run.failure)
            told.append(
                {"thread": moment.thread, "action": moment.action, "words": words, "event": moment.event}
                | ({"slots": changed} if changed else {})
            )
        header = self.trace.header
        return {
            "driver": driver,
            "seed": header.seed,
            "command": command,
            "block_size": header.block_size,
            "num_blocks": header.num_blocks,
            "settings": {
                "staging pages": header.staging_depth,
                "rows a page": header.page_rows,
                "device bytes for deferred rows": header.budget_bytes,
            },
            "keys": [{"name": key_name(key.name), "deferred": key.deferred} for key in header.keys],
            "events": [[event_name(event), event_words(event)] for event in self.trace.events[: self._shown()]],
            "moments": told,
            **self.timeline.data(len(self.moments)),
            "failure": self._failure(),
        }

    def _shown(self) -> int:
        """Events that the page speaks of: those that ran, and the failing one."""
        failing = -1 if self.run.failure is None else self.run.failure.index
        return max([failing, self.run.events - 1, *(moment.event for moment in self.moments)]) + 1

    # ------------------------------------------------------------------------- slots

    def _slots(self) -> list[list[Any]]:
        """A slot as the page has it: version, label of the owning step, tenant, occupancy of each key."""
        tables = self.tables
        out: list[list[Any]] = []
        for slot, version in enumerate(tables.version):
            owner = tables.owner[slot]
            step = None if owner is None else tables.steps.get(owner)
            req, position = self.tenants.get(slot, ("", -1))
            tenant = f"{req}:{position}" if req else ""
            letters = "".join(LETTER[tables.occupancy[key][slot]] for key in self.keys)
            out.append([version, "" if step is None or step.label is None else str(step.label), tenant, letters])
        return out

    def _tenants(self, moment: Moment) -> None:
        event = self.trace.events[moment.event] if 0 <= moment.event < len(self.trace.events) else None
        for slot in numbers(moment.details, "slots"):
            self.tenants.pop(slot, None)
        for part in event.batch if isinstance(event, Save) else ():
            self._place(part)

    def _place(self, part: Part) -> None:
        for i, slot in enumerate(part.slots):
            self.tenants[slot] = (part.req, part.start + i)

    # ------------------------------------------------------------------------- the failure

    def _failure(self) -> dict[str, Any] | None:
        failure = self.run.failure
        if failure is None:
            return None
        words = failure_words(self.trace, failure)
        return {
            "event": failure.index,
            "kind": failure.kind,
            "headline": words.headline,
            "expected": words.expected,
            "found": words.found,
            "differences": [asdict(d) | {"key": key_name(d.key)} for d in words.differences],
            "slots": sorted(
                {*self._wrong_slots(words.differences), *(d.slot for d in words.differences if d.slot >= 0)}
            ),
        }

    def _wrong_slots(self, wrong: Sequence[Difference]) -> set[int]:
        """Slots from which the wrong rows were due."""
        failure = self.run.failure
        event = self.trace.events[failure.index] if failure is not None and failure.index >= 0 else None
        if not isinstance(event, Materialize):
            return set()
        places: dict[tuple[str, int], int] = {}
        for step in self.tables.steps.values():
            if step.label == event.label:
                for (_, req), read in self.tables.reads.items():
                    if read.step == step.id:
                        places |= {(req, read.start + i): slot for i, (slot, _) in enumerate(read.identities)}
                for part in step.batch:
                    places |= {(part.req, part.start + i): slot for i, slot in enumerate(part.slots)}
        return {places[d.req, d.position] for d in wrong if (d.req, d.position) in places}


def _with_calls(trace: Trace, run: Run) -> Iterator[Moment]:
    """The moments, each event's behind a call, also where a driver tells of no calls; the failure at the end."""
    moments: Sequence[Moment] = run.moments
    last = max([run.events - 1, *(moment.event for moment in moments)])
    if not any(moment.action == "call" for moment in moments):
        moments = list(_called(trace, moments, last))
    yield from moments
    if run.failure is not None:
        thread = moments[-1].thread if moments else "engine"
        details: Mapping[str, object] = {"what": str(run.failure)}
        yield Moment(moments[-1].at + 1 if moments else 0, thread, FAILURE, details, run.failure.index)


def _called(trace: Trace, moments: Sequence[Moment], last: int) -> Iterator[Moment]:
    upcoming = 0
    for moment in moments:
        while upcoming <= moment.event:
            yield Moment(moment.at, "engine", "call", {"event": trace.events[upcoming].event}, upcoming)
            upcoming += 1
        yield moment
    for index in range(upcoming, last + 1):
        yield Moment(moments[-1].at if moments else 0, "engine", "call", {"event": trace.events[index].event}, index)
