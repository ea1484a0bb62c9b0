"""Whether an engine might make these events: the rules that neither a cache nor the reference model checks."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.schedules.trace import CLOSED, Event, Part, Save, Start, Unsaved


def engine_might(events: Sequence[Event]) -> bool:
    """Whether each started step is computed before the next one starts, and each request goes on where it was."""
    ends: dict[str, int] = {}
    started: Start | None = None
    """The step that was started and not computed yet."""
    for event in events:
        if isinstance(event, Start):
            if started is not None and started.scheduled:
                return False
            started = None if event.error == CLOSED else event
            for req in event.finished:
                ends.pop(req, None)
            ends.update({admission.req: admission.computed for admission in event.admitted})
        elif isinstance(event, (Save, Unsaved)) and event.batch:
            if started is None or not _fits(event.batch, started, ends):
                return False
            if isinstance(event, Unsaved) or event.error is None:
                ends.update({part.req: part.start + len(part.slots) for part in event.batch})
                started = None
    return True


def _fits(batch: Sequence[Part], started: Start, ends: dict[str, int]) -> bool:
    return {part.req: len(part.slots) for part in batch} == started.scheduled and all(
        ends.get(part.req) == part.start for part in batch
    )
