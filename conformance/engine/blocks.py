"""KV blocks: who holds which, which are free and in what order, and which can be hit.

The rules are those of vLLM's block pool and of its manager for one full-attention group:

- Block 0 is the null block: a place holder that is never handed out.
- A block's digest is published when the block is *scheduled*, not when it is computed, so a later request of the same
  step may hit it. A published digest stays until its block is handed out again.
- Several blocks may carry one digest; a hit takes the one that was published first.
- A free block with a digest waits at the back of the queue (least recently used first), one without at the front. A
  request gives its blocks back last to first, so that tails go before the prefixes that others may share.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conformance.engine.requests import Request

NULL_BLOCK = 0


@dataclass(slots=True)
class Block:
    """One KV block. ``published_at``: the step that published its digest. ``tenants``: how often it was handed out."""

    block_id: int
    ref_count: int = 0
    digest: bytes | None = None
    published_at: int = -1
    tenants: int = 0


class FreeQueue:
    """Free blocks in the order in which they will be handed out; any of them can leave it at once."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = OrderedDict((block.block_id, block) for block in blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: Block) -> bool:
        return block.block_id in self._blocks

    @property
    def block_ids(self) -> list[int]:
        """The queue, next to be handed out first."""
        return list(self._blocks)

    def pop(self) -> Block:
        """Take the block that is next."""
        return self._blocks.popitem(last=False)[1]

    def remove(self, block: Block) -> None:
        """Take this block, wherever it is."""
        del self._blocks[block.block_id]

    def append(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the back, in this order."""
        self._blocks.update((block.block_id, block) for block in blocks)

    def prepend(self, blocks: Sequence[Block]) -> None:
        """Put blocks at the front, so that the first of them is next."""
        for block in reversed(blocks):
            self._blocks[block.block_id] = block
            self._blocks.move_to_end(block.block_id, last=False)


class BlockManager:
    """Blocks of all requests. ``match`` looks up, ``can_allocate`` asks, ``allocate`` and ``free`` change."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"need two blocks or more (block 0 is the null block), of one token or more; got "
                f"{num_blocks} of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeQueue(self.blocks[NULL_BLOCK + 1 :])
        self._by_digest: dict[bytes, dict[int, Block]] = {}
        self._of_request: dict[str, list[Block]] = {}
        self._num_published: dict[str, int] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, req_id: str) -> list[int]:
        """The block table of a request."""
        return [block.block_id for block in self._of_request.get(req_id, ())]

    def match(self, request: Request) -> list[Block]:
        """The longest run of published blocks with which the request begins, never covering its last token."""
        hits: list[Block] = []
        if not self.caching:
            return hits
        for digest in request.digests[: (request.num_tokens - 1) // self.block_size]:
            same = self._by_digest.get(digest)
            if not same:
                break
            hits.append(next(iter(same.values())))
        return hits

    def can_allocate(self, request: Request, num_tokens: int, hits: Sequence[Block] = ()) -> bool:
        """Whether there are blocks for the request's first ``num_tokens`` tokens, with these hits among them."""
        held = len(self._of_request.get(request.req_id, ())) + len(hits)
        wanted = max(self.blocks_for(num_tokens) - held, 0)
        # A hit block that is free leaves the queue as well.
        wanted += sum(block.ref_count == 0 for block in hits)
        return wanted <= len(self.free_queue)

    def allocate(self, request: Request, num_tokens: int, *, step: int, hits: Sequence[Block] = ()) -> list[int]:
        """Give the request its hits and new blocks, publish the digests of full ones; return the new blocks' ids."""
        held = self._of_request.setdefault(request.req_id, [])
        if hits:
            if held:
                raise ValueError(f"request {request.req_id!r} already holds blocks; hits come only at its admission")
            self._touch(hits)
            held.extend(hits)
            self._num_published[request.req_id] = len(hits)
        new = [self._take() for _ in range(self.blocks_for(num_tokens) - len(held))]
        held.extend(new)
        self._publish(request, num_tokens, step)
        return [block.block_id for block in new]

    def free(self, req_id: str) -> None:
        """Give back what the request holds, if anything, last block first."""
        self._num_published.pop(req_id, None)
        first: list[Block] = []
        last: list[Block] = []
        for block in reversed(self._of_request.pop(req_id, [])):
            block.ref_count -= 1
            if block.ref_count == 0:
                (first if block.digest is None else last).append(block)
        self.free_queue.prepend(first)
        self.free_queue.append(last)

    def _touch(self, hits: Sequence[Block]) -> None:
        for block in hits:
            if block.ref_count == 0:
                self.free_queue.remove(block)
            block.ref_count += 1

    def _take(self) -> Block:
        block = self.free_queue.pop()
        if block.digest is not None:
            same = self._by_digest[block.digest]
            del same[block.block_id]
            if not same:
                del self._by_digest[block.digest]
            block.digest = None
        block.ref_count = 1
        block.tenants += 1
        return block

    def _publish(self, request: Request, num_tokens: int, step: int) -> None:
        if not self.caching:
            return
        held = self._of_request[request.req_id]
        done = self._num_published.get(request.req_id, 0)
        full = num_tokens // self.block_size
        for index in range(done, full):
            block = held[index]
            block.digest = request.digests[index]
            block.published_at = step
            self._by_digest.setdefault(block.digest, {})[block.block_id] = block
        self._num_published[request.req_id] = max(done, full)
