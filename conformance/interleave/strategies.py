"""Strategies: who goes on at a point. Each is made for one run, and the same arguments decide the same.

A strategy is asked where the running thread stops, and at the points that it looks at: `next_look` says which, so that
all others cost next to nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Protocol

NEVER = 1 << 60
"""A point that no run comes to."""


class Strategy(Protocol):
    """Decides who goes on."""

    looks_at_wakes: bool
    """Whether it is asked at the first point after a thread became able to go on, too."""

    def next_look(self, point: int) -> int:
        """The first point from `point` on at which it may take the baton away from a thread that can go on."""
        ...

    def choose(self, point: int, running: str | None, ready: Sequence[str]) -> str:
        """Who goes on: one of `ready`, in the order of their start. `running` is one of them, or None: it stopped."""
        ...


class Replay:
    """Does what was recorded, and otherwise lets the running thread go on. What cannot be done is passed over."""

    looks_at_wakes = False

    def __init__(self, switches: Sequence[tuple[int, str]]) -> None:
        self._switches = dict(switches)
        self._points = sorted(self._switches, reverse=True)

    def next_look(self, point: int) -> int:
        """See `Strategy`."""
        while self._points and self._points[-1] < point:
            self._points.pop()
        return self._points[-1] if self._points else NEVER

    def choose(self, point: int, running: str | None, ready: Sequence[str]) -> str:
        """See `Strategy`."""
        wanted = self._switches.get(point)
        return wanted if wanted is not None and wanted in ready else running or ready[0]


class Uniform:
    """At one point in `1 / pace`, on average, anybody goes on; so it is wherever a thread stops.

    A pace of 1 draws at every point. A smaller one lets threads run further, and costs less.
    """

    looks_at_wakes = False

    def __init__(self, seed: int, pace: float = 1.0) -> None:
        if not 0 < pace <= 1:
            raise ValueError(f"pace is {pace}; it is a probability above 0")
        self._random = random.Random(f"uniform {seed}")
        self._skip = None if pace == 1.0 else math.log(1.0 - pace)

    def next_look(self, point: int) -> int:
        """See `Strategy`."""
        if self._skip is None:
            return point
        return point + int(math.log(1.0 - self._random.random()) / self._skip)

    def choose(self, point: int, running: str | None, ready: Sequence[str]) -> str:  # noqa: ARG002 - whoever it was
        """See `Strategy`."""
        return ready[int(self._random.random() * len(ready))]


class Pct:
    """Probabilistic concurrency testing: the thread of the highest priority goes on, always.

    Priorities are drawn; at `depth - 1` points, drawn among the first `points`, the running thread falls behind all
    others. A fault that needs `depth` orderings is found in one run of `threads * points ** (depth - 1)`, at worst.
    """

    looks_at_wakes = True

    def __init__(self, seed: int, *, depth: int, points: int) -> None:
        self._random = random.Random(f"pct {seed}")
        changes = min(depth - 1, points)
        self._changes = sorted(self._random.sample(range(points), changes), reverse=True)
        self._priorities: dict[str, float] = {}
        self._lowest = 0.0

    def next_look(self, point: int) -> int:
        """See `Strategy`."""
        return max(point, self._changes[-1]) if self._changes else NEVER

    def choose(self, point: int, running: str | None, ready: Sequence[str]) -> str:
        """See `Strategy`."""
        for thread in ready:
            if thread not in self._priorities:
                self._priorities[thread] = self._random.random()
        while self._changes and self._changes[-1] <= point:
            self._changes.pop()
            if running is not None:
                self._lowest -= 1.0
                self._priorities[running] = self._lowest
        return max(ready, key=self._priorities.__getitem__)


def drawn(seed: int, points: int) -> Strategy:
    """The strategy of a seed, for runs of about so many points: of each kind, some."""
    rng = random.Random(f"strategy {seed}")
    if rng.random() < 0.5:
        return Pct(seed, depth=rng.choice((1, 2, 3, 5)), points=points)
    return Uniform(seed, rng.choice((0.005, 0.02, 0.05, 0.2)))
