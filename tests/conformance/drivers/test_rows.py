"""Rows as tensors: exact, and a sound tensor is told from a torn one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.drivers.rows import decode, encode, is_encoded
from conformance.schedules.content import ROWS
from conformance.schedules.trace import KeySetting

FLOAT = KeySetting(name="float", width=3, item_bytes=4)
INTEGER = KeySetting(name="integer", width=1, item_bytes=8)


@pytest.mark.parametrize("key", [FLOAT, INTEGER], ids=lambda key: key.name)
@given(rows=st.lists(st.integers(min_value=1, max_value=ROWS), max_size=5))
def test_rows_survive_as_tensors(key: KeySetting, rows: list[int]) -> None:
    """Every row of the range is exact in its key's dtype."""
    tensor = encode(key, rows, len(rows), key.width)
    assert decode(key, tensor) == rows
    assert is_encoded(key, tensor, rows)
    assert not is_encoded(key, tensor, [*rows, 1])


def test_zeros_are_a_row_and_torn_rows_are_not() -> None:
    """A row of zeros decodes to zero; lanes of two rows, garbage, or another width are refused."""
    tensor = encode(FLOAT, [5, 7], 2, FLOAT.width)
    assert decode(FLOAT, torch.zeros(2, 3)) == [0, 0]
    assert is_encoded(FLOAT, torch.zeros(2, 3), [0, 0])
    torn = tensor.clone()
    torn[0, 1] = tensor[1, 1]
    for broken in (torn, encode(FLOAT, [5], 2, FLOAT.width), tensor[:, :2]):
        with pytest.raises(AssertionError, match="float"):
            decode(FLOAT, broken)
        assert not is_encoded(FLOAT, broken, [5, 7])
