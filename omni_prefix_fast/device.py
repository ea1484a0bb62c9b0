"""What touches the accelerator: cloning rows so that the next forward cannot change them, and copying them to the host.

`HostDevice` is synchronous: a copy has landed when the call returns. It serves tensors of any device (torch waits for
the stream that produced them), which is what `eager=True` asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Device(Protocol):
    """Row movement, as the code above needs it."""

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A private copy of `rows` on the device that they are on, as `dtype`."""
        ...

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Copy `rows` into host `out` (same shape; `out`'s dtype holds every value)."""
        ...

    def gather_to_host(self, parts: Sequence[torch.Tensor], chunk_bytes: int) -> torch.Tensor:
        """Concatenate `parts` along the first dimension on the host, at most `chunk_bytes` a copy."""
        ...


class HostDevice:
    """Synchronous row movement, for host tensors and, waiting for each copy, for any device."""

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        return rows.detach().to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Device`."""
        out.copy_(rows.detach())

    def gather_to_host(self, parts: Sequence[torch.Tensor], chunk_bytes: int) -> torch.Tensor:
        """See `Device`."""
        first = parts[0]
        out = torch.empty((sum(p.shape[0] for p in parts), *first.shape[1:]), dtype=first.dtype)
        at = 0
        for part in parts:
            row_bytes = max(1, part[:1].numel() * part.element_size())
            for piece in torch.split(part, max(1, chunk_bytes // row_bytes)):
                self.copy_to_host(piece, out[at : at + piece.shape[0]])
                at += piece.shape[0]
        return out
