"""`RecyclingAllocator`: host memory for large outputs, used again once the consumer has dropped it.

A fresh large tensor costs a page fault for every 4 KiB when it is first filled, several times the copy itself.
Memory that the consumer has let go of is warm. Guarantees: what was handed out is never touched while any tensor still
views it; idle memory stays below `max_idle_bytes`.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

OutputAllocator: TypeAlias = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes an uninitialised contiguous host tensor of a shape and dtype. Called on the thread that gathers."""

_Block: TypeAlias = npt.NDArray[np.uint8]

SMALL_BYTES = 64 * 1024
"""Below this, torch's own allocator is as good: malloc reuses such memory itself."""


class RecyclingAllocator:
    """An `OutputAllocator`. Thread-safe: idle blocks stand in a deque, whose ends are atomic."""

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle = max_idle_bytes
        self._idle: deque[_Block] = deque()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for later."""
        return sum(block.nbytes for block in list(self._idle))

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, on memory of its own for as long as anything views it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._take(nbytes)
        lent = block[:nbytes]
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def _take(self, nbytes: int) -> _Block:
        """An idle block that fits without wasting half of it, or a new one."""
        for _ in range(len(self._idle)):
            try:
                block = self._idle.popleft()
            except IndexError:  # another thread took it
                break
            if nbytes <= block.nbytes <= 2 * nbytes:
                return block
            self._idle.append(block)
        step = 1 << max(12, nbytes.bit_length() - 3)  # size classes, so that hits of like length share blocks
        return np.empty(-(-nbytes // step) * step, dtype=np.uint8)

    def _give_back(self, block: _Block) -> None:
        self._idle.append(block)
        while self.idle_bytes > self._max_idle:
            try:
                self._idle.popleft()
            except IndexError:
                return
