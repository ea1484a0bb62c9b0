"""Memory of large outputs is used again, and never while anybody can see it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_prefix_fast.errors import OmniPrefixCacheConfigError
from omni_prefix_fast.recycler import SMALL_BYTES, OutputAllocator, RecyclingAllocator, checked

LARGE = (256, 256)
MIB = 1024 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64])
def test_a_large_tensor_is_of_the_shape_and_type_asked_for(dtype: torch.dtype) -> None:
    """Shape, type and contiguity are those of `torch.empty`."""
    rows = RecyclingAllocator(64 * MIB)((300, 256), dtype)
    assert (rows.shape, rows.dtype, rows.is_contiguous()) == (torch.Size((300, 256)), dtype, True)


def test_dropped_memory_is_used_again() -> None:
    """The second tensor of a size stands where the first one stood."""
    allocate = RecyclingAllocator(64 * MIB)
    first = allocate(LARGE, torch.float32)
    address = first.data_ptr()
    del first
    assert allocate.idle_bytes >= 256 * 256 * 4
    assert allocate(LARGE, torch.float32).data_ptr() == address
    assert allocate.idle_bytes >= 256 * 256 * 4  # given back again: nobody kept it


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda rows: rows[3:5],
    "split": lambda rows: torch.split(rows, 100)[1],
    "numpy and back": lambda rows: torch.from_numpy(rows.numpy()[7:9]),
    "reshaped": lambda rows: rows.view(-1),
    "another type": lambda rows: rows.view(torch.int32),
}


@pytest.mark.parametrize("view", VIEWS)
def test_memory_that_any_view_shows_is_left_alone(view: str) -> None:
    """A view keeps the memory, however it was made."""
    allocate = RecyclingAllocator(64 * MIB)
    rows = allocate(LARGE, torch.float32).fill_(1)
    kept = VIEWS[view](rows)
    before = kept.clone()
    del rows
    assert allocate.idle_bytes == 0
    allocate(LARGE, torch.float32).fill_(2)
    assert torch.equal(kept, before)


def test_idle_memory_is_bounded() -> None:
    """Whatever is dropped, no more than the limit is kept."""
    allocate = RecyclingAllocator(3 * MIB)
    held = [allocate((MIB,), torch.uint8) for _ in range(10)]
    held.clear()
    assert 0 < allocate.idle_bytes <= 3 * MIB


def test_nothing_is_kept_at_a_limit_of_zero() -> None:
    """Recycling can be switched off, and what was made lives on without its allocator."""
    allocate = RecyclingAllocator(0)
    rows = allocate(LARGE, torch.float32).fill_(7)
    allocate(LARGE, torch.float32).fill_(8)
    assert allocate.idle_bytes == 0
    del allocate
    gc.collect()
    assert bool((rows == 7).all())


def test_small_tensors_are_torchs_own() -> None:
    """Below the threshold nothing is recycled, since malloc does it."""
    allocate = RecyclingAllocator(64 * MIB)
    rows = allocate((SMALL_BYTES - 1,), torch.uint8)
    del rows
    assert allocate.idle_bytes == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=20))
def test_no_two_live_tensors_share_memory(moves: list[tuple[int, int]]) -> None:
    """Over any order of making and dropping, each live tensor keeps the value that it was filled with."""
    allocate = RecyclingAllocator(4 * MIB)
    live: dict[int, tuple[torch.Tensor, int]] = {}
    for number, (place, size) in enumerate(moves):
        live[place] = (allocate((size * SMALL_BYTES,), torch.uint8).fill_(number % 251), number % 251)
        assert all(bool((rows == value).all()) for rows, value in live.values())


WRONG: dict[str, OutputAllocator] = {
    "another type": lambda shape, dtype: torch.empty(tuple(shape), dtype=torch.float16),  # noqa: ARG005
    "too many rows": lambda shape, dtype: torch.empty((shape[0] + 1, *shape[1:]), dtype=dtype),
    "one dimension more": lambda shape, dtype: torch.empty((2, *shape), dtype=dtype),
    "not contiguous": lambda shape, dtype: torch.empty((*shape, 2), dtype=dtype)[..., 0],
    "on no device": lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device="meta"),
    "a leaf of autograd": lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, requires_grad=True),
    "no tensor": lambda shape, dtype: cast("torch.Tensor", torch.empty(tuple(shape), dtype=dtype).numpy()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_an_allocator_was_not_asked_for_is_refused(wrong: str) -> None:
    """Rows are never rounded or stretched into whatever an allocator made: the error says what it was to make."""
    asked = r"asked for an uninitialised contiguous host tensor of \(4, 2\) torch.float32 and returned"
    with pytest.raises(OmniPrefixCacheConfigError, match=asked):
        checked(WRONG[wrong])(torch.Size((4, 2)), torch.float32)


def test_a_right_allocator_is_asked_once() -> None:
    """What it made is what is handed out."""
    made = torch.empty(4, 2)
    assert checked(lambda *_: made)((4, 2), torch.float32) is made
