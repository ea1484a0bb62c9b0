"""Delta debugging: a small part of a list that fails still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def ddmin(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A part of `items` that fails still, and does not with any single item left out.

    `fails` is asked of parts, in the order of the whole. That `items` itself fails is taken for granted.
    """
    kept = list(items)
    if kept and fails([]):
        return []
    size = max(1, len(kept) // 2)
    while kept:
        at, shrunk = 0, False
        while at < len(kept):
            candidate = kept[:at] + kept[at + size :]
            if candidate and fails(candidate):
                kept, shrunk = candidate, True
            else:
                at += size
        if size == 1 and not shrunk:
            break
        size = max(1, min(size if shrunk else size // 2, len(kept) // 2))
    return kept
