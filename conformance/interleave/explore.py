"""Runs of one small program under many strategies: every interleaving within a bound, or some, drawn.

A program takes the run's `SerialRuntime`, starts threads on it, and raises (an `AssertionError`, say) where its own
checks fail. It is run anew for every interleaving, so it makes all that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from conformance.interleave.runtime import SerialRuntime
from conformance.interleave.strategies import NEVER, Replay, Strategy
from conformance.interleave.tasks import EndlessError

Program: TypeAlias = Callable[[SerialRuntime], None]
Switches: TypeAlias = list[tuple[int, str]]

POINTS = 20_000
"""Points that a run of a small program may have."""


@dataclass(frozen=True)
class Explored:
    """What came of it."""

    runs: int
    points: int
    """Most points that a run had."""
    error: Exception | None = None
    """The first one. No run was made behind it."""
    switches: tuple[tuple[int, str], ...] = ()
    """Replays the run that ended with it."""

    def __str__(self) -> str:
        found = "nothing wrong" if self.error is None else f"{type(self.error).__name__} at switches {self.switches}"
        return f"{self.runs:,} interleavings of up to {self.points} points: {found}"


def run_once(
    program: Program, strategy: Strategy, *, quiet: Collection[str] = (), coarse: bool = False
) -> tuple[SerialRuntime, Exception | None]:
    """One run, and what it raised."""
    runtime = SerialRuntime(strategy, limit=POINTS, quiet=quiet, coarse=coarse)
    try:
        runtime.run(lambda: program(runtime))
    except Exception as error:  # noqa: BLE001 - whatever the program finds wrong is the finding
        return runtime, error
    return runtime, None


def exhaustive(
    program: Program,
    *,
    preemptions: int = 2,
    most: int = 50_000,
    quiet: Collection[str] = (),
    coarse: bool = False,
    prune: bool = False,
) -> Explored:
    """Every interleaving with up to so many preemptions, fewest first; up to the first error.

    A preemption takes the baton away from a thread that can go on. Who goes on where a thread stops is tried in every
    way, at no charge.

    With `prune`, what differs only in the order of operations on different things is tried once. That is as good where
    whatever threads share is touched between operations on something that they share, or beside explicit points.

    Raises:
        EndlessError: there are more than `most`. The program is too large for this.
    """
    pasts: set[tuple[object, ...]] | None = set() if prune else None
    levels: list[list[Switches]] = [[] for _ in range(preemptions + 1)]
    levels[0].append([])
    runs = points = 0
    for spent, level in enumerate(levels):
        while level:
            if runs == most:
                raise EndlessError(f"more than {most} interleavings; make the program smaller, or explore by `sample`")
            switches = level.pop()
            strategy = _Deviating(switches, pasts)
            runtime, error = run_once(strategy.watched(program), strategy, quiet=quiet, coarse=coarse)
            runs, points = runs + 1, max(points, runtime.points)
            if error is not None:
                return Explored(runs, points, error, tuple(runtime.switches))
            for point, preempts, others in strategy.seen:
                if spent + preempts <= preemptions:
                    levels[spent + preempts].extend([*switches, (point, other)] for other in others)
    return Explored(runs, points)


def sample(program: Program, strategies: Iterable[Strategy], *, quiet: Collection[str] = ()) -> Explored:
    """One run a strategy, up to the first error."""
    runs = points = 0
    for strategy in strategies:
        runtime, error = run_once(program, strategy, quiet=quiet)
        runs, points = runs + 1, max(points, runtime.points)
        if error is not None:
            return Explored(runs, points, error, tuple(runtime.switches))
    return Explored(runs, points)


class _Deviating(Replay):
    """Replays some switches, and notes what else could have been done behind the last of them, where it is explored."""

    def __init__(self, switches: Sequence[tuple[int, str]], pasts: set[tuple[object, ...]] | None) -> None:
        super().__init__(switches)
        self._pasts = pasts
        self._last = max((point for point, _ in switches), default=-1)
        self.seen: list[tuple[int, bool, tuple[str, ...]]] = []
        """Point, whether another choice is a preemption, and the other choices."""
        self._runtime: SerialRuntime | None = None

    def watched(self, program: Program) -> Program:
        """The program, whose runtime says what is explored."""

        def run(runtime: SerialRuntime) -> None:
            self._runtime = runtime
            runtime.prunes = self._pasts is not None
            runtime.explored = True
            program(runtime)

        return run

    def next_look(self, point: int) -> int:
        """See `Strategy`."""
        return point if point > self._last else min(super().next_look(point), self._last + 1, NEVER)

    def choose(self, point: int, running: str | None, ready: Sequence[str]) -> str:
        """See `Strategy`."""
        chosen = super().choose(point, running, ready)
        if point > self._last and self._runtime is not None and self._runtime.explored:
            if self._pasts is not None:
                here = (self._runtime.baton.past, running, *ready)
                if here in self._pasts:
                    return chosen
                self._pasts.add(here)
            others = tuple(name for name in ready if name != chosen)
            self.seen.append((point, running is not None, others))
        return chosen
