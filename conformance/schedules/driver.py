"""What a driver is, and what it tells of an implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from conformance.schedules.trace import Due, Event

INJECTED = "injected"
"""Stands for an error's name where the failure that the trace asked for came out of the call, and consumed its step."""


@dataclass(frozen=True)
class Outcome:
    """What one event came to: an error's class name, or what was handed over, or nothing."""

    error: str | None = None
    due: Due | None = None
    detail: str = ""
    """The error's message. Never compared."""


@dataclass(frozen=True)
class Snapshot:
    """The tables of a cache that any implementation of the machine has, between two events.

    `occupancy` has no entry for a key with every slot absent. `writes` are the tasks that are not done yet, as
    (request or None, write_n, state). `unfetched` counts, by slot, planned reads that still need its pool row.
    """

    version: tuple[int, ...]
    occupancy: Mapping[str, tuple[str, ...]]
    writes: tuple[tuple[str | None, int, str], ...]
    unfetched: tuple[int, ...]
    charged: int
    pages_held: int
    emitted: Mapping[str, int]


class Driver(Protocol):
    """Applies events to one cache."""

    def apply(self, event: Event) -> Outcome:
        """Apply one event. Errors of the contract are outcomes; any other error is raised."""
        ...

    def snapshot(self) -> Snapshot:
        """The tables as they are now."""
        ...
