"""A failing interleaving, made small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from conformance.schedules.ddmin import ddmin

Switch: TypeAlias = tuple[int, str]

WINDOW = 6
"""How many points later switches are moved by, at most, to make up for one that is left out."""


def shrink_switches(switches: Sequence[Switch], fails: Callable[[list[Switch]], bool]) -> list[Switch]:
    """Fewer switches with which the run fails still. `fails` replays some of them.

    Without one switch all that follows may come some points earlier or later, so what is left is tried moved, too.
    """
    kept = ddmin(sorted(switches), fails)
    at = 0
    while at < len(kept):
        moved = _without(kept, at, fails)
        if moved is None:
            at += 1
        else:
            kept, at = ddmin(moved, fails), 0
    return kept


def _without(kept: list[Switch], at: int, fails: Callable[[list[Switch]], bool]) -> list[Switch] | None:
    """The switches without one of them and those behind it moved, if that fails."""
    for by in sorted(range(-WINDOW, WINDOW + 1), key=abs):
        behind = [(point + by, thread) for point, thread in kept[at + 1 :]]
        if by and behind and behind[0][0] >= 0 and fails([*kept[:at], *behind]):
            return [*kept[:at], *behind]
    return None
