"""`RequestTable`: requests between their start and their finish, and the span rule (docs/machine.md).

Engine thread, except where the caller holds the state lock. Nothing of a request survives its finish here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from omni_prefix_fast.config import PrefixCacheConfig
from omni_prefix_fast.events import Admitted, Started
from omni_prefix_fast.metrics import Counters
from omni_prefix_fast.types import IntArray, ReqId, Span


class HitSpan(NamedTuple):
    """Cached rows that an admitted request is owed."""

    span: Span
    slots: IntArray
    """Slot of each position of the span."""
    blocks: IntArray | None
    """Blocks that make up the span, if it is whole blocks."""


class RequestTable:
    """Live requests by id."""

    def __init__(self, config: PrefixCacheConfig, counters: Counters) -> None:
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._offsets: IntArray = np.arange(config.block_size)
        self._counters = counters
        self._emitted: dict[ReqId, int] = {}
        self._write_n: dict[ReqId, int] = {}

    def __len__(self) -> int:
        return len(self._emitted)

    def __contains__(self, req_id: ReqId) -> bool:
        return req_id in self._emitted

    def watermarks(self) -> dict[ReqId, int]:
        """`emitted` of each live request, a copy."""
        return dict(self._emitted)

    def emitted(self, req_id: ReqId) -> int:
        """Position up to which rows have been offered for handover; 0 for an id that is not live."""
        return self._emitted.get(req_id, 0)

    def owed(self, admitted: Admitted) -> HitSpan | None:
        """Cached rows that the request is owed: `[emitted, computed)`, or None if that is empty.

        Raises `ValueError`, naming the request, where its block table does not cover them.
        """
        span = (self.emitted(admitted.req_id), admitted.computed)
        if span[1] <= span[0]:
            return None
        size = self._block_size
        who = f"request {admitted.req_id!r}"
        blocks = _as_blocks(admitted.block_ids, who)
        needed = -(-admitted.computed // size)
        if blocks.shape[0] < needed:
            raise ValueError(
                f"{who} has {admitted.computed} computed tokens but a block table of {blocks.shape[0]} blocks of "
                f"{size}; its block_ids have to cover the hit"
            )
        hit = blocks[:needed].astype(np.int64)
        if int(hit.view(np.uint64).max()) >= self._num_blocks:  # a negative id is a huge one
            low, high = int(blocks[:needed].min()), int(blocks[:needed].max())
            raise ValueError(
                f"{who} has block ids {low}..{high}, outside 0..{self._num_blocks - 1}; "
                "PrefixCacheConfig.num_blocks differs from the engine's"
            )
        first, skipped = divmod(span[0], size)
        hit = hit[first:]
        slots = (hit[:, None] * size + self._offsets).reshape(-1)[skipped : skipped + span[1] - span[0]]
        return HitSpan(span, slots, None if skipped or span[1] % size else hit)

    def start(self, admitted: Admitted, scheduled: int) -> None:
        """Take the request in; a live one comes back."""
        if admitted.req_id in self._emitted:
            self._counters.add("requests_resumed")
            return
        self._emitted[admitted.req_id] = 0
        prompt = admitted.prompt_tokens if isinstance(admitted, Started) else None
        known = admitted.computed + scheduled if prompt is None else prompt
        self._counters.add("requests_started")
        self._counters.add("tokens_asked", known)
        if admitted.computed:
            self._counters.add("requests_hit")
            self._counters.add("tokens_hit", admitted.computed)
        elif known <= self._block_size:
            self._counters.add("requests_below_block")

    def advance(self, req_ids: Iterable[ReqId], ends: Iterable[int]) -> None:
        """Rows of each request up to `ends` have been offered. A request not seen before becomes live."""
        self._emitted.update(zip(req_ids, ends, strict=True))

    def next_write_n(self, req_id: ReqId) -> int:
        """Number of the deferred write that the request opens now, from 1."""
        number = self._write_n.get(req_id, 0) + 1
        self._write_n[req_id] = number
        return number

    def finish(self, req_id: ReqId) -> bool:
        """Forget the request; whether it was live."""
        self._write_n.pop(req_id, None)
        known = self._emitted.pop(req_id, None) is not None
        if known:
            self._counters.add("requests_finished")
        return known

    def clear(self) -> None:
        """Forget all."""
        self._emitted.clear()
        self._write_n.clear()


def _as_blocks(block_ids: Any, who: str) -> np.ndarray[Any, Any]:
    """A block table as an array of whole numbers, never rounded. Raises `ValueError`, naming whose it is."""
    try:
        blocks = np.asarray(block_ids)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{who} has block_ids that are no list of whole numbers: {error}") from error
    if blocks.size == 0:
        return np.empty(0, dtype=np.int64)
    if blocks.ndim != 1 or blocks.dtype.kind not in "iu":
        raise ValueError(f"{who} has block_ids that are no list of whole numbers in reach: {str(block_ids)[:80]}")
    return blocks
