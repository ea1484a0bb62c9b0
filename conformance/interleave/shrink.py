"""A failing interleaving, made small: fewer switches, and each as early as it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

Switch = tuple[int, str]


def ddmin(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A part of `items` that fails still, and no longer does with any single item left out. `items` itself fails."""
    kept = list(items)
    if kept and fails([]):
        return []
    size = max(1, len(kept) // 2)
    while kept:
        at, shrunk = 0, False
        while at < len(kept):
            candidate = kept[:at] + kept[at + size :]
            if len(candidate) < len(kept) and fails(candidate):
                kept, shrunk = candidate, True
            else:
                at += size
        if size == 1 and not shrunk:
            break
        size = max(1, min(size if shrunk else size // 2, len(kept) // 2))
    return kept


def shrink_switches(switches: Sequence[Switch], fails: Callable[[list[Switch]], bool]) -> list[Switch]:
    """Fewer switches with which the run fails still. `fails` replays some of them.

    A run without a switch has different points behind it, so what is left is tried for itself, not point by point.
    """
    return ddmin(sorted(switches), fails)
