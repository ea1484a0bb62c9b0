"""Memory of outputs in the eager driver: recycled, never while somebody holds it, poison until written."""

from __future__ import annotations

import torch

from conformance.drivers.kept import POISON, WarmMemory


def test_memory_is_poison_and_nobodys_else() -> None:
    """Two tensors at once share nothing; each is poison to begin with."""
    allocate = WarmMemory()
    one, other = allocate((2, 3), torch.int64), allocate((2, 3), torch.int64)
    one.zero_()
    assert bool((other.view(torch.uint8) == POISON).all())
    assert allocate((0, 3), torch.float32).shape == (0, 3)


def test_memory_is_used_again() -> None:
    """What was dropped comes back, poisoned anew: otherwise a fault of recycling would not be met."""
    allocate = WarmMemory()
    first = allocate((2, 3), torch.int64).fill_(5)
    where = first.data_ptr()
    del first
    again = allocate((6,), torch.int64)
    assert again.data_ptr() == where
    assert bool((again.view(torch.uint8) == POISON).all())
