"""Consumers that keep what they were handed for a while, and memory that is used again once they let go."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch

from conformance.drivers.fast import FastDriver
from conformance.drivers.rows import TornError
from conformance.schedules.trace import Due
from omni_prefix_fast import StageCacheOutputs
from omni_prefix_fast.recycler import SMALL_BYTES, RecyclingAllocator

POISON = 0x7B


class WarmMemory:
    """An `OutputAllocator`: recycled memory, as large outputs have it, for small ones too; poison until written."""

    def __init__(self) -> None:
        self._recycling = RecyclingAllocator(64 * SMALL_BYTES)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `OutputAllocator`."""
        lent = self._recycling((SMALL_BYTES,), torch.uint8)
        used = lent[: math.prod(shape) * dtype.itemsize]
        used.fill_(POISON)
        return used.view(dtype).view(tuple(shape))


class KeepingDriver(FastDriver):
    """Looks once more at what was handed over, some handovers later."""

    KEPT = 4

    _kept: deque[tuple[StageCacheOutputs, Due]] | None = None

    def due_of(self, outputs: StageCacheOutputs, expected: Due | None = None) -> Due:
        """See `FastDriver`."""
        due = super().due_of(outputs, expected)
        kept = self._kept = deque() if self._kept is None else self._kept
        kept.append((outputs, due))
        if len(kept) > self.KEPT:
            before, was = kept.popleft()
            if (found := super().due_of(before, was)) is not was:
                raise TornError(f"{was} was handed over, and became {found}")
        return due
