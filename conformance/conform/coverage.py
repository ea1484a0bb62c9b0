"""What runs covered: events and actions by kind, which stood next to which, goals, and how threads were interleaved.

Everything is a count under a name, so that parts of a session add up to the same whole in whatever order they come.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from conformance.conform.distinct import Distinct, fingerprint
from conformance.conform.goals import reached
from conformance.drivers.subject import Moment, Run
from conformance.schedules.generator import Generated
from conformance.schedules.trace import Event

TRACES = "traces"
EVENTS = "events"
EVENT_PAIRS = "pairs of events"
DRAWN = "what traces hold"
BEGIN, END = "begin", "end"
ARROW = " > "
BESIDE = " | "
HARNESS = frozenset({"call", "return", "block", "run"})
"""Actions that are the harness's own."""


def kind(event: Event) -> str:
    """What kind of event it is: its name, and whether it is refused."""
    return f"{event.event} refused" if getattr(event, "error", None) is not None else event.event


class Coverage:
    """Counts by section; and, by driver, the distinct orders in which its threads' actions came."""

    def __init__(self) -> None:
        self.sections: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.orders: defaultdict[str, Distinct] = defaultdict(Distinct)

    def add_trace(self, drawn: Generated) -> None:
        """A trace, once, on however many drivers it runs."""
        kinds = [kind(event) for event in drawn.trace.events]
        self.sections[TRACES]["drawn"] += 1
        self.sections[EVENTS].update(kinds)
        self.sections[EVENT_PAIRS].update(f"{a}{ARROW}{b}" for a, b in pairwise((BEGIN, *kinds, END)))
        self.sections[DRAWN].update(drawn.counts)

    def add_run(self, driver: str, drawn: Generated, run: Run) -> None:
        """One driver's run of a trace."""
        self.sections[TRACES][driver] += 1
        self.sections[f"actions of {driver}"].update(run.actions)
        moments = [moment for moment in run.moments if moment.action not in HARNESS]
        self._add_pairs(driver, moments)
        self.sections[f"goals of {driver}"].update(reached(drawn, run))
        if run.went_off is not None:
            self.sections[f"faults of {driver}"][run.went_off] += 1
        if run.interleaving is None:
            return
        self.sections[f"threads of {driver}"].update(
            {"points": run.points, "switches": len(run.interleaving.switches), "interleavings": 1}
        )
        self.orders[driver].add(fingerprint(f"{m.thread} {m.action}" for m in run.moments))

    def _add_pairs(self, driver: str, moments: Sequence[Moment]) -> None:
        alone, beside = self.sections[f"pairs in a thread of {driver}"], self.sections[f"threads' pairs of {driver}"]
        last: dict[str, str] = {}
        before: Moment | None = None
        for moment in moments:
            alone[f"{last.get(moment.thread, BEGIN)}{ARROW}{moment.action}"] += 1
            last[moment.thread] = moment.action
            if before is not None and before.thread != moment.thread:
                beside[f"{before.thread} {before.action}{BESIDE}{moment.thread} {moment.action}"] += 1
            before = moment

    def merge(self, other: Coverage) -> None:
        """Add another part of the session."""
        for name, counts in other.sections.items():
            self.sections[name].update(counts)
        for driver, orders in other.orders.items():
            self.orders[driver].merge(orders)

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return {
            "sections": {name: dict(sorted(counts.items())) for name, counts in sorted(self.sections.items())},
            "orders": {driver: orders.to_json() for driver, orders in sorted(self.orders.items())},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Coverage:
        """The inverse of `to_json`."""
        coverage = cls()
        for name, counts in value["sections"].items():
            coverage.sections[name].update(counts)
        for driver, orders in value["orders"].items():
            coverage.orders[driver] = Distinct.from_json(orders)
        return coverage
