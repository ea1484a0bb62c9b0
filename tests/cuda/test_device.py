"""`CudaDevice`: what is handed to it is safe from the next forward, and lands whole."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from conformance.device.backends import Backend
from conformance.device.check import QUICK, Forward
from omni_prefix_fast.cuda import CudaDevice
from omni_prefix_fast.pool import ROW_DTYPES

DTYPES = sorted(ROW_DTYPES, key=str)
ROWS = 512


def rows(backend: Backend, dtype: torch.dtype, count: int = ROWS, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bits of a type, on the device and on the host."""
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count, width * dtype.itemsize), dtype=torch.uint8)
    return bits.clone().view(dtype).to(backend.torch_device), bits.view(dtype)


def same_bits(got: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two host tensors hold the same bytes."""
    return torch.equal(got.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def overwrite(tensor: torch.Tensor) -> None:
    """What the next forward does, in the same stream."""
    tensor.view(torch.uint8).fill_(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_launch_is_safe_from_the_next_forward(backend: Backend, dtype: torch.dtype) -> None:
    """Behind a busy forward, and overwritten right after the launch: the former rows land."""
    device = backend.make_device()
    live, right = rows(backend, dtype)
    out = torch.empty(right.shape, dtype=dtype, pin_memory=device.pins_memory)
    Forward(backend, QUICK)()
    transfer = device.launch([(live, out)])
    overwrite(live)
    transfer.wait()
    assert transfer.landed()
    assert same_bits(out, right)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_clone_is_private_and_every_way_off_the_device_is_right(backend: Backend, dtype: torch.dtype) -> None:
    """Overwriting the source changes nothing; all rows, some rows, and pieces in a row come back bit for bit."""
    device = backend.make_device()
    live, right = rows(backend, dtype)
    clone = device.clone(live, dtype)
    overwrite(live)
    whole = torch.empty(right.shape, dtype=dtype)
    device.copy_to_host(clone, whole)
    assert same_bits(whole, right)
    index = np.arange(ROWS - 1, 0, -3)
    some = torch.empty((len(index), *right.shape[1:]), dtype=dtype)
    device.rows_to_host(clone, index, some)
    assert same_bits(some, right.view(torch.uint8)[torch.from_numpy(index)].view(dtype))
    gathered = device.gather_to_host([clone[:5], clone[5:5], clone[5:]], 256)
    assert same_bits(gathered, right)


def test_host_rows_are_copied_at_once(backend: Backend) -> None:
    """Some keys are on the host already: they go the same way."""
    device = backend.make_device()
    host, out = torch.arange(6.0).reshape(3, 2), torch.empty(3, 2)
    live, right = rows(backend, torch.float32)
    landed = torch.empty(right.shape, pin_memory=device.pins_memory)
    transfer = device.launch([(host, out), (live, landed)])
    host.fill_(9)
    transfer.wait()
    assert torch.equal(out, torch.arange(6.0).reshape(3, 2))
    assert same_bits(landed, right)


def test_rows_are_widened_on_the_way(backend: Backend) -> None:
    """A key keeps the type of its first rows; narrower ones arrive with their values."""
    device = backend.make_device()
    live = torch.tensor([[1.5], [-2.25]], dtype=torch.float16, device=backend.torch_device)
    out = torch.empty((2, 1), dtype=torch.float32, pin_memory=device.pins_memory)
    device.launch([(live, out)]).wait()
    assert out.tolist() == [[1.5], [-2.25]]
    assert device.clone(live, torch.float32).tolist() == [[1.5], [-2.25]]


def test_many_launches_in_flight_land_in_their_own_places(backend: Backend) -> None:
    """Thirty launches from one reused buffer, waited for in any order."""
    device = backend.make_device()
    buffer = torch.zeros((64, 4), device=backend.torch_device)
    outs = [torch.empty((64, 4), pin_memory=device.pins_memory) for _ in range(30)]
    transfers = []
    for i, out in enumerate(outs):
        buffer.fill_(i)
        transfers.append(device.launch([(buffer, out)]))
    buffer.fill_(-1)
    for transfer in reversed(transfers):
        transfer.wait()
    assert [(out.min().item(), out.max().item()) for out in outs] == [(i, i) for i in range(30)]


@pytest.mark.hardware
def test_a_launch_does_not_wait_for_the_forward(backend: Backend) -> None:
    """With seconds of work queued before it, the launch returns, nothing has landed, and the forward has not ended."""
    device = backend.make_device()
    live, right = rows(backend, torch.bfloat16)
    out = torch.empty(right.shape, dtype=torch.bfloat16, pin_memory=True)
    device.launch([(live, out)]).wait()  # whatever is set up at the first use
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - a busy device, for a second or so
    transfer = device.launch([(live, out)])
    assert not transfer.landed()
    transfer.wait()
    assert same_bits(out, right)


@pytest.mark.hardware
def test_frozen_rows_are_given_back_after_the_wait(backend: Backend) -> None:
    """A hundred launches leave no device memory behind."""
    device = CudaDevice()
    live, right = rows(backend, torch.bfloat16, count=4096, width=256)
    out = torch.empty(right.shape, dtype=torch.bfloat16, pin_memory=True)
    device.launch([(live, out)]).wait()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        device.launch([(live, out)]).wait()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.hardware
def test_the_copy_runs_on_a_stream_of_its_own(backend: Backend) -> None:
    """A copy that was launched lands while a later, long forward is still running."""
    device = backend.make_device()
    live, right = rows(backend, torch.bfloat16)
    out = torch.empty(right.shape, dtype=torch.bfloat16, pin_memory=True)
    device.launch([(live, out)]).wait()
    transfer = device.launch([(live, out)])
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - a busy device, for two seconds
    ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ended.record()
    transfer.wait()
    assert not ended.query()  # type: ignore[no-untyped-call]
    assert same_bits(out, right)
