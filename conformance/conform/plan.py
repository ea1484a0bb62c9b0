"""What a session is to run: which traces, on which drivers. Picklable, since workers get it whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.conform.coverage import Coverage
from conformance.drivers.subject import Failure, Subject
from conformance.mutants.runner import STRIDE

PER_PART = 25
"""Traces that a worker is given at a time: the same whatever the number of workers, so that reports are, too."""

Maker = Callable[[str], Subject]
"""Makes the subject of a driver's name. Raises `ValueError` for a name that it does not know."""


@dataclass(frozen=True)
class Plan:
    """Trace n of the session is that of seed `seed * STRIDE + n`; its threads are interleaved by the same seed."""

    seed: int
    drivers: tuple[str, ...]
    make: Maker
    mutant: str | None = None

    def trace_seed(self, n: int) -> int:
        """Seed of the session's trace n. Raises `ValueError` beyond the traces of one seed."""
        if n >= STRIDE:
            raise ValueError(f"a seed has {STRIDE:,} traces; for more, run the next --seed")
        return self.seed * STRIDE + n

    def options(self) -> dict[str, Any]:
        """What a checkpoint must agree on."""
        return {"seed": self.seed, "drivers": list(self.drivers), "mutant": self.mutant}

    def subjects(self) -> dict[str, Subject]:
        """A subject for each driver, made anew."""
        return {driver: self.make(driver) for driver in self.drivers}


@dataclass(frozen=True)
class Found:
    """Trace n failed on a driver. `lost`: with it went the process, so it cannot be run again to make it smaller."""

    n: int
    driver: str
    failure: Failure
    lost: bool = False


@dataclass
class Part:
    """What came of the traces `[first, last)`."""

    first: int
    last: int
    coverage: Coverage
    found: list[Found]

    def merge(self, other: Part) -> None:
        """Add the part behind this one. Raises `ValueError` if it is not the next."""
        if other.first != self.last:
            raise ValueError(f"traces {self.first}..{self.last - 1} are followed by {self.last}, not {other.first}")
        self.coverage.merge(other.coverage)
        self.found += other.found
        self.last = other.last
