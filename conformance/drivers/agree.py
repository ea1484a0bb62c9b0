"""Reference model and production cache, side by side on one trace: outcomes and tables compared after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields

from conformance.drivers.fast import FastDriver
from conformance.drivers.reference import ReferenceDriver
from conformance.schedules.driver import INJECTED, Outcome, Snapshot
from conformance.schedules.generator import generate
from conformance.schedules.replay import Judge
from conformance.schedules.trace import WRITE, Discard, Event, Fail, Materialize, Rest, Shutdown, Trace

MODELLED = (Fail(stage="copy"), Fail(stage="write"))
"""The failures of the environment that the reference model can have."""


@dataclass(frozen=True)
class Disagreement:
    """The first event after which the two differ, from each other or from what is due."""

    index: int
    event: Event
    what: str

    def __str__(self) -> str:
        return f"event {self.index} ({self.event.event}): {self.what}"


@dataclass(frozen=True)
class Compared:
    """One seed's trace, compared."""

    seed: int
    counts: Counter[str]
    events: int
    disagreement: Disagreement | None


def agree(trace: Trace, *, checked: bool = True) -> Disagreement | None:
    """Apply a trace to both, event by event. `checked`: the reference's rules are checked too.

    After a failed write or a shutdown only outcomes are compared: the contract says what calls answer then, not what
    tables hold. What only the production cache can meet of a failing environment is judged, not compared.
    """
    reference = ReferenceDriver(trace.header, checked=checked)
    fast = FastDriver(trace.header)
    judge = Judge()
    over = failing = False
    for index, event in enumerate(trace.events):
        found = fast.apply(event)
        consumed = Discard(label=event.label) if found.error == INJECTED and isinstance(event, Materialize) else None
        expected = reference.apply(consumed or event)
        over = over or WRITE in (expected.error, found.error) or isinstance(event, Shutdown)
        failing = failing or (isinstance(event, Fail) and event not in MODELLED)
        if not (failing and (over or consumed is not None)) and (what := _outcomes_differ(expected, found)) is not None:
            return Disagreement(index, event, what)
        if (mismatch := judge.judge(index, event, found)) is not None:
            return Disagreement(index, event, f"both expected {mismatch.expected}, found {mismatch.found}")
        if not over and (what := compare_tables(event, reference.snapshot(), fast)) is not None:
            return Disagreement(index, event, what)
    return None


def agree_on_seeds(first: int, count: int, *, checked: bool = True) -> Iterator[Compared]:
    """Compare the traces of `count` seeds, one after another."""
    for seed in range(first, first + count):
        drawn = generate(seed)
        yield Compared(seed, drawn.counts, len(drawn.trace.events), agree(drawn.trace, checked=checked))


def _outcomes_differ(reference: Outcome, fast: Outcome) -> str | None:
    if reference.error != fast.error:
        return f"reference: {_told(reference)}; fast: {_told(fast)}"
    if reference.due != fast.due:
        return f"outputs: reference {reference.due}; fast {fast.due}"
    return None


def _told(outcome: Outcome) -> str:
    return "no error" if outcome.error is None else f"{outcome.error} ({outcome.detail})"


def compare_tables(event: Event, reference: Snapshot, fast: FastDriver) -> str | None:
    """`tables_differ` after an event, for a driver that may have met failures."""
    fast.made_room = fast.made_room and not isinstance(event, Rest)
    return tables_differ(reference, fast.snapshot(), but=ROOM if fast.made_room else frozenset())


ROOM = frozenset({"occupancy", "writes", "unfetched", "charged"})
"""Tables that tell how much of the deferred rows was forced out of the device."""


def tables_differ(reference: Snapshot, fast: Snapshot, *, but: frozenset[str] = frozenset()) -> str | None:
    """The first table, `but` some, in which the two differ, with both values; None if there is none."""
    for field in fields(Snapshot):
        expected, found = getattr(reference, field.name), getattr(fast, field.name)
        if field.name in but:
            continue
        if field.name == "writes":
            expected, found = sorted(expected, key=str), sorted(found, key=str)
        if expected != found:
            return f"{field.name}: reference {expected}; fast {found}"
    return None
