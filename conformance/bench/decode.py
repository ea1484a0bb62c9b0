"""Decode steps: every request computes one token. Blocks fill up, requests end, others take their blocks over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from conformance.bench.contenders import COPY, Contender, Sizes
from conformance.bench.feed import Admission, Feed, Step, same_rows
from conformance.bench.measure import Burst, Figures, Pace, interleave
from omni_prefix_fast import OmniPrefixCacheManager
from omni_prefix_fast.metrics import LockTimes

CODES = "codes"
"""The deferred key."""

STEP, LOCKED, LOCKED_ONCE = "save + materialize", "state lock held", "state lock held at a time"

INPUTS = 8
"""Different steps' tensors, used in turn."""


@dataclass(frozen=True, slots=True)
class Decode:
    """What is decoded. `blocks` requests end after that many blocks; blocks lie spread over the whole cache."""

    batch: int
    width: int = 2048
    deferred: int = 0
    """int64 numbers a row of the deferred key; 0: no such key."""
    block_size: int = 16
    blocks: int = 4
    num_blocks: int = 0
    """0: as many as the requests need."""
    chunk: int = 4096
    """Tokens of the largest step while all slots are written for the first time."""

    @property
    def sizes(self) -> Sizes:
        """Sizes of the caches."""
        needed = self.batch * self.blocks + 1
        return Sizes(
            num_blocks=max(self.num_blocks, needed),
            max_requests=self.batch,
            max_blocks=self.blocks,
            capacity=max(self.chunk, self.batch * self.block_size),
            block_size=self.block_size,
            deferred=frozenset({CODES} if self.deferred else ()),
        )

    def table(self, request: int) -> list[int]:
        """Blocks of a request."""
        spread = (self.sizes.num_blocks - 1) // (self.batch * self.blocks)
        first = request * self.blocks
        return [1 + (first + i) * spread for i in range(self.blocks)]


@dataclass(slots=True)
class Inputs:
    """What the forwards return: the same tensors for every contender."""

    hidden: list[torch.Tensor] = field(default_factory=list)
    codes: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def make(cls, rows: int, work: Decode, seed: int) -> Inputs:
        """Random rows."""
        random = torch.Generator().manual_seed(seed)
        return cls(
            [torch.randn((rows, work.width), generator=random).to(torch.bfloat16) for _ in range(INPUTS)],
            [
                torch.randint(1 << 40, (rows, work.deferred), generator=random)
                for _ in range(INPUTS if work.deferred else 0)
            ],
        )

    def of_step(self, number: int, rows: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Hidden states and mm outputs of a step."""
        at = number % INPUTS
        return self.hidden[at][:rows], {CODES: self.codes[at][:rows]} if self.codes else {}


class Decoder:
    """One contender, decoding for ever."""

    def __init__(self, feed: Feed, work: Decode, inputs: Inputs) -> None:
        self._feed = feed
        self._work = work
        self._inputs = inputs
        self._number = 0
        self._generation = 0
        self._finished: list[str] = []
        self._lock_times = LockTimes()
        self._touch_every_slot()
        self._steps = self._forever()

    def __call__(self) -> Mapping[str, float]:
        """One decode step."""
        return next(self._steps)

    def close(self) -> None:
        """Shut the cache down."""
        self._feed.cache.shutdown()

    def _forever(self) -> Iterator[Mapping[str, float]]:
        work = self._work
        while True:
            req_ids = [f"request-{self._generation}-{i}" for i in range(work.batch)]
            self._generation += 1
            admissions = [Admission(r, work.table(i), 0, work.block_size) for i, r in enumerate(req_ids)]
            self._run(Step(new=admissions, finished=self._finished), work.batch * work.block_size)
            decode = Step(running=dict.fromkeys(req_ids, 1))
            for _ in range(work.block_size * (work.blocks - 1)):
                yield self._run(decode, work.batch)
            self._finished = req_ids

    def _run(self, step: Step, rows: int) -> Mapping[str, float]:
        hidden, mm = self._inputs.of_step(self._number, rows)
        self._number += 1
        outputs, times = self._feed.run(step, hidden, mm)
        counts = [step.running.get(r, self._work.block_size) for r in self._feed.batch.req_ids]
        same_rows(outputs, dict(zip(self._feed.batch.req_ids, torch.split(hidden, counts), strict=True)))
        for key, value in mm.items():
            same_rows(outputs, dict(zip(self._feed.batch.req_ids, torch.split(value, counts), strict=True)), key)
        return {**asdict(times), STEP: times.save + times.materialize, **self._locked()}

    def _locked(self) -> Mapping[str, float]:
        """How long our cache held its state lock since the last step: all holds together, and on average."""
        cache = self._feed.cache
        if not isinstance(cache, OmniPrefixCacheManager):
            return {}
        before, self._lock_times = self._lock_times, cache.lock_times()
        held = self._lock_times.held_s - before.held_s
        return {LOCKED: held, LOCKED_ONCE: held / (self._lock_times.acquisitions - before.acquisitions)}

    def _touch_every_slot(self) -> None:
        """Fault every page in before anything is timed."""
        work = self._work
        hidden, mm = self._inputs.of_step(0, work.sizes.capacity)
        whole = work.blocks * work.block_size
        at_once = max(1, work.sizes.capacity // whole)
        for first in range(0, work.batch, at_once):
            group = range(first, min(first + at_once, work.batch))
            step = Step(new=[Admission(f"first-{i}", work.table(i), 0, whole) for i in group], finished=self._finished)
            rows = len(group) * whole
            self._feed.run(step, hidden[:rows], {key: value[:rows] for key, value in mm.items()})
            self._finished = [f"first-{i}" for i in group]


def copier(work: Decode, inputs: Inputs) -> Burst:
    """A plain copy of the bytes of a step, three times, into warm memory: to a page, to the pool, to the consumer."""
    number = 0
    outs = [[torch.empty_like(t[: work.batch]) for _ in range(3)] for t in (*inputs.hidden[:1], *inputs.codes[:1])]

    def copy() -> Mapping[str, float]:
        nonlocal number
        hidden, mm = inputs.of_step(number, work.batch)
        number += 1
        began = perf_counter()
        for rows, into in zip((hidden, *mm.values()), outs, strict=True):
            for out in into:
                out.copy_(rows)
        return {STEP: perf_counter() - began}

    return copy


def measure_decode(work: Decode, contenders: Mapping[str, Contender], pace: Pace, seed: int = 0) -> Figures:
    """Measure one batch size."""
    inputs = Inputs.make(work.sizes.capacity, work, seed)
    decoders = {name: Decoder(contender(work.sizes), work, inputs) for name, contender in contenders.items()}
    try:
        return interleave({**decoders, COPY: copier(work, inputs)}, pace)
    finally:
        for decoder in decoders.values():
            decoder.close()


def measure_blocks(work: Decode, counts: Sequence[int], contender: Contender, pace: Pace, seed: int = 0) -> Figures:
    """Measure the same steps in caches of different sizes; figures by number of blocks."""
    works = {str(count): replace(work, num_blocks=count) for count in counts}
    inputs = Inputs.make(work.sizes.capacity, work, seed)
    decoders = {name: Decoder(contender(one.sizes), one, inputs) for name, one in works.items()}
    try:
        return interleave(decoders, pace)
    finally:
        for decoder in decoders.values():
            decoder.close()
