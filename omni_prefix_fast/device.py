"""What touches the accelerator: freezing rows so that the next forward cannot change them, and moving them to the host.

`launch` starts the copies of a whole step and returns at once with a `Transfer`; only the committer waits for it. The
code above is the same for every device. `HostDevice` is synchronous: whatever it returns has landed. It serves tensors
of any device (torch waits for the stream that produced them). `cuda.CudaDevice` overlaps copies with the next forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from omni_prefix_fast.pool import indexable
from omni_prefix_fast.types import IntArray


class Transfer(Protocol):
    """Copies on their way to the host. Holds whatever they read until `wait` returns."""

    def landed(self) -> bool:
        """Whether every row is on the host. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until every row is on the host. Raises what the device raises. Committer only."""
        ...


class Device(Protocol):
    """Row movement, as the code above needs it."""

    pins_memory: bool
    """Whether host memory that `launch` copies into should be page-locked."""

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A private copy of `rows` on their device, as `dtype`, taken before the next forward. Engine thread."""
        ...

    def launch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """Start copying each (rows, host out). Sources may be overwritten as soon as this returns. Engine thread."""
        ...

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Copy `rows` into host `out` (same shape; `out`'s dtype holds every value), and wait for it. Any thread."""
        ...

    def rows_to_host(self, rows: torch.Tensor, index: IntArray, out: torch.Tensor) -> None:
        """Copy some rows of a `clone` into host `out`, and wait for it. Any thread."""
        ...

    def gather_to_host(self, parts: Sequence[torch.Tensor], chunk_bytes: int) -> torch.Tensor:
        """Concatenate parts of `clone`s along the first dimension on the host, at most `chunk_bytes` a copy."""
        ...


class Landed:
    """A transfer that was over when it was launched."""

    def landed(self) -> bool:
        """See `Transfer`."""
        return True

    def wait(self) -> None:
        """See `Transfer`."""


class HostDevice:
    """Synchronous row movement, for host tensors and, waiting for each copy, for any device."""

    pins_memory = False

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        return rows.detach().to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)

    def launch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """See `Device`."""
        for rows, out in copies:
            self.copy_to_host(rows, out)
        return Landed()

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Device`."""
        out.copy_(rows.detach() if rows.requires_grad else rows)

    def rows_to_host(self, rows: torch.Tensor, index: IntArray, out: torch.Tensor) -> None:
        """See `Device`."""
        picked = indexable(rows)[torch.from_numpy(index).to(rows.device)]
        self.copy_to_host(picked.view(rows.dtype), out)

    def gather_to_host(self, parts: Sequence[torch.Tensor], chunk_bytes: int) -> torch.Tensor:
        """See `Device`."""
        first = parts[0]
        out = torch.empty((sum(p.shape[0] for p in parts), *first.shape[1:]), dtype=first.dtype)
        rows = max(1, chunk_bytes // max(1, math.prod(first.shape[1:]) * first.element_size()))
        at = 0
        for piece in _pieces(parts, rows):
            self.copy_to_host(piece, out[at : at + piece.shape[0]])
            at += piece.shape[0]
        return out


def _pieces(parts: Sequence[torch.Tensor], rows: int) -> Iterator[torch.Tensor]:
    """The rows of all parts, in order, in pieces of at most `rows`.

    A long request has a part for each of its decode steps. Those on the host are put together first, since a copy of
    each costs more than its bytes.
    """
    together: list[torch.Tensor] = []
    room = rows
    for part in parts:
        for piece in torch.split(part, rows) if part.shape[0] > rows else (part,):
            if not piece.is_cpu:
                yield piece
                continue
            if piece.shape[0] > room:
                yield _joined(together)
                together, room = [], rows
            together.append(piece)
            room -= piece.shape[0]
    if together:
        yield _joined(together)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([indexable(part) for part in parts]).view(parts[0].dtype) if len(parts) > 1 else parts[0]
