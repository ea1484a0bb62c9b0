"""KV blocks as vLLM's block pool keeps them, told by content instead of by digest.

A block is published when it is scheduled. A free block keeps its content until it is handed out again. Of several
blocks with one content the first published is hit. Which free block is handed out next is the pool's choice: the least
recently used, as with vLLM, or, to be harder on the cache, any.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from conformance.schedules.content import Prefix


class Blocks:
    """All blocks: who is referenced how often, what each is published as, and the free ones in order."""

    def __init__(self, num_blocks: int, block_size: int, any_order: random.Random | None) -> None:
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.published: list[Prefix | None] = [None] * num_blocks
        self._with_content: dict[Prefix, list[int]] = {}
        self.unused = set(range(num_blocks))
        """Blocks that nobody ever held: no row was ever computed for their slots."""
        self.free_order = list(range(num_blocks))
        self._any_order = any_order

    def match(self, content: Prefix) -> list[int]:
        """The longest run of published blocks that `content` begins with, short of its last token."""
        hits: list[int] = []
        for end in range(self.block_size, len(content) - 1, self.block_size):
            blocks = self._with_content.get(content[: end + 1])
            if not blocks:
                break
            hits.append(blocks[0])
        return hits

    def room(self, hits: Sequence[int] = ()) -> int:
        """How many blocks can be handed out once the hits are taken."""
        return len(self.free_order) - sum(self.references[block] == 0 for block in hits)

    def touch(self, hits: Sequence[int]) -> None:
        """One more holder of each hit block."""
        for block in hits:
            if self.references[block] == 0:
                self.free_order.remove(block)
            self.references[block] += 1

    def take(self) -> int:
        """Hand out a free block. What it was published as is forgotten."""
        at = self._any_order.randrange(len(self.free_order)) if self._any_order is not None else 0
        block = self.free_order.pop(at)
        self.references[block] = 1
        self._forget(block)
        self.unused.discard(block)
        return block

    def publish(self, block: int, content: Prefix) -> None:
        """From now on `block` can be hit by whoever begins with `content`."""
        self._forget(block)
        self.published[block] = content
        self._with_content.setdefault(content, []).append(block)

    def release(self, held: Sequence[int]) -> None:
        """A holder gives its blocks back, last to first; blocks that nobody can hit are handed out before others."""
        freed: list[int] = []
        for block in reversed(held):
            self.references[block] -= 1
            if self.references[block] == 0:
                freed.append(block)
        first = [block for block in freed if self.published[block] is None]
        last = [block for block in freed if self.published[block] is not None]
        self.free_order = [*first, *self.free_order, *last]

    def load(self, content: Prefix) -> int | None:
        """Fill a block from outside: it is published, but no row was ever computed for it. None if there is none."""
        block = next((b for b in self.free_order if b in self.unused), None)
        if block is not None:
            self.free_order.remove(block)
            self.free_order.append(block)
            self.publish(block, content)
        return block

    def _forget(self, block: int) -> None:
        content = self.published[block]
        if content is not None:
            self._with_content[content].remove(block)
            if not self._with_content[content]:
                del self._with_content[content]
            self.published[block] = None
