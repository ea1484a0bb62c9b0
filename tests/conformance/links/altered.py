"""Traces with one thing wrong. Each change gives the trace and the events, first to last, that TLC may reject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.links.environment import Event
from conformance.tla.values import Function

Events = tuple[Event, ...]
Altered = tuple[Events, range]


def first(events: Events, action: str) -> int:
    """Where an action is taken for the first time."""
    return next(i for i, event in enumerate(events) if event["action"] == action)


def _line(event: Event) -> object:
    """Whose events follow one another whatever other threads do: a task's, or the engine thread's."""
    return event["task"] if event["thread"] == "committer" else event["thread"].replace("scheduler", "engine")


def dropped(events: Events, at: int) -> Altered:
    """Without one event: at the latest the next one of its line cannot happen."""
    left = (*events[:at], *events[at + 1 :])
    line = _line(events[at])
    return left, range(at, 1 + next(i for i, event in enumerate(left) if i >= at and _line(event) == line))


def early(events: Events, at: int) -> Altered:
    """With one event before the one of its line that it follows: it cannot happen there."""
    line = _line(events[at])
    to = next(i for i in reversed(range(at)) if _line(events[i]) == line)
    return (*events[:to], events[at], *events[to:at], *events[at + 1 :]), range(to, to + 1)


def misread(name: str, value: Any) -> Callable[[Events, int], Altered]:
    """With another table in an `Inspect`: the specification's is not this."""

    def change_it(events: Events, at: int) -> Altered:
        return altered(tables=Function({**events[at]["tables"], name: value}))(events, at)

    return change_it


def altered(**change: Any) -> Callable[[Events, int], Altered]:
    """With other arguments of one event: it cannot happen."""

    def change_it(events: Events, at: int) -> Altered:
        event = {**events[at], **change}
        assert event != events[at]
        return (*events[:at], event, *events[at + 1 :]), range(at, at + 1)

    return change_it
