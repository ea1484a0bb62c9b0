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
from itertools import count
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from omni_prefix_fast.errors import OmniPrefixCacheConfigError

OutputAllocator: TypeAlias = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes an uninitialised contiguous host tensor of a shape and dtype. Called on the thread that gathers."""

_Block: TypeAlias = npt.NDArray[np.uint8]

SMALL_BYTES = 64 * 1024
"""Below this, torch's own allocator is as good: malloc reuses such memory itself."""


def checked(allocate: OutputAllocator) -> OutputAllocator:
    """`allocate`, of which a tensor that is not what was asked for is an error: rows would be rounded or cut to fit."""

    def run(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made: object = allocate(shape, dtype)
        if (
            not isinstance(made, torch.Tensor)
            or made.shape != torch.Size(shape)
            or made.dtype != dtype
            or made.device.type != "cpu"
            or made.requires_grad
            or not made.is_contiguous()
        ):
            raise OmniPrefixCacheConfigError(
                f"output_allocator was asked for an uninitialised contiguous host tensor of {tuple(shape)} {dtype} and "
                f"returned {_described(made)}"
            )
        return made

    return run


def _described(made: object) -> str:
    if not isinstance(made, torch.Tensor):
        return f"a {type(made).__name__}"
    return (
        f"one of {tuple(made.shape)} {made.dtype} on {made.device}, stride {made.stride()}, "
        f"requires_grad={made.requires_grad}"
    )


class _Loan(weakref.ref[_Block]):
    """A block while something views it. Several times cheaper than `weakref.finalize`."""

    __slots__ = ("block",)
    block: _Block


class RecyclingAllocator:
    """An `OutputAllocator`. Thread-safe: idle blocks stand in deques, whose ends are atomic."""

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle = max_idle_bytes
        self._idle: dict[int, deque[tuple[int, _Block]]] = {}
        """By size, each with the number of its return: the newest is taken first, the oldest of all is let go of."""
        self._returns = count()
        self._loans: dict[int, _Loan] = {}
        """By their own id, since an array cannot be hashed. A reference that is dropped never calls back."""

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for later."""
        return sum(size * len(blocks) for size, blocks in list(self._idle.items()))

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, on memory of its own for as long as anything views it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALL_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._take(nbytes)
        lent = block[:nbytes]
        loan = _Loan(lent, self._give_back)
        loan.block = block
        self._loans[id(loan)] = loan
        return torch.frombuffer(lent, dtype=dtype).view(tuple(shape))

    def _take(self, nbytes: int) -> _Block:
        """An idle block of the size class, or a new one. Classes lie so close that little of a block is wasted."""
        step = 1 << max(12, nbytes.bit_length() - 3)
        size = -(-nbytes // step) * step
        try:
            return self._idle[size].pop()[1]
        except LookupError:  # none of this size; or another thread took it
            return np.empty(size, dtype=np.uint8)

    def _give_back(self, loan: weakref.ref[_Block]) -> None:
        block = self._loans.pop(id(loan)).block
        self._idle.setdefault(block.nbytes, deque()).append((next(self._returns), block))
        while self.idle_bytes > self._max_idle:
            try:
                held = [blocks for blocks in list(self._idle.values()) if blocks]
                oldest = min(held, key=lambda blocks: blocks[0][0])
                oldest.popleft()
            except (IndexError, ValueError):  # another thread took it
                return
