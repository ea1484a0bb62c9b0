"""Row movement of the synchronous device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_prefix_fast.device import HostDevice

DEVICE = HostDevice()


def test_clone_is_private_contiguous_and_detached() -> None:
    """Overwriting the source changes nothing; strides and gradients stay behind."""
    source = torch.arange(12.0).reshape(3, 4).T.requires_grad_()
    clone = DEVICE.clone(source, torch.float32)
    assert torch.equal(clone, source.detach())
    assert clone.is_contiguous()
    assert not clone.requires_grad
    with torch.no_grad():
        source.fill_(99)
    assert not (clone == 99).any()


def test_clone_copies_even_when_nothing_has_to_change() -> None:
    """The same dtype and layout is copied all the same."""
    source = torch.zeros(2, 2)
    assert DEVICE.clone(source, torch.float32).data_ptr() != source.data_ptr()


def test_clone_widens() -> None:
    """Rows of a narrower type become the key's type with their values."""
    clone = DEVICE.clone(torch.tensor([[1.5]], dtype=torch.float16), torch.float32)
    assert clone.dtype == torch.float32
    assert clone.item() == 1.5


def test_copy_lands_before_it_returns() -> None:
    """The copy is complete, converted and detached when the call returns."""
    out = torch.zeros(2, 2)
    DEVICE.copy_to_host(torch.full((2, 2), 3.0, dtype=torch.float16, requires_grad=True), out)
    assert (out == 3).all()
    assert not out.requires_grad


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    feature=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
    chunk_bytes=st.integers(1, 100),
)
def test_gather_is_concatenation(lengths: list[int], feature: tuple[int, ...], chunk_bytes: int) -> None:
    """Whatever the chunk size, empty parts included, the result is the parts one after another."""
    counter = iter(range(1000))
    parts = [
        torch.stack([torch.full(feature, float(next(counter))) for _ in range(n)]) if n else torch.zeros(0, *feature)
        for n in lengths
    ]
    out = DEVICE.gather_to_host(parts, chunk_bytes)
    assert torch.equal(out, torch.cat(parts))


@pytest.mark.parametrize("chunk_bytes", [1, 8, 24, 1000])
def test_gather_respects_the_chunk_size(chunk_bytes: int) -> None:
    """No single copy moves more than `chunk_bytes`, or one row where that is larger."""

    class Recording(HostDevice):
        sizes: list[int]

        def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
            self.sizes.append(rows.numel() * rows.element_size())
            super().copy_to_host(rows, out)

    device = Recording()
    device.sizes = []
    device.gather_to_host([torch.zeros(10, 2)], chunk_bytes)
    assert max(device.sizes) <= max(chunk_bytes, 8)
    assert sum(device.sizes) == 80
