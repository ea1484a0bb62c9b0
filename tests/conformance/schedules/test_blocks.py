"""Blocks by content: what is hit, what is handed out next, and what items do to the identity of a block."""

from __future__ import annotations

from conformance.schedules.blocks import Blocks
from conformance.schedules.content import Prefix, item_token, row

PROMPT: Prefix = (0, 1, 2, 3, 4, 5)


def _filled(blocks: Blocks, content: Prefix) -> list[int]:
    """Blocks that hold `content`, published and given back."""
    size = blocks.block_size
    held = [blocks.take() for _ in range((len(content) - 1) // size)]
    for index, block in enumerate(held):
        blocks.publish(block, content[: (index + 1) * size + 1])
    blocks.release(held)
    return held


def test_a_hit_is_the_longest_run_short_of_the_last_token() -> None:
    """Whole blocks only, from the first on, and something is left to compute."""
    blocks = Blocks(4, 2, None)
    held = _filled(blocks, (0, 1, 2, 3, 4))
    assert blocks.match((0, 1, 2, 3, 4)) == held[:1]
    assert blocks.match((0, 1, 2, 3, 4, 9)) == held
    assert blocks.match((0, 1, 2, 9, 4, 9)) == held[:1]
    assert blocks.match((1, 1, 2, 3, 4, 9)) == []


def test_of_equal_blocks_the_first_published_is_hit() -> None:
    """And once it has another tenant, the next."""
    blocks = Blocks(4, 1, None)
    first, second = blocks.take(), blocks.take()
    blocks.publish(second, (0, 1))
    blocks.publish(first, (0, 1))
    assert blocks.match((0, 1, 2)) == [second]
    blocks.release([second])
    while second in blocks.free_order:
        blocks.take()
    assert blocks.match((0, 1, 2)) == [first]


def test_blocks_that_nobody_can_hit_are_handed_out_first_then_the_least_recently_used() -> None:
    """Given back last to first, so that a prefix outlives its tails."""
    blocks = Blocks(5, 1, None)
    a, b = _filled(blocks, (0, 1, 2))
    tail = [blocks.take(), blocks.take()]
    blocks.release(tail)
    assert blocks.free_order == [tail[1], tail[0], 4, b, a]


def test_equal_ids_with_different_items_share_nothing_from_the_item_on() -> None:
    """The block in which an item ends is another one, and so are all behind it; what stands before is shared."""
    ids = (7, 7, item_token(0), item_token(0), item_token(0), 7, 7, 7)
    other = tuple(item_token(1) if token < 0 else token for token in ids)
    blocks = Blocks(6, 2, None)
    held = _filled(blocks, (0, *ids))
    assert blocks.match((0, *ids, 7)) == held
    assert blocks.match((0, *other, 7)) == held[:1]
    assert row("key", (0, *ids)) != row("key", (0, *other))
