"""Small traces, each with one place where threads meet, for which every interleaving within a bound is tried.

Rows are numbers made of the request's letter and the position, so that a wrong one says where it belongs. A scenario is
a trace like any other: it replays on every driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from conformance.drivers.asynchronous import QUIET, Session
from conformance.interleave.explore import Explored, exhaustive, sample
from conformance.interleave.runtime import SerialRuntime
from conformance.interleave.strategies import Strategy
from conformance.schedules.oracle import HIDDEN_KEY
from conformance.schedules.trace import (
    Admission,
    Due,
    Event,
    Fail,
    Header,
    KeySetting,
    Materialize,
    Part,
    Rest,
    Save,
    Shutdown,
    Start,
    Trace,
)

BLOCK = 2
HIDDEN = KeySetting(name=HIDDEN_KEY, width=1, item_bytes=4)
CODES = KeySetting(name="codes", width=1, item_bytes=8, deferred=True)


@dataclass(frozen=True)
class Scenario:
    """A trace, and between which of its events other interleavings are looked for, the second one left out."""

    trace: Trace
    window: tuple[int, int]
    preemptions: int = 2
    """How many preemptions a search can afford."""

    def program(self, runtime: SerialRuntime, *, device_seed: int = 0) -> None:
        """One run of it. Raises `FoundError` where something goes wrong."""
        Session(self.trace, runtime, device_seed=device_seed, window=self.window).program()

    def explore(self, *, preemptions: int | None = None, coarse: bool = True) -> Explored:
        """Every interleaving of the window within so many preemptions, up to the first that goes wrong."""
        most = self.preemptions if preemptions is None else preemptions
        return exhaustive(self.program, preemptions=most, quiet=QUIET, coarse=coarse, prune=True)

    def sample(self, strategies: Iterable[Strategy]) -> Explored:
        """One run a strategy, up to the first that goes wrong."""
        return sample(self.program, strategies, quiet=QUIET)


def row(req: str, position: int) -> int:
    """The row of a request at a position, of every key."""
    return 1000 * (1 + ord(req) - ord("a")) + position


def trace(*events: Event, keys: tuple[KeySetting, ...] = (HIDDEN,), depth: int = 3, budget: int = 0) -> Trace:
    """A trace of a small cache."""
    header = Header(
        seed=0,
        block_size=BLOCK,
        num_blocks=6,
        keys=list(keys),
        staging_depth=depth,
        page_rows=8,
        budget_bytes=budget,
    )
    return Trace(header=header, events=list(events))


Placed: TypeAlias = tuple[int, int, list[int]]
"""First position, count, and block table of a request's part of a step."""


def start(finished: str = "", **admitted: Placed) -> Start:
    """A step starts, with requests that come in."""
    return Start(
        finished=list(finished),
        admitted=[Admission(req=r, computed=at, blocks=blocks) for r, (at, _, blocks) in admitted.items()],
        scheduled={r: count for r, (_, count, _) in admitted.items()},
    )


def save(label: int, keys: Sequence[KeySetting] = (HIDDEN,), **parts: Placed) -> Save:
    """A step is saved."""
    batch = [
        Part(req=r, start=at, slots=[blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(at, at + count)])
        for r, (at, count, blocks) in parts.items()
    ]
    rows = [row(r, p) for r, (at, count, _) in parts.items() for p in range(at, at + count)]
    return Save(label=label, batch=batch, padded=len(rows), rows={key.name: rows for key in keys})


def take(label: int, keys: Sequence[KeySetting] = (HIDDEN,), **owed: str) -> Materialize:
    """A step is handed over. What each request is owed is told by whose rows they are, from its first position on."""
    rows = {key.name: {r: [row(whose, p) for p, whose in enumerate(of)] for r, of in owed.items()} for key in keys}
    return Materialize(
        label=label, reqs=list(owed), due=Due(rows=rows, spans={r: (0, len(o)) for r, o in owed.items()})
    )


A: Placed = (0, 2, [0])
"""Two tokens into block 0."""
B: Placed = (2, 1, [0, 1])
"""A hit on block 0, and one token into block 1."""
NEW: Placed = (0, 1, [1])
"""One token into block 1, and no hit."""
BOTH = (HIDDEN, CODES)

SCENARIOS: Mapping[str, Scenario] = {
    # A hit is planned on rows that the committer writes, or is about to; builder and prefetch fetch the same read.
    "materialize against commit": Scenario(
        trace(
            start(a=A),
            save(0, a=A),
            take(0, a="aa"),
            start("a", b=B),
            save(1, b=B),
            take(1, b="aab"),
            start("b"),
            Rest(),
        ),
        (6, 7),
    ),
    # The hit was planned on an older tenant of the block; its producer is in the same step.
    "same-step hit with prefetch against save": Scenario(
        trace(
            start(c=A),
            save(0, c=A),
            take(0, c="cc"),
            start("c"),
            Rest(),
            start(a=A, b=B),
            save(1, a=A, b=B),
            take(1, a="aa", b="aab"),
            start("ab"),
            Rest(),
        ),
        (5, 8),
    ),
    # A step computes a block whose former rows a read of an earlier step is planned on, and not fetched yet.
    "claim against a planned read": Scenario(
        trace(
            start(a=A),
            save(0, a=A),
            start("a", b=B),
            save(1, b=B),
            take(1, b="aab"),
            start("b", d=A),
            save(2, d=A),
            start("d"),
        ),
        (6, 7),
        preemptions=1,
    ),
    # The end of a request seals its deferred write while a hit on its rows is planned.
    "finish against committer": Scenario(
        trace(
            start(a=A),
            save(0, BOTH, a=A),
            take(0, BOTH, a="aa"),
            start("a", b=B),
            save(1, BOTH, b=B),
            take(1, BOTH, b="aab"),
            start("b"),
            Rest(),
            keys=BOTH,
            budget=1000,
        ),
        (3, 4),
    ),
    # A step is being handed over as the cache is shut down.
    "shutdown against materialize": Scenario(
        trace(start(a=A), save(0, a=A), start("a", b=B), save(1, b=B), take(1, b="aab"), Shutdown()), (5, 6)
    ),
    # The one page is held by a step that a builder is about to consume, and by the write of its rows.
    "full staging pool with builder": Scenario(
        trace(start(a=A), save(0, a=A), take(0, a="aa"), start("a", b=NEW), save(1, b=NEW), take(1, b="b"), depth=1),
        (4, 5),
    ),
    # The copy that a builder waits for fails.
    "failing copy with a joiner": Scenario(
        trace(start(a=A), save(0, a=A), Fail(stage="copy"), take(0, a="aa"), start("a")), (3, 5)
    ),
}
