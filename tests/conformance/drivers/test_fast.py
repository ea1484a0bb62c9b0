"""The fast path's driver: what it makes of rows, and that it tells a sound tensor from a torn one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.drivers.fast import decode, encode
from conformance.drivers.standing import StandingRuntime
from conformance.schedules.content import ROWS
from conformance.schedules.trace import KeySetting

FLOAT = KeySetting(name="float", width=3, item_bytes=4)
INTEGER = KeySetting(name="integer", width=1, item_bytes=8)


@pytest.mark.parametrize("key", [FLOAT, INTEGER], ids=lambda key: key.name)
@given(rows=st.lists(st.integers(min_value=1, max_value=ROWS), max_size=5))
def test_rows_survive_as_tensors(key: KeySetting, rows: list[int]) -> None:
    """Every row of the range is exact in its key's dtype."""
    assert decode(key, encode(key, rows, len(rows), key.width)) == rows


def test_zeros_are_a_row_and_torn_rows_are_not() -> None:
    """A row of zeros decodes to zero; lanes of two rows, garbage, or another width are refused."""
    tensor = encode(FLOAT, [5, 7], 2, FLOAT.width)
    assert decode(FLOAT, torch.zeros(2, 3)) == [0, 0]
    torn = tensor.clone()
    torn[0, 1] = tensor[1, 1]
    for broken in (torn, encode(FLOAT, [5], 2, FLOAT.width), tensor[:, :2]):
        with pytest.raises(AssertionError, match="float"):
            decode(FLOAT, broken)


def test_nothing_waits() -> None:
    """Waits end at once and empty-handed; one without a limit, or a lock taken twice, is an error."""
    runtime = StandingRuntime()
    event = runtime.event("done")
    assert not event.wait(30.0)
    event.set()
    assert event.wait(30.0)
    condition = runtime.condition("pages")
    with condition:
        assert not condition.wait(30.0)
        with pytest.raises(AssertionError, match="no limit"):
            condition.wait()
        with pytest.raises(AssertionError, match="twice"):
            condition.__enter__()
    with pytest.raises(AssertionError, match="thread"):
        runtime.spawn("committer", lambda: None)
