"""Traces whose consumers fail: one that dies, one that never consumes. What is due afterwards is worked out anew."""

from __future__ import annotations

from conformance.schedules.trace import (
    CONTRACT,
    MEMORY,
    ROW,
    TIMEOUT,
    Discard,
    Event,
    Materialize,
    Rest,
    Save,
    Shutdown,
    Trace,
)


def dies(trace: Trace, label: int) -> Trace:
    """The consumer of one step dies before it asks for its rows: the engine finds out, and discards the step.

    Nothing that others are due changes. Raises `ValueError` if nobody asks for the rows of `label`.
    """
    at = [i for i, event in enumerate(trace.events) if _consumes(event, label)]
    if not at:
        raise ValueError(f"nobody consumes the step of label {label}")
    events = list(trace.events)
    events[at[0]] = Discard(label=label)
    return trace.model_copy(update={"events": events})


def hoards(trace: Trace, label: int) -> Trace:
    """One step is never consumed, until a save finds no page for it: that one times out, and the engine discards.

    Raises `ValueError` if nobody consumes the step of `label`.
    """
    if not any(_consumes(event, label) for event in trace.events):
        raise ValueError(f"nobody consumes the step of label {label}")
    events: list[Event] = []
    unconsumed: set[int] = set()
    for event in trace.events:
        if _consumes(event, label):
            continue
        full = len(unconsumed) == trace.header.staging_depth
        if isinstance(event, Save) and event.error is None and full and label in unconsumed:
            events += [event.model_copy(update={"error": TIMEOUT}), Discard(label=label)]
            unconsumed.discard(label)
        elif isinstance(event, Save) and event.error == (MEMORY if full else TIMEOUT):
            continue  # where there is no page, nobody gets as far as a clone; where there is one, nobody waits
        if isinstance(event, (Rest, Shutdown)) and label in unconsumed:
            events.append(Discard(label=label))
            unconsumed.discard(label)
        events.append(event)
        if isinstance(event, Save) and event.error is None:
            unconsumed.add(event.label)
        elif isinstance(event, (Materialize, Discard)) and event.error != CONTRACT:
            unconsumed.discard(event.label)
    return trace.model_copy(update={"events": events})


def labels(trace: Trace) -> list[int]:
    """Steps that somebody consumes, in order."""
    return [e.label for e in trace.events if isinstance(e, (Materialize, Discard)) and _consumes(e, e.label)]


def _consumes(event: Event, label: int) -> bool:
    if not isinstance(event, (Materialize, Discard)) or event.label != label:
        return False
    return event.error in {None, ROW}
