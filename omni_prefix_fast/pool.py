"""`PrefixBlockPool`: the durable host rows, one `(num_blocks, block_size, *feature)` tensor a key.

Only the committer writes rows. A reader gathers rows that it has pinned, so writer and reader never meet on a row and
neither takes a lock here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Shape and type of one key's rows."""

    dtype: torch.dtype
    feature: tuple[int, ...]

    @classmethod
    def of(cls, rows: torch.Tensor) -> RowSpec:
        """The spec of a tensor `(tokens, *feature)`."""
        return cls(rows.dtype, tuple(rows.shape[1:]))

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.feature, dtype=np.int64)) * self.dtype.itemsize

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
        self._specs: dict[Key, RowSpec] = {}

    def keys(self) -> tuple[Key, ...]:
        """Open keys, in the order in which they were opened."""
        return tuple(self._storage)

    def spec(self, key: Key) -> RowSpec:
        """Row type and shape of an open key."""
        return self._specs[key]

    def nbytes(self) -> dict[Key, int]:
        """Bytes allocated, by key."""
        return {key: t.numel() * t.element_size() for key, t in self._storage.items()}

    def storage(self, key: Key) -> torch.Tensor:
        """The whole tensor of a key, `(num_blocks, block_size, *feature)`. Read-only for everybody outside."""
        return self._storage[key]

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
                f"key {key!r} holds rows of {known.dtype} {known.feature}, this step brings {spec.dtype} "
                f"{spec.feature}; a key keeps the type and width of its first rows. Emit it under another name, or "
                "declare it in ModelCachePolicy.request_keys if it has no row a token"
            )

    def open(self, key: Key, spec: RowSpec) -> None:
        """Allocate the rows of `key`, zeroed. Nothing if it is open; raises as `check` does."""
        self.check(key, spec)
        if key not in self._storage:
            shape = (self.num_blocks, self.block_size, *spec.feature)
            self._storage[key] = torch.zeros(shape, dtype=spec.dtype, pin_memory=self._pin)
            self._specs[key] = spec

    def write(self, key: Key, slots: IntArray, rows: torch.Tensor) -> None:
        """Write host `rows` (`(len(slots), *feature)`) to `slots`. Committer only."""
        indexable(self._flat(key)).index_copy_(0, torch.from_numpy(slots), indexable(rows))

    def gather(self, key: Key, slots: IntArray, out: torch.Tensor) -> None:
        """Copy the rows of `slots` into `out` (`(len(slots), *feature)`, contiguous).

        Whole blocks are copied as blocks: one contiguous piece of `block_size` rows each.
        """
        blocks = self._whole_blocks(slots)
        if blocks is None:
            torch.index_select(indexable(self._flat(key)), 0, torch.from_numpy(slots), out=indexable(out))
        else:
            storage = self._storage[key]
            view = out.view(blocks.shape[0], *storage.shape[1:])
            torch.index_select(indexable(storage), 0, torch.from_numpy(blocks), out=indexable(view))

    def _flat(self, key: Key) -> torch.Tensor:
        storage = self._storage[key]
        return storage.view(self.num_blocks * self.block_size, *storage.shape[2:])

    def _whole_blocks(self, slots: IntArray) -> IntArray | None:
        if slots.shape[0] == 0 or slots.shape[0] % self.block_size:
            return None
        first = slots[:: self.block_size]
        whole = first[:, None] + np.arange(self.block_size)
        if (first % self.block_size).any() or not np.array_equal(whole.reshape(-1), slots):
            return None
        return np.ascontiguousarray(first // self.block_size)
