"""Events, rows and failures of a trace in words: what the story and the page say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conformance.drivers.subject import Failure
from conformance.schedules.oracle import HIDDEN_KEY
from conformance.schedules.trace import (
    Admission,
    Discard,
    Due,
    Event,
    Fail,
    Materialize,
    Part,
    Rest,
    Save,
    Shutdown,
    Start,
    Trace,
    Unsaved,
)

ZEROS = "zeros"
_STAGES: dict[str, str] = {
    "copy": "a copy to the host fails",
    "write": "a write into the pool fails",
    "wait": "a wait for a step's copies fails",
    "gather_to_host": "the copy of deferred rows fails",
    "launch": "a launch of copies fails",
    "clone": "a clone of deferred rows finds no device memory",
    "rows_to_host": "a fetch of rows from the log fails",
    "outputs": "there is no host memory for outputs",
    "keys": "there is no host memory for a key seen first",
    "interrupt": "a KeyboardInterrupt comes",
    "clock": "the clock jumps an hour",
}
_TABLES = re.compile(r"^(?P<table>\w+): reference (?P<expected>.*); fast (?P<found>.*)$", re.DOTALL)
_DUE = re.compile(r"rows=(?P<rows>\{.*\}) spans=(?P<spans>\{.*\})", re.DOTALL)


def key_name(key: str) -> str:
    """A key as people say it."""
    return "hidden" if key == HIDDEN_KEY else key


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers, neighbours joined: ``3, 5-8``."""
    out: list[list[int]] = []
    for n in numbers:
        if out and n == out[-1][-1] + 1:
            out[-1].append(n)
        else:
            out.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in out)


def plural(count: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def event_name(event: Event) -> str:
    """An event's kind, and the step it is about if it names one: ``save 2``."""
    label = getattr(event, "label", -1)
    return f"{event.event} {label}" if label >= 0 else event.event


def event_words(event: Event) -> str:
    """What an event asks for, and what error is due if one is."""
    error = getattr(event, "error", None)
    told = _asked(event)
    return told if error is None else f"{told}; {error} is due"


def _asked(event: Event) -> str:
    told: str = event.event
    match event:
        case Start():
            told = _start(event)
        case Save():
            told = _save(event)
        case Unsaved():
            told = f"a step is computed and never saved: {_parts(event.batch)}"
        case Materialize():
            told = f"materialize step {event.label} for {', '.join(event.reqs) or 'nobody'}"
        case Discard():
            told = f"discard step {event.label}"
        case Fail():
            told = _fail(event)
        case Rest():
            told = "at rest: nothing may be left behind"
        case Shutdown():
            told = "shut down"
    return told


def _save(event: Save) -> str:
    if not event.batch:
        return "save with no step started"
    emits = ", ".join(key_name(key) for key in event.rows) or "no key"
    told = f"save step {event.label}: {_parts(event.batch)}; emits {emits}"
    if event.widths:
        told += f"; with a wrong width of {', '.join(key_name(key) for key in event.widths)}"
    if event.clone_fails:
        told += "; the device has no room for the clone"
    return told


def _fail(event: Fail) -> str:
    told = _STAGES.get(event.stage, f"the next {event.stage} fails")
    after = getattr(event, "after", 0)
    return f"soon {told}" + (f", behind {after} others" if after else "")


def _start(event: Start) -> str:
    parts = [f"{', '.join(event.finished)} finished"] if event.finished else []
    parts += [_admission(admission) for admission in event.admitted]
    if event.running:
        parts.append(", ".join(event.running) + (" goes on" if len(event.running) == 1 else " go on"))
    return "a step starts: " + ("; ".join(parts) or "nothing new")


def _admission(admission: Admission) -> str:
    verb = "resumes" if admission.resumed else "is admitted"
    blocks = (
        "no blocks" if not admission.blocks else f"block{'s' * (len(admission.blocks) > 1)} {_list(admission.blocks)}"
    )
    hit = f"hitting {plural(admission.computed, 'token')} " if admission.computed else ""
    return f"{admission.req} {verb} {hit}on {blocks}"


def _parts(batch: Iterable[Part]) -> str:
    return "; ".join(
        f"{part.req} computes {ranges(range(part.start, part.start + len(part.slots)))} in slot"
        f"{'s' * (len(part.slots) > 1)} {ranges(part.slots)}"
        for part in batch
    )


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


class RowNames:
    """Whose rows the numbers of a trace are."""

    def __init__(self, trace: Trace) -> None:
        self._saved: dict[tuple[str, int], tuple[str, int, int]] = {}
        for event in trace.events:
            if isinstance(event, Save) and event.error is None:
                places = [(part.req, part.start + i) for part in event.batch for i in range(len(part.slots))]
                for key, column in event.rows.items():
                    for (req, position), row in zip(places, column, strict=False):
                        self._saved.setdefault((key, row), (req, position, event.label))

    def told(self, key: str, row: int) -> str:
        """``r1's 3 (step 2)``, for the row that step 2 computed for r1 at position 3."""
        if row == 0:
            return ZEROS
        if (key, row) not in self._saved:
            return f"row {row}, which no step saved"
        req, position, label = self._saved[key, row]
        return f"{req}'s {position} (step {label})"


@dataclass(frozen=True)
class Difference:
    """One row that is not the one due. `position` is the request's; -1 for a difference that is no row's."""

    key: str
    req: str
    position: int
    expected: str
    found: str
    slot: int = -1
    """Of an entry of a table that has one a slot."""


@dataclass(frozen=True)
class FailureWords:
    """A failure taken apart. `differences` are its wrong rows, where rows are what is wrong."""

    headline: str
    expected: str
    found: str
    differences: tuple[Difference, ...]


def failure_words(trace: Trace, failure: Failure) -> FailureWords:
    """Tell a failure by rows and positions where it is about rows, and in its own words where it is not."""
    what = failure.what.removeprefix("expected ")
    expected, separator, found = what.partition(", found ")
    event = trace.events[failure.index] if 0 <= failure.index < len(trace.events) else None
    where = "the run" if event is None else event_words(event).split(";", maxsplit=1)[0].split(":", maxsplit=1)[0]
    if failure.kind == "tables" and (tables := _TABLES.search(failure.what)) is not None:
        different = tuple(_cells(tables["table"], _value(tables["expected"]), _value(tables["found"])))
        if different:
            return FailureWords(f"after {where}: the table {tables['table']} is wrong", "", "", different)
    if failure.kind != "outcome" or not separator:
        return FailureWords(f"{where}: {failure.kind}", "", failure.what, ())
    handed = parse_due(found)
    if isinstance(event, Materialize) and event.due is not None and handed is not None:
        differences = tuple(differ(event.due, handed, RowNames(trace)))
        wrong = sum(difference.position >= 0 for difference in differences)
        told = f"{plural(wrong, 'row')} wrong" if wrong else "wrong outputs"
        return FailureWords(f"{where}: {told}", "", "", differences)
    return FailureWords(f"{where}: not what is due", _short(expected), _short(found), ())


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return None


def _cells(table: str, expected: object, found: object) -> Iterable[Difference]:
    """The entries in which two tables differ; none for what is not a table."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}, key=str):
            mine, theirs = expected.get(key, "none"), found.get(key, "none")
            if mine != theirs:
                cells = list(_cells(f"{table} of {key_name(str(key))}", mine, theirs))
                yield from cells or [Difference(table, str(key), -1, str(mine), str(theirs))]
    elif isinstance(expected, tuple) and isinstance(found, tuple) and len(expected) == len(found):
        for slot, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
            if mine != theirs:
                yield Difference(table, f"slot {slot}", -1, str(mine), str(theirs), slot)


def parse_due(text: str) -> Due | None:
    """The inverse of `str` of what was handed over; None for any other text."""
    match = _DUE.search(text)
    if match is None:
        return None
    try:
        return Due(rows=ast.literal_eval(match["rows"]), spans=ast.literal_eval(match["spans"]))
    except (ValueError, SyntaxError):
        return None


def differ(due: Due, found: Due, names: RowNames) -> Iterable[Difference]:
    """Every row, span and key in which two outputs differ."""
    for req in dict.fromkeys((*due.spans, *found.spans)):
        if due.spans.get(req) != found.spans.get(req):
            yield Difference("", req, -1, f"span {due.spans.get(req)}", f"span {found.spans.get(req)}")
    for key in dict.fromkeys((*due.rows, *found.rows)):
        mine, theirs = due.rows.get(key, {}), found.rows.get(key, {})
        for req in dict.fromkeys((*mine, *theirs)):
            wanted, got = mine.get(req), theirs.get(req)
            if wanted is None or got is None or len(wanted) != len(got):
                yield Difference(key, req, -1, _rows(wanted), _rows(got))
                continue
            start = due.spans.get(req, (0, 0))[0]
            for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
                if a != b:
                    yield Difference(key, req, start + i, names.told(key, a), names.told(key, b))


def _rows(column: Sequence[int] | None) -> str:
    return "no rows" if column is None else plural(len(column), "row")


def _short(text: str, most: int = 600) -> str:
    return text if len(text) <= most else f"{text[:most]} …"
