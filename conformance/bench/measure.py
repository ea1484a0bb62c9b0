"""Interleaved repeats, medians and spread.

Every contender takes a short burst of steps in turn, the order moving on by one each round, so that whatever else the
machine does meets all of them alike. The first steps of a burst are not counted: they bring the contender's memory
back to the processor's caches, and give a thread of the one before time to end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

Burst: TypeAlias = Callable[[], Mapping[str, float]]
"""Takes one step, checks what it returned, and tells the seconds of each part of it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often."""

    rounds: int = 30
    burst: int = 4
    """Counted steps of a contender in one round."""
    warm: int = 2
    """Steps before these."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds of one part: median, quartiles, and how many were counted."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, seconds: list[float]) -> Figure:
        """Of at least one measurement."""
        ordered = sorted(seconds)
        last = len(ordered) - 1
        return cls(median(ordered), ordered[round(last / 4)], ordered[round(last * 3 / 4)], len(ordered))


Figures: TypeAlias = Mapping[str, Mapping[str, Figure]]
"""By contender and part."""


def interleave(steps: Mapping[str, Burst], pace: Pace) -> Figures:
    """Measure every contender."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    names = list(steps)
    for turn in range(pace.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()
            for i in range(pace.warm + pace.burst):
                parts = steps[name]()
                if i >= pace.warm:
                    for part, took in parts.items():
                        seconds[name].setdefault(part, []).append(took)
    return {name: {part: Figure.of(took) for part, took in parts.items()} for name, parts in seconds.items()}
