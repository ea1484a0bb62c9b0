"""What is put to the test: an implementation of the contract, run on a whole trace.

Every command of the harness speaks of subjects only: `replay`, `conform`, the mutants and the pages. A subject runs a
trace from its first event to its first failure and tells what happened; one that has threads is told how to interleave
them, by a seed or by a saved `Interleaving`, and tells what it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from conformance.schedules.trace import Interleaving, Trace

Kind = Literal["outcome", "tables", "rule", "crash", "deadlock", "left behind"]


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong. `index` is the trace's event, -1 if it is no single event's."""

    index: int
    event: str
    kind: Kind
    what: str

    def __str__(self) -> str:
        where = "" if self.index < 0 else f"event {self.index} ({self.event}): "
        return f"{where}{self.kind}: {self.what}"


class Moment(NamedTuple):
    """One thing that happened, for whoever draws or tells the run.

    `action` is an action of the machine ("claim_slots", see docs/machine.md), or of the harness ("call", "return",
    "block", "run": what a thread asks for, what came of it, what it waits for, that it goes on).
    """

    at: int
    """Ordinal in the run; decisions of an interleaving count with the same numbers where there are any."""
    thread: str
    action: str
    details: Mapping[str, object] = MappingProxyType({})
    event: int = -1
    """Index of the trace's event in whose call it happened."""


@dataclass(frozen=True)
class Run:
    """What a subject did with a trace."""

    failure: Failure | None
    events: int
    """Events applied."""
    actions: Counter[str] = field(default_factory=Counter)
    """How often each action of the machine occurred."""
    interleaving: Interleaving | None = None
    """How the threads ran: given back to `run`, it replays this one."""
    points: int = 0
    """Points at which threads might have changed."""
    moments: tuple[Moment, ...] = ()
    """Everything, in order; only if it was asked for."""
    went_off: str | None = None
    """The stage of the trace's `Fail` events that did fail, the last one; None if none did, or nobody looked."""


class Subject(Protocol):
    """An implementation of the contract."""

    name: str
    interleaves: bool
    """Whether a trace can run in many ways."""

    def run(
        self, trace: Trace, *, seed: int = 0, interleaving: Interleaving | None = None, record: bool = False
    ) -> Run:
        """Run a trace. Never raises for what the implementation does wrong: that is the run's failure.

        Args:
            trace: what to run.
            seed: of the strategy that interleaves threads. Ignored without threads.
            interleaving: replays this one instead.
            record: tell the moments, too.
        """
        ...
