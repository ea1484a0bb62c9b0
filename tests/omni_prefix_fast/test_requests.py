"""The span rule: what an admitted request is owed, against positions one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_prefix_fast import PrefixCacheConfig
from omni_prefix_fast.events import Resumed, Started
from omni_prefix_fast.metrics import Counters
from omni_prefix_fast.requests import RequestTable


def make(block_size: int = 4, num_blocks: int = 8) -> tuple[RequestTable, Counters]:
    """An empty table and its counters."""
    counters = Counters()
    return RequestTable(PrefixCacheConfig(num_blocks=num_blocks, block_size=block_size), counters), counters


@given(
    emitted=st.integers(0, 20),
    computed=st.integers(0, 20),
    table=st.lists(st.integers(0, 7), min_size=20, max_size=20),
    block_size=st.sampled_from([1, 3, 4]),
)
def test_owed_span_and_its_slots(emitted: int, computed: int, table: list[int], block_size: int) -> None:
    """A request is owed `[emitted, computed)`, nothing if that is empty; slots are the block table's."""
    requests, _ = make(block_size)
    if emitted:
        requests.start(Started("A", 0, (), None), emitted)
        requests.advance(["A"], [emitted])
    owed = requests.owed(Resumed("A", computed, table))
    if computed <= emitted:
        assert owed is None
    else:
        assert owed is not None
        assert owed.span == (emitted, computed)
        positions = range(emitted, computed)
        assert owed.slots.tolist() == [table[p // block_size] * block_size + p % block_size for p in positions]
        whole = emitted % block_size == 0 and computed % block_size == 0
        blocks = None if owed.blocks is None else owed.blocks.tolist()
        assert blocks == (table[emitted // block_size : computed // block_size] if whole else None)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([0], r"'A' has 5 computed tokens but a block table of 1 blocks of 4"),
        ([], r"table of 0 blocks"),
        ([0, 8], r"block ids 0\.\.8, outside 0\.\.7.*num_blocks"),
        ([-1, 0], r"block ids -1\.\.0"),
    ],
)
def test_table_that_does_not_cover_the_hit(blocks: list[int], words: str) -> None:
    """The request and what is wrong with its table are named; blocks behind the hit are not looked at."""
    requests, _ = make()
    with pytest.raises(ValueError, match=words):
        requests.owed(Started("A", 5, blocks, None))
    assert requests.owed(Started("A", 5, [0, 1, 99], None)) is not None


@pytest.mark.parametrize(
    "blocks",
    [[2**70, 1], [None, 1], ["a", "b"], "01", [0.5, 1.5], [0, 1.0], [[0], [1]], [[0], [1, 2]], [float("nan"), 0]],
    ids=str,
)
def test_blocks_that_are_no_whole_numbers(blocks: Any) -> None:
    """Nothing is rounded, cut or wrapped round: the request is named."""
    requests, _ = make()
    with pytest.raises(ValueError, match=r"'A' has block_ids that are no list of whole numbers"):
        requests.owed(Started("A", 5, blocks, None))


@pytest.mark.parametrize("block", [2**40, 2**63, 2**64 - 1])
def test_huge_block_is_out_of_range(block: int) -> None:
    """A block id that fits no signed integer does not come round to a small one."""
    requests, _ = make()
    blocks: Any = np.array([0, block], dtype=np.uint64)
    with pytest.raises(ValueError, match="outside"):
        requests.owed(Started("A", 5, blocks, None))


@pytest.mark.parametrize(
    "blocks", [np.array([2, 1], dtype=np.uint8), np.array([2, 1], dtype=np.int32), torch.tensor([2, 1])]
)
def test_any_type_of_whole_numbers_serves(blocks: Any) -> None:
    """Small integer types do not overflow where slots are worked out."""
    table, _ = make(block_size=200)
    owed = table.owed(Started("A", 202, blocks, None))
    assert owed is not None
    assert owed.slots.tolist() == [*range(400, 600), 200, 201]


def test_life_of_a_request() -> None:
    """Live from start to finish, coming back does not start it again, nothing of it is left behind."""
    requests, counters = make()
    requests.start(Started("A", 0, (), 9), 4)
    requests.advance(["A"], [4])
    assert ("A" in requests, len(requests), requests.emitted("A")) == (True, 1, 4)
    requests.start(Resumed("A", 4, [0]), 1)
    assert requests.emitted("A") == 4
    assert [requests.next_write_n("A"), requests.next_write_n("A")] == [1, 2]
    assert requests.finish("A")
    assert not requests.finish("A")
    assert ("A" in requests, len(requests), requests.emitted("A")) == (False, 0, 0)
    requests.start(Started("A", 0, (), 9), 4)
    assert requests.next_write_n("A") == 1
    totals = counters.snapshot()
    assert (totals.requests_started, totals.requests_resumed, totals.requests_finished) == (2, 1, 1)


def test_request_that_was_running_before_becomes_live_with_its_first_rows() -> None:
    """A request whose start was not seen has a watermark from its first saved step on."""
    requests, _ = make()
    requests.advance(["A"], [7])
    assert requests.watermarks() == {"A": 7}
    assert requests.finish("A")


@pytest.mark.parametrize(
    ("prompt", "computed", "scheduled", "asked", "hit", "below"),
    [(9, 4, 5, 9, 1, 0), (4, 0, 4, 4, 0, 1), (5, 0, 5, 5, 0, 0), (None, 4, 3, 7, 1, 0), (None, 0, 2, 2, 0, 1)],
)
def test_counts_of_a_start(prompt: int | None, computed: int, scheduled: int, asked: int, hit: int, below: int) -> None:
    """Tokens asked are the prompt's where it is told; a prompt not longer than a block can hit nothing."""
    requests, counters = make()
    requests.start(Started("A", computed, [0, 1, 2], prompt), scheduled)
    totals = counters.snapshot()
    assert (totals.tokens_asked, totals.tokens_hit) == (asked, computed)
    assert (totals.requests_hit, totals.requests_below_block) == (hit, below)


def test_watermarks_are_a_copy() -> None:
    """What is told may be changed; clearing forgets all."""
    requests, _ = make()
    requests.advance(["A", "B"], [1, 2])
    requests.watermarks().clear()
    assert len(requests) == 2
    requests.clear()
    assert len(requests) == 0
