"""Rows of a trace as tensors, and back: every lane of a row is its own, so a torn row is told from a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from conformance.schedules.trace import KeySetting
from omni_prefix_fast.types import IntArray

LANE = 1_000_003
"""What lane j of a row adds j times: small enough for a float32 to hold every lane exactly."""
GARBAGE = -7
_FLOAT, _INTEGER = np.dtype(np.float32), np.dtype(np.int64)


class TornError(AssertionError):
    """A tensor that was handed over holds what no row looks like."""


def encode(key: KeySetting, rows: Sequence[int], padded: int, width: int, dtype: Any = None) -> torch.Tensor:
    """Rows as a tensor `(padded, width)`, with garbage in the padding. Lane j of row r is `r + j * LANE`."""
    tensor = np.full((padded, width), GARBAGE, dtype=dtype or dtype_of(key))
    tensor[: len(rows)] = _lanes_of(rows, width)
    return torch.from_numpy(tensor)


def is_encoded(key: KeySetting, value: torch.Tensor, rows: Sequence[int]) -> bool:
    """Whether a tensor is just these rows. A row of 0 is zeros in every lane."""
    found = value.numpy()
    if found.shape != (len(rows), key.width) or found.dtype != dtype_of(key):
        return False
    due = _lanes_of(rows, key.width)
    if 0 in rows:
        due[np.asarray(rows) == 0] = 0
    return bool((found == due).all())


def decode(key: KeySetting, value: torch.Tensor) -> list[int]:
    """The rows of a tensor. Raises `TornError` where it holds what no row looks like."""
    if value.dim() != 2 or value.shape[1] != key.width:
        raise TornError(f"{key.name} has shape {tuple(value.shape)}, width {key.width} is due")
    whole = value.to(torch.int64)
    rows: list[int] = whole[:, 0].tolist()
    lanes = torch.arange(key.width, dtype=torch.int64) * LANE
    zero = (whole == 0).all(dim=1)
    sound = (whole == whole[:, :1] + lanes).all(dim=1) | zero
    if not bool(sound.all()):
        raise TornError(f"{key.name}: rows torn, or never written: {value[~sound].tolist()}")
    return rows


def dtype_of(key: KeySetting) -> np.dtype[Any]:
    """The type of a key's rows: floats of 4 bytes, integers of 8."""
    return _FLOAT if key.item_bytes == 4 else _INTEGER


def _lanes_of(rows: Sequence[int], width: int) -> IntArray:
    return np.array(rows, dtype=np.int64).reshape(-1, 1) + np.arange(width, dtype=np.int64) * LANE
