"""`PrefixBlockPool`: the durable host rows, one `(num_blocks, block_size, *feature)` tensor a key.

Only the committer writes rows. A reader gathers rows that it has pinned, so writer and reader never meet on a row and
neither takes a lock here.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from omni_prefix_fast.config import PrefixCacheConfig
from omni_prefix_fast.errors import OmniPrefixCacheContractError
from omni_prefix_fast.types import IntArray, Key

_SAME_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""For types that torch cannot index on the host: an integer of as many bytes."""

_UNINDEXED = frozenset(
    getattr(torch, name)
    for name in (
        *("uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
)

ROW_DTYPES = _UNINDEXED | {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
"""Types of which rows can be kept."""


def indexable(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that torch can gather and scatter."""
    return rows.view(_SAME_BITS[rows.dtype.itemsize]) if rows.dtype in _UNINDEXED else rows


ByteRows: TypeAlias = npt.NDArray[np.void]


def byte_rows(rows: torch.Tensor, count: int) -> ByteRows:
    """Host memory of a contiguous tensor as `count` opaque rows, `(count,)`: numpy copies each in one piece.

    Several times faster than torch's indexing for rows of a few KiB, and the same for every type. Rows of no bytes are
    one byte wide and empty: there is nothing to copy.
    """
    flat = rows.view(-1).view(torch.uint8).numpy()
    if not flat.size:
        return np.empty(0, dtype=np.dtype((np.void, 1)))
    return flat.view(_opaque(flat.size // count))


@cache
def _opaque(nbytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, nbytes))


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Shape and type of one key's rows."""

    dtype: torch.dtype
    feature: tuple[int, ...]

    @classmethod
    def of(cls, rows: torch.Tensor) -> RowSpec:
        """The spec of a tensor `(tokens, *feature)`."""
        return cls(rows.dtype, tuple(rows.shape[1:]))

    @classmethod
    def declared(cls, key: Key, row: Any) -> RowSpec:
        """The spec given as `(dtype, feature shape)`. Raises `OmniPrefixCacheContractError` if `row` is none."""
        try:
            dtype, feature = row
            shape = tuple(operator.index(size) for size in feature)
        except (TypeError, ValueError):
            dtype, shape = None, ()
        if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape):
            raise OmniPrefixCacheContractError(
                f"key {key!r}: {row!r} does not describe a row; give (dtype, feature shape), for example "
                "(torch.bfloat16, (2048,))"
            )
        return cls(dtype, shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.feature) * self.dtype.itemsize

    def accepts(self, other: RowSpec) -> bool:
        """Whether rows of `other` fit: the same feature, and a type whose every value this one holds."""
        return self.feature == other.feature and (self.dtype == other.dtype or _holds(self.dtype, other.dtype))


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` is a value of `wide`, of the same kind of number."""
    if _kind(wide) != _kind(narrow):
        return False
    try:
        return torch.promote_types(wide, narrow) == wide
    except RuntimeError:  # torch does not promote this pair (8-bit floats)
        return False


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype == torch.bool else "int"


class PrefixBlockPool:
    """Rows by key and slot. A key is opened with its first rows and keeps their type and feature shape."""

    def __init__(self, config: PrefixCacheConfig, *, pin: bool = False) -> None:
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self._pin = pin
        self._storage: dict[Key, torch.Tensor] = {}
        self._rows: dict[Key, ByteRows] = {}
        """The storage by slot."""
        self._blocks: dict[Key, ByteRows] = {}
        """The storage by block."""
        self._specs: dict[Key, RowSpec] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._storage

    def keys(self) -> tuple[Key, ...]:
        """Open keys, in the order in which they were opened."""
        return tuple(self._storage)

    def spec(self, key: Key) -> RowSpec:
        """Row type and shape of an open key."""
        return self._specs[key]

    def nbytes(self) -> dict[Key, int]:
        """Bytes allocated, by key."""
        return {key: t.numel() * t.element_size() for key, t in list(self._storage.items())}

    def storage(self, key: Key) -> torch.Tensor:
        """The whole tensor of a key, `(num_blocks, block_size, *feature)`. Read-only for everybody outside."""
        return self._storage[key]

    def takes(self, key: Key, rows: torch.Tensor) -> bool:
        """Whether `key` is open and holds rows of exactly this kind: nothing to check and nothing to allocate."""
        known = self._specs.get(key)
        return known is not None and rows.dtype is known.dtype and rows.shape[1:] == known.feature

    def check(self, key: Key, spec: RowSpec) -> None:
        """Raise `OmniPrefixCacheContractError` if rows of `spec` cannot go under `key`."""
        if spec.dtype not in ROW_DTYPES:
            raise OmniPrefixCacheContractError(
                f"key {key!r} brings rows of {spec.dtype}, which cannot be kept on the host row by row; convert them "
                "to one of " + ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES))
            )
        known = self._specs.get(key)
        if known is not None and not known.accepts(spec):
            raise OmniPrefixCacheContractError(
                f"key {key!r} holds rows of {known.dtype} {known.feature}, but rows of {spec.dtype} "
                f"{spec.feature} are to go there; a key keeps the type and width of its first rows. Emit it under "
                "another name, or declare it in ModelCachePolicy.request_keys if it has no row a token"
            )

    def open(self, key: Key, spec: RowSpec, *, resident: bool = False) -> None:
        """Allocate the rows of `key`, zeroed. Nothing if it is open; raises as `check` does.

        `resident`: fault its pages in at once, instead of when they are first written.
        """
        self.check(key, spec)
        if key not in self._storage:
            shape = (self.num_blocks, self.block_size, *spec.feature)
            storage = torch.zeros(shape, dtype=spec.dtype, pin_memory=self._pin)
            if resident:
                storage.zero_()
            self._rows[key] = byte_rows(storage, self.num_blocks * self.block_size)
            self._blocks[key] = byte_rows(storage, self.num_blocks)
            self._specs[key] = spec
            self._storage[key] = storage

    def write(self, key: Key, slots: IntArray, rows: torch.Tensor | ByteRows, kept: IntArray | None = None) -> None:
        """Write host `rows` (`(len(slots), *feature)`, contiguous, or their bytes) to `slots`. Committer only.

        `kept`: indices of the rows to write; None: all of them.
        """
        storage = self._rows[key]
        if storage.size and slots.size:
            source = byte_rows(rows, slots.shape[0]) if isinstance(rows, torch.Tensor) else rows
            if kept is None:
                storage[slots] = source
            else:
                storage[slots[kept]] = source[kept]

    def gather(
        self,
        key: Key,
        slots: IntArray,
        out: torch.Tensor,
        positions: IntArray | None = None,
        blocks: IntArray | None = None,
    ) -> None:
        """Copy the rows of `slots` into `out` (`(rows, *feature)`, contiguous).

        Whole blocks are copied as blocks: one contiguous piece of `block_size` rows each.

        Args:
            key: an open key.
            slots: what to read.
            out: where to.
            positions: row of `out` for each slot; None: `out` has a row for each, in order.
            blocks: the blocks that `slots` are, where the caller knows them to be whole ones.
        """
        storage = self._rows[key]
        if not storage.size or not slots.size:
            return
        if positions is not None:
            byte_rows(out, out.shape[0])[positions] = storage[slots]
            return
        if blocks is None:
            blocks = self._whole_blocks(slots)
        if blocks is None:
            np.take(storage, slots, out=byte_rows(out, slots.shape[0]), mode="clip")  # clip: no bounds pass, no copy
        else:
            _take_blocks(self._blocks[key], blocks, byte_rows(out, blocks.shape[0]))

    def _whole_blocks(self, slots: IntArray) -> IntArray | None:
        if slots.shape[0] == 0 or slots.shape[0] % self.block_size:
            return None
        first = slots[:: self.block_size]
        whole = first[:, None] + np.arange(self.block_size)
        if (first % self.block_size).any() or not np.array_equal(whole.reshape(-1), slots):
            return None
        return np.ascontiguousarray(first // self.block_size)


def _take_blocks(storage: ByteRows, blocks: IntArray, out: ByteRows) -> None:
    """Copy blocks, neighbours in one piece where many are: an allocator that is not worn hands out long runs."""
    begins = np.flatnonzero(blocks[1:] != blocks[:-1] + 1) + 1
    if len(begins) * 4 > len(blocks):
        np.take(storage, blocks, out=out, mode="clip")
        return
    at = 0
    for end in (*begins.tolist(), len(blocks)):
        first = int(blocks[at])
        out[at:end] = storage[first : first + end - at]
        at = end
