"""A behaviour as a story: step by step, which thread did what, and what changed by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conformance.tla.tlc import State
from conformance.tla.values import format_value

NEVER_TOLD = frozenset(("event", "layout", "next_task", "owner"))
"""Variables that say nothing new: the event is the headline, the others follow from it."""

_LONGEST = 150


def _short(value: object) -> str:
    text = format_value(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def headline(state: State) -> tuple[str, str, str]:
    """Thread, action and arguments of the event that led to a state."""
    event = state.variables.get("event")
    if not isinstance(event, Mapping) or event.get("action") == "Init" != state.action:
        return "", state.action, ""
    rest = {key: value for key, value in event.items() if key not in {"thread", "action"}}
    told = ", ".join(f"{key} {_short(rest[key])}" for key in sorted(rest))
    return str(event.get("thread", "")), str(event.get("action", state.action)), told


def changes(before: object, after: object, name: str) -> Iterator[str]:
    """What differs, down to the entries of functions."""
    if before == after:
        return
    if isinstance(before, tuple) and not before and isinstance(after, Mapping):
        before = {}
    if isinstance(after, tuple) and not after and isinstance(before, Mapping):
        after = {}
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}, key=format_value):
            inner = f"{name}.{key}" if isinstance(key, str) else f"{name}[{format_value(key)}]"
            if key not in before:
                yield f"{inner} = {_short(after[key])}"
            elif key not in after:
                yield f"{inner} is gone"
            else:
                yield from changes(before[key], after[key], inner)
        return
    yield f"{name}: {_short(before)} -> {_short(after)}"


def tell(behaviour: Sequence[State], back_to: int | None = None) -> Iterator[str]:
    """The lines of the story."""
    for index, state in enumerate(behaviour):
        if index == 0:
            continue
        thread, action, arguments = headline(state)
        yield f"{index:3}  {thread:<9} {action}{'  ' if arguments else ''}{arguments}"
        previous = behaviour[index - 1].variables
        for name in sorted(state.variables):
            if name not in NEVER_TOLD:
                for change in changes(previous[name], state.variables[name], name):
                    yield f"{'':14} {change}"
    if back_to is not None:
        last = len(behaviour)
        yield "     and so for ever: nothing more happens" if back_to >= last else f"     and again from {back_to - 1}"


def summary(value: Any) -> str:
    """One value, shortened."""
    return _short(value)
