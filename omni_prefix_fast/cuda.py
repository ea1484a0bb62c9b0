"""`CudaDevice`: copies on a stream of their own, so that the next forward does not wait for them.

`launch` freezes each live tensor with an on-device copy in the forward's stream (at device memory bandwidth), then
copies the frozen rows to page-locked host memory on the copy stream. The frozen rows live until the transfer was
waited for, so the allocator cannot hand their memory out while the copy still reads it. Imports without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_prefix_fast.device import HostDevice, Transfer
from omni_prefix_fast.pool import indexable
from omni_prefix_fast.types import IntArray


class CudaTransfer:
    """Copies on the copy stream, and the frozen rows that they read."""

    def __init__(self, event: torch.cuda.Event, frozen: list[torch.Tensor]) -> None:
        self._event = event
        self._frozen = frozen

    def landed(self) -> bool:
        """See `Transfer`."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `Transfer`."""
        self._event.synchronize()
        self._frozen.clear()


class CudaDevice(HostDevice):
    """Row movement on an NVIDIA or ROCm device. One copy stream, used by every thread."""

    pins_memory = True

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        self._copies = torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]
        self._frozen = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._frozen.record(torch.cuda.current_stream(self._device))

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`. In the forward's stream; the copy stream waits for it before it reads any clone."""
        private = super().clone(rows, dtype)
        self._mark_frozen()
        return private

    def launch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """See `Device`. Host sources are copied at once."""
        frozen: list[torch.Tensor] = []
        outs: list[torch.Tensor] = []
        for rows, out in copies:
            if rows.device.type == "cuda":
                frozen.append(super().clone(rows, out.dtype))
                outs.append(out)
            else:
                out.copy_(rows.detach())
        self._mark_frozen()
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # a sleeping wait, not a spinning one
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._frozen)
            for rows, out in zip(frozen, outs, strict=True):
                out.copy_(rows, non_blocking=True)
            done.record(self._copies)
        return CudaTransfer(done, frozen)

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Device`. On the copy stream, so that it does not queue behind the forward."""
        if rows.device.type != "cuda":
            out.copy_(rows.detach())
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._frozen)
            out.copy_(rows.detach())

    def rows_to_host(self, rows: torch.Tensor, index: IntArray, out: torch.Tensor) -> None:
        """See `Device`."""
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._frozen)
            picked = indexable(rows)[torch.from_numpy(index).to(rows.device)]
            out.copy_(picked.view(rows.dtype))

    def _mark_frozen(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._frozen = event
