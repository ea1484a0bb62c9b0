"""A save that claims many slots while reads of earlier steps are pending: planned, but not handed over yet.

Three saves of the same rows: with no read pending; with reads pending that name none of the claimed slots; and with
reads pending that name them all, whose rows have to be kept for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from conformance.bench.contenders import Contender, Sizes
from conformance.bench.feed import Admission, Feed, Step, same_rows
from conformance.bench.measure import Figures, Pace, interleave

NONE, ELSEWHERE, HERE = "none pending", "pending elsewhere", "pending on these slots"


@dataclass(frozen=True, slots=True)
class Pending:
    """`readers` requests hit `hit_blocks` blocks each; the save claims `claim` slots."""

    readers: int = 64
    hit_blocks: int = 16
    claim: int = 4096
    width: int = 2048
    block_size: int = 16

    def prefix(self, reader: int) -> list[int]:
        """Blocks that a reader hits."""
        first = 1 + reader * self.hit_blocks
        return list(range(first, first + self.hit_blocks))

    @property
    def claimed_elsewhere(self) -> list[int]:
        """Blocks for the save that nobody reads."""
        first = 1 + self.readers * (self.hit_blocks + 1)
        return list(range(first, first + self.claim // self.block_size))

    @property
    def claimed_here(self) -> list[int]:
        """Blocks for the save that readers hit, the first readers first."""
        return list(range(1, 1 + self.claim // self.block_size))

    @property
    def sizes(self) -> Sizes:
        """Sizes of the caches."""
        return Sizes(
            num_blocks=self.claimed_elsewhere[-1] + 1,
            max_requests=self.readers + 2,
            max_blocks=max(self.hit_blocks + 1, self.claim // self.block_size),
            capacity=max(self.claim, self.readers * self.block_size, self.hit_blocks * self.block_size),
            block_size=self.block_size,
        )

    def check(self) -> None:
        """Raise `ValueError` where the claim does not fit onto the readers' blocks."""
        if self.claim % self.block_size or self.claim > self.readers * self.hit_blocks * self.block_size:
            raise ValueError(f"a claim of {self.claim} slots is not whole blocks of the readers' prefixes")


class Claimer:
    """One contender. A call makes the three saves, in an order that changes from call to call."""

    def __init__(self, feed: Feed, work: Pending, rows: Mapping[str, torch.Tensor]) -> None:
        self._feed = feed
        self._work = work
        self._rows = rows
        self._number = 0
        self._finished: list[str] = []
        self._write_prefixes(range(work.readers))

    def __call__(self) -> Mapping[str, float]:
        """Make each of the three saves."""
        kinds = (NONE, ELSEWHERE, HERE)
        turn = self._number % len(kinds)
        return {kind: self._save(kind) for kind in (*kinds[turn:], *kinds[:turn])}

    def close(self) -> None:
        """Shut the cache down."""
        self._feed.cache.shutdown()

    def _save(self, kind: str) -> float:
        work, feed = self._work, self._feed
        readers = [f"reader-{self._number}-{i}" for i in range(work.readers)]
        own = 1 + work.readers * work.hit_blocks
        hits = [
            Admission(r, [*work.prefix(i), own + i], work.hit_blocks * work.block_size, 1)
            for i, r in enumerate(readers)
        ]
        reading, times = feed.save(Step(new=hits, finished=self._finished), self._rows["own"])
        outputs = feed.materialize(reading, times) if kind == NONE else None
        claimer = f"claimer-{self._number}"
        claimed = work.claimed_here if kind == HERE else work.claimed_elsewhere
        claim = Step(new=[Admission(claimer, claimed, 0, work.claim)], finished=readers)
        claiming, claim_times = feed.save(claim, self._rows["claim"])
        if outputs is None:
            outputs = feed.materialize(reading, times, readers)
        one_block = work.hit_blocks * work.block_size
        prefixes = torch.split(self._rows["prefix"], one_block)
        expected = zip(readers, prefixes, torch.split(self._rows["own"], 1), strict=True)
        same_rows(outputs, {r: torch.cat([prefix, row]) for r, prefix, row in expected})
        same_rows(feed.materialize(claiming, times), {claimer: self._rows["claim"]})
        self._finished = [claimer]
        self._number += 1
        if kind == HERE:
            self._write_prefixes(range(-(-len(claimed) // work.hit_blocks)))
        return claim_times.save

    def _write_prefixes(self, readers: Sequence[int]) -> None:
        """Compute the readers' prefixes anew, a page at a time."""
        work = self._work
        length = work.hit_blocks * work.block_size
        at_once = max(1, work.sizes.capacity // length)
        for at in range(0, len(readers), at_once):
            group = readers[at : at + at_once]
            new = [Admission(f"prefix-{i}", work.prefix(i), 0, length) for i in group]
            rows = self._rows["prefix"][group[0] * length : (group[-1] + 1) * length]
            self._feed.run(Step(new=new, finished=self._finished), rows)
            self._finished = [admission.req_id for admission in new]


def measure_pending(work: Pending, contenders: Mapping[str, Contender], pace: Pace, seed: int = 0) -> Figures:
    """Measure the three saves."""
    work.check()
    random = torch.Generator().manual_seed(seed)
    lengths = {
        "prefix": work.readers * work.hit_blocks * work.block_size,
        "own": work.readers,
        "claim": work.claim,
    }
    rows = {
        name: torch.randn((length, work.width), generator=random).to(torch.bfloat16) for name, length in lengths.items()
    }
    claimers = {name: Claimer(contender(work.sizes), work, rows) for name, contender in contenders.items()}
    try:
        return interleave(claimers, pace)
    finally:
        for claimer in claimers.values():
            claimer.close()
