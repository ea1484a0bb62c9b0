"""`conformance.engine.blocks`: vLLM's rules for KV blocks, one by one."""

import pytest

from conformance.engine import BlockManager, Request


def _request(req_id: str, tokens: list[int], block_size: int = 2) -> Request:
    return Request(req_id, tokens, len(tokens), 4, block_size)


def _place(blocks: BlockManager, request: Request, step: int = 1) -> list[int]:
    hits = blocks.match(request)
    assert blocks.can_allocate(request, request.num_tokens, hits)
    blocks.allocate(request, request.num_tokens, step=step, hits=hits)
    return blocks.block_ids(request.req_id)


def test_the_null_block_is_never_handed_out() -> None:
    """Of n blocks n - 1 can be used, and block 0 is not among them."""
    blocks = BlockManager(4, 2)
    request = _request("a", [1, 2, 3, 4, 5, 6])
    assert _place(blocks, request) == [1, 2, 3]
    assert not blocks.can_allocate(_request("b", [1]), 1)


def test_a_hit_never_covers_the_last_token() -> None:
    """An identical prompt of whole blocks hits all of them but the last."""
    blocks = BlockManager(8, 2)
    _place(blocks, _request("a", [1, 2, 3, 4]))
    assert [b.block_id for b in blocks.match(_request("b", [1, 2, 3, 4]))] == [1]
    assert [b.block_id for b in blocks.match(_request("c", [1, 2, 3, 4, 5]))] == [1, 2]


def test_a_digest_is_published_when_the_block_is_scheduled() -> None:
    """A block is hittable at once, and says in which step it was published."""
    blocks = BlockManager(8, 2)
    _place(blocks, _request("a", [1, 2, 3]), step=5)
    (hit,) = blocks.match(_request("b", [1, 2, 9]))
    assert (hit.block_id, hit.published_at) == (1, 5)


def test_partial_blocks_are_not_hittable() -> None:
    """Only whole blocks are published."""
    blocks = BlockManager(8, 4)
    _place(blocks, _request("a", [1, 2, 3], block_size=4))
    assert blocks.match(_request("b", [1, 2, 3, 4, 5], block_size=4)) == []


def test_hits_are_shared_and_freed_by_the_last_holder() -> None:
    """A hit counts a reference; the block is free again only when nobody holds it."""
    blocks = BlockManager(8, 2)
    _place(blocks, _request("a", [1, 2, 3]))
    assert _place(blocks, _request("b", [1, 2, 4])) == [1, 3]
    blocks.free("a")
    assert 1 not in blocks.free_queue.block_ids
    blocks.free("b")
    assert blocks.free_queue.block_ids[-1] == 1


def test_unhashed_blocks_are_reused_first_and_hashed_ones_last() -> None:
    """Blocks without a digest go to the front of the queue, others to the back, a request's last block first."""
    blocks = BlockManager(8, 2)
    _place(blocks, _request("a", [1, 2, 3, 4, 5]))
    blocks.free("a")
    assert blocks.free_queue.block_ids == [3, 4, 5, 6, 7, 2, 1]


def test_a_freed_block_stays_hittable_until_it_is_handed_out() -> None:
    """Eviction happens at reuse, not at free."""
    blocks = BlockManager(4, 2)
    _place(blocks, _request("a", [1, 2, 3]))
    blocks.free("a")
    again = _request("b", [1, 2, 7])
    assert [b.block_id for b in blocks.match(again)] == [1]
    _place(blocks, _request("c", [8, 8, 8, 8, 8, 8]))
    assert blocks.match(again) == []


def test_a_free_hit_block_counts_as_room_taken() -> None:
    """A hit that revives a free block leaves one block fewer for the rest."""
    blocks = BlockManager(4, 2)
    _place(blocks, _request("a", [1, 2, 3]))
    blocks.free("a")
    _place(blocks, _request("z", [9, 9, 9]))
    request = _request("b", [1, 2, 3, 4])
    hits = blocks.match(request)
    assert len(hits) == 0 or not blocks.can_allocate(request, 4, hits)


def test_the_first_published_of_equal_blocks_is_hit() -> None:
    """Two blocks may carry one digest; when the first is handed out, the other is hit."""
    blocks = BlockManager(8, 2)
    first, second = _request("a", [1, 2]), _request("b", [1, 2])
    _place(blocks, first)
    _place(blocks, second)
    probe = _request("p", [1, 2, 3])
    assert [b.block_id for b in blocks.match(probe)] == [1]
    blocks.free("a")
    _place(blocks, _request("c", [7] * 10))
    assert [b.block_id for b in blocks.match(probe)] == [1]
    _place(blocks, _request("d", [8, 8]))
    assert [b.block_id for b in blocks.match(probe)] == [2]


def test_without_caching_nothing_is_hit() -> None:
    """With prefix caching off no digest is published, and freed blocks go to the front."""
    blocks = BlockManager(8, 2, caching=False)
    _place(blocks, _request("a", [1, 2, 3, 4]))
    assert blocks.match(_request("b", [1, 2, 3, 4, 5])) == []
    blocks.free("a")
    assert blocks.free_queue.block_ids[:2] == [2, 1]


def test_freeing_twice_or_unknown_is_harmless() -> None:
    """A request that holds nothing gives nothing back."""
    blocks = BlockManager(4, 2)
    blocks.free("nobody")
    assert len(blocks.free_queue) == 3


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (8, 0)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    """There must be a block beside the null block, and a token in a block."""
    with pytest.raises(ValueError, match="null block"):
        BlockManager(num_blocks, block_size)


def test_hits_for_a_request_that_holds_blocks_are_refused() -> None:
    """Hits come at admission only."""
    blocks = BlockManager(8, 2)
    request = _request("a", [1, 2, 3])
    _place(blocks, request)
    with pytest.raises(ValueError, match="already holds"):
        blocks.allocate(request, 3, step=2, hits=[blocks.blocks[5]])
