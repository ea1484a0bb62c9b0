"""Where the rows of a step belong: `StepLayout`, and the view of the engine's batch that slots come from.

A layout is made once a step, under no lock, and passed whole; nothing below it works out an offset again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch

from omni_prefix_fast.errors import OmniPrefixCacheConfigError, OmniPrefixCacheContractError
from omni_prefix_fast.types import IntArray, ReqId, StepId


class BatchView(Protocol):
    """What the cache needs to know of the engine's batch, asked between its update and the end of the save."""

    def batch_req_ids(self) -> Sequence[ReqId]:
        """Requests of the batch, in the order of their rows."""
        ...

    def step_slots_cpu(self, req_ids: Sequence[ReqId], num_scheduled: Mapping[ReqId, int]) -> torch.Tensor:
        """Slots of the tokens that this step computes, int64 `(num_tokens,)` on the host, request after request."""
        ...


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What steps of the same requests with the same counts have in common, however far each request has come."""

    req_ids: tuple[ReqId, ...]
    index: Mapping[ReqId, int]
    pick: Callable[[Mapping[ReqId, int]], tuple[int, ...]]
    """Values of `req_ids`, in order; `KeyError` if one is missing."""
    counts: tuple[int, ...]
    lengths: IntArray
    """`counts` as an array."""
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, batch: tuple[ReqId, ...], num_scheduled: Mapping[ReqId, int], step_id: StepId) -> BatchShape:
        """Raises `OmniPrefixCacheContractError` if the batch lacks a scheduled request or lists one twice."""
        req_ids = tuple(filter(num_scheduled.__contains__, batch))
        index = dict(zip(req_ids, range(len(req_ids)), strict=True))
        if len(index) != len(num_scheduled) or len(index) != len(req_ids):
            absent = sorted(set(num_scheduled) - set(index))
            what = f"scheduled requests {absent} are not in the batch" if absent else "the batch lists a request twice"
            raise OmniPrefixCacheContractError(f"step {step_id}: {what}")
        pick = _picker(req_ids)
        counts = pick(num_scheduled)
        lengths = np.array(counts, dtype=np.int64)
        return cls(req_ids, index, pick, counts, lengths, (0, *accumulate(counts)))

    def fits(self, batch: tuple[ReqId, ...], num_scheduled: Mapping[ReqId, int]) -> bool:
        """Whether a step of this batch has the shape."""
        if len(num_scheduled) != len(self.req_ids):
            return False
        if batch != self.req_ids and tuple(filter(num_scheduled.__contains__, batch)) != self.req_ids:
            return False
        try:
            return self.pick(num_scheduled) == self.counts
        except KeyError:
            return False


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Requests of one step and the tokens it computes for each, request after request."""

    step_id: StepId
    req_ids: tuple[ReqId, ...]
    index: Mapping[ReqId, int]
    counts: tuple[int, ...]
    """Tokens of each request."""
    offsets: tuple[int, ...]
    """Row of each request's first token, and the number of rows at the end; one longer than `req_ids`."""
    starts: tuple[int, ...]
    """Absolute position of each request's first token."""
    ends: tuple[int, ...]
    """Absolute position after each request's last token."""
    slots: IntArray
    """Slot of each token, `(num_tokens,)`."""
    shape: BatchShape | None = None
    """What the layout of the next step may take over."""
    reached: IntArray | None = None
    """`ends` as an array, for the layout of the next step."""

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return self.offsets[-1]

    def rows(self, req_id: ReqId) -> slice:
        """The request's rows of the step."""
        i = self.index[req_id]
        return slice(self.offsets[i], self.offsets[i + 1])


def make_layout(
    step_id: StepId,
    view: BatchView,
    num_scheduled: Mapping[ReqId, int],
    computed: Mapping[ReqId, int],
    *,
    block_size: int,
    num_slots: int,
    before: StepLayout | None = None,
) -> StepLayout:
    """Lay out a step. Engine thread, after the batch was updated.

    Args:
        step_id: the step's id.
        view: the engine's batch.
        num_scheduled: tokens to compute, by request.
        computed: absolute position of each scheduled request's first token. `KeyError` if one is missing.
        block_size: tokens a block.
        num_slots: slots in all.
        before: an earlier step's layout. What holds for this step as well is not worked out again.

    Raises:
        OmniPrefixCacheContractError: the batch lacks a scheduled request, or its slots are no whole numbers or do not
            fit the schedule.
    """
    batch = tuple(view.batch_req_ids())
    shape = None if before is None else before.shape
    if shape is None or not shape.fits(batch, num_scheduled):
        shape = BatchShape.of(batch, num_scheduled, step_id)
    counts, starts, total = shape.counts, shape.pick(computed), shape.offsets[-1]
    slots = _as_slots(view.step_slots_cpu(list(shape.req_ids), num_scheduled), step_id)
    if slots.shape[0] != total:
        raise OmniPrefixCacheContractError(
            f"step {step_id}: step_slots_cpu returned {slots.shape[0]} slots for {total} scheduled tokens"
        )
    begun = None
    if before is not None and before.shape is shape and before.ends == starts:  # each went on where it was
        begun = before.reached
    if begun is None:
        begun = _begun(starts, step_id)
    if total:
        if int(np.maximum.reduce(slots.view(np.uint64))) >= num_slots:  # a negative slot is a huge one
            raise OmniPrefixCacheContractError(
                f"step {step_id}: slots {int(slots.min())}..{int(slots.max())} are outside 0..{num_slots - 1}; "
                "num_blocks or block_size differs from the engine's"
            )
        if not _in_place(slots, shape, begun, block_size):
            raise OmniPrefixCacheContractError(
                f"step {step_id}: slots do not stand where the computed-token counts put them; "
                "block_size differs from the engine's, or num_computed_tokens is not the first scheduled position"
            )
    ends = tuple(map(operator.add, starts, counts))
    reached = begun + shape.lengths
    return StepLayout(step_id, shape.req_ids, shape.index, counts, shape.offsets, starts, ends, slots, shape, reached)


def _begun(starts: Sequence[int], step_id: StepId) -> IntArray:
    """First positions as an array. Those of a request that goes on are what the last step's were, and its tokens."""
    try:
        begun: IntArray = np.fromiter(starts, np.int64, len(starts))
    except OverflowError:
        begun = np.full(1, -1)
    if (begun < 0).any():
        raise OmniPrefixCacheContractError(f"step {step_id}: num_computed_tokens {starts} are no positions of tokens")
    return begun


def _as_slots(told: Any, step_id: StepId) -> IntArray:
    """A copy of the slots that the view told, never rounded."""
    try:
        if type(told) is torch.Tensor and told.dtype is torch.int64 and told.is_cpu and told.ndim == 1:
            plain: IntArray = told.numpy()
            return plain.copy()
        slots = torch.as_tensor(told).detach().cpu().numpy()
    except (NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise OmniPrefixCacheContractError(
            f"step {step_id}: step_slots_cpu returned a {type(told).__name__} that is no tensor of slots: {error}"
        ) from error
    if slots.size and slots.dtype.kind not in "iu":
        raise OmniPrefixCacheContractError(
            f"step {step_id}: step_slots_cpu returned slots of {slots.dtype}; they have to be whole numbers (int64)"
        )
    copied: IntArray = slots.astype(np.int64, copy=True).reshape(-1)
    return copied


def _picker(req_ids: Sequence[ReqId]) -> Callable[[Mapping[ReqId, int]], tuple[int, ...]]:
    """Picks the values of `req_ids`. One call for all of them, since a loop over a large batch shows."""
    if len(req_ids) > 1:
        return operator.itemgetter(*req_ids)
    return lambda values: tuple(values[r] for r in req_ids)


def _in_place(slots: IntArray, shape: BatchShape, begun: IntArray, block_size: int) -> bool:
    """Whether each request's first and last token stand in their blocks where their positions say."""
    if len(slots) == len(begun):  # a decode step: the first token is the last
        return not np.count_nonzero(_divided(slots - begun, block_size)[1])
    at = np.array(shape.offsets)
    first, last = slots[at[:-1]], slots[at[1:] - 1]
    misplaced = ((first - begun) % block_size).any() or ((last - first - (shape.lengths - 1)) % block_size).any()
    return not misplaced


class FullAttentionGroupView:
    """`BatchView` of vLLM's V1 `InputBatch`: slots come from its host block table, not from the device mapping.

    Reading the device's slot mapping back would wait for the forward; the host table knows the same.
    """

    def __init__(self, input_batch: Any, block_size: int) -> None:
        """Raise `OmniPrefixCacheConfigError` if the table's layout cannot be mirrored."""
        self._batch = input_batch
        self._table: tuple[torch.Tensor, Any] | None = None
        """The host block table, and the same memory as an array."""
        self.block_size = block_size
        check_block_layout(input_batch.block_table[0], block_size)

    def batch_req_ids(self) -> list[ReqId]:
        """See `BatchView`."""
        return list(self._batch.req_ids)

    def step_slots_cpu(self, req_ids: Sequence[ReqId], num_scheduled: Mapping[ReqId, int]) -> torch.Tensor:
        """See `BatchView`. One indexed read of the table for the whole batch."""
        table = self._batch.block_table[0].block_table.cpu
        if self._table is None or self._table[0] is not table:
            self._table = (table, table.numpy())
        pick = _picker(req_ids)
        rows = np.fromiter(pick(self._batch.req_id_to_index), np.int64, len(req_ids))
        starts = np.asarray(self._batch.num_computed_tokens_cpu)[rows]
        return table_slots(self._table[1], rows, starts, pick(num_scheduled), self.block_size)


def table_slots(table: Any, rows: IntArray, starts: IntArray, counts: Sequence[int], block_size: int) -> torch.Tensor:
    """Slots of `counts[i]` tokens from position `starts[i]` on, in row `rows[i]` of a host block table.

    Returns int64 `(sum(counts),)`. Raises `OmniPrefixCacheContractError` for a position beyond the table's width.
    """
    if counts.count(1) == len(counts):  # a decode step: the starts are the positions
        positions = np.asarray(starts)
    else:
        lengths = np.asarray(counts, dtype=np.int64)
        ends = np.cumsum(lengths)
        positions = np.arange(int(ends[-1])) + np.repeat(starts - (ends - lengths), lengths)
        rows = np.repeat(rows, lengths)
    blocks, offsets = _divided(positions, block_size)
    try:
        slots = np.multiply(table[rows, blocks], block_size, dtype=np.int64)
    except IndexError:
        raise OmniPrefixCacheContractError(
            f"position {int(positions.max())} lies beyond the block table of {table.shape[1]} blocks of {block_size}"
        ) from None
    slots += offsets
    return torch.from_numpy(slots)


def _divided(numbers: IntArray, by: int) -> tuple[IntArray, IntArray]:
    """Quotient, rounded down, and remainder, never negative. Block sizes are powers of two, so this is not division."""
    if by & (by - 1):
        return np.divmod(numbers, by)
    return numbers >> (by.bit_length() - 1), numbers & (by - 1)


def check_block_layout(block_table: Any, block_size: int) -> None:
    """Refuse a block table whose rows are not `table[request, position // block_size]` over allocator blocks."""
    split = int(getattr(block_table, "blocks_per_kv_block", 1) or 1)
    if getattr(block_table, "use_hybrid_blocks", False) or split != 1:
        raise OmniPrefixCacheConfigError(
            f"the attention backend splits each KV block into {split} kernel blocks, which the prefix cache cannot "
            "mirror; choose a --block-size that the backend supports natively, or set enable_prefix_caching to false"
        )
    world = int(getattr(block_table, "dcp_world_size", 1) or 1)
    if world != 1:
        raise OmniPrefixCacheConfigError(
            f"decode context parallel (decode_context_parallel_size={world}) stripes tokens over ranks; set it to 1, "
            "or set enable_prefix_caching to false"
        )
    for name in ("kv_cache_block_size", "block_size"):
        size = getattr(block_table, name, None)
        if size is not None and int(size) != block_size:
            raise OmniPrefixCacheConfigError(
                f"the block table counts in blocks of {int(size)} tokens, the prefix cache in blocks of {block_size}; "
                "make --block-size equal to the KV cache's block size"
            )
