"""A request hits a long prefix. What the hit adds to its step: planning, gathering, putting together.

Measured are a step whose only request hits the prefix and computes one block more, and the same step without the hit.
The difference is what the hit adds, whenever and on whichever thread an implementation does the work. Outputs are
dropped before the next step, as a consumer drops them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import perf_counter

import torch

from conformance.bench.contenders import COPY, Contender, Sizes
from conformance.bench.feed import Admission, Feed, Outputs, Step, Times, same_rows
from conformance.bench.measure import Burst, Figure, Figures, Pace, interleave

WITH, WITHOUT = "step with the hit", "the same step without it"


@dataclass(frozen=True, slots=True)
class Hit:
    """How long, and how wide."""

    rows: int
    width: int = 2048
    block_size: int = 16
    chunk: int = 4096
    """Tokens of the largest step while the prefix is computed."""

    @property
    def prefix(self) -> list[int]:
        """Blocks of the prefix; block 0 is the null block."""
        return list(range(1, 1 + self.rows // self.block_size))

    @property
    def sizes(self) -> Sizes:
        """Sizes of the caches: the prefix, and one block for each of the two steps' own tokens."""
        blocks = len(self.prefix)
        return Sizes(
            num_blocks=blocks + 3,
            max_requests=2,
            max_blocks=blocks + 1,
            capacity=min(self.chunk, self.rows),
            block_size=self.block_size,
        )


class Hitter:
    """One contender, hitting the same prefix again and again."""

    def __init__(self, feed: Feed, work: Hit, prefix: torch.Tensor, own: torch.Tensor) -> None:
        self._feed = feed
        self._work = work
        self._own = own
        self._expected = torch.cat([prefix, own])
        self._number = 0
        self._last = "prefix"
        capacity = work.sizes.capacity
        for at in range(0, work.rows, capacity):
            rows = prefix[at : at + capacity]
            first = Admission("prefix", work.prefix, 0, len(rows))
            step = Step(running={"prefix": len(rows)}) if at else Step(new=[first])
            feed.run(step, rows)

    def __call__(self) -> Mapping[str, float]:
        """Both steps, after one that is not counted. What was handed over is looked at when the clock stands."""
        blocks = self._work.prefix
        self._step([len(blocks) + 1], 0)
        outputs, without = self._step([len(blocks) + 1], 0)
        merged, with_it = self._step([*blocks, len(blocks) + 2], self._work.rows)
        same_rows(outputs, {f"request-{self._number - 2}": self._own})
        same_rows(merged, {f"request-{self._number - 1}": self._expected})
        return {**asdict(with_it), WITH: with_it.whole, WITHOUT: without.whole}

    def close(self) -> None:
        """Shut the cache down."""
        self._feed.cache.shutdown()

    def _step(self, blocks: list[int], computed: int) -> tuple[Outputs, Times]:
        req_id = f"request-{self._number}"
        new = Admission(req_id, blocks, computed, self._work.block_size)
        step = Step(new=[new], finished=[self._last])
        self._number += 1
        self._last = req_id
        return self._feed.run(step, self._own)


def _copier(prefix: torch.Tensor) -> Burst:
    """A plain copy of the prefix into warm memory."""
    out = torch.empty_like(prefix)

    def copy() -> Mapping[str, float]:
        began = perf_counter()
        out.copy_(prefix)
        return {WITH: perf_counter() - began, WITHOUT: 0.0}

    return copy


def measure_hit(work: Hit, contenders: Mapping[str, Contender], pace: Pace, seed: int = 0) -> Figures:
    """Measure one length."""
    random = torch.Generator().manual_seed(seed)
    prefix = torch.randn((work.rows, work.width), generator=random).to(torch.bfloat16)
    own = torch.randn((work.block_size, work.width), generator=random).to(torch.bfloat16)
    hitters = {name: Hitter(contender(work.sizes), work, prefix, own) for name, contender in contenders.items()}
    try:
        return interleave({**hitters, COPY: _copier(prefix)}, pace)
    finally:
        for hitter in hitters.values():
            hitter.close()


def added(figures: Mapping[str, Figure]) -> float:
    """Seconds that the hit adds to its step."""
    return figures[WITH].median - figures[WITHOUT].median
