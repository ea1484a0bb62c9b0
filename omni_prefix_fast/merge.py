"""Cached rows and this step's rows, put together for the consumer.

Rows are copied out of the staging page, since the page is used again; the gathered rows of a hit already have room for
the step's own behind them, so they are not copied twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from omni_prefix_fast.intake import share_of
from omni_prefix_fast.reads import HitRead
from omni_prefix_fast.recycler import OutputAllocator
from omni_prefix_fast.steps import StepContext
from omni_prefix_fast.types import HIDDEN_KEY, Key, ReqId, Span, StageCacheOutputs

PageRows = Callable[[Key], torch.Tensor]
"""The step's rows of a key in its staging page, `(num_tokens, *feature)`."""


def merge(
    context: StepContext, req_ids: Sequence[ReqId], page_rows: PageRows, allocate: OutputAllocator
) -> StageCacheOutputs:
    """Outputs of a step for `req_ids`, whose hit reads have been fetched."""
    emitted = frozenset(context.emitted)
    hit_keys: set[Key] = set()
    if context.reads:
        hit_keys.update(key for r in req_ids if r in context.reads for key in context.reads[r].rows)
    mm: dict[Key, dict[ReqId, Any]] = {}
    mm_spans: dict[Key, dict[ReqId, Span]] = {}
    spans = context.spans(req_ids)
    hidden: dict[ReqId, torch.Tensor] | None = None
    for key in (*context.emitted, *sorted(hit_keys - emitted)):
        rows = (
            _step_rows(context, req_ids, page_rows(key), key, allocate)
            if key in emitted
            else _hit_rows(context, req_ids, key)
        )
        if key == HIDDEN_KEY:
            hidden = rows
        else:
            mm[key] = rows
            mm_spans[key] = spans.copy() if key in emitted else {r: _hit_span(context, r) for r in rows}
    if context.hands_hidden and hidden is None:
        hidden = {}
    for key, leftover in context.leftovers.items():
        mm.setdefault(key, {}).update((r, share_of(leftover, context.layout, r)) for r in req_ids)
    return StageCacheOutputs(
        hidden_states=hidden,
        mm_outputs=mm,
        spans=spans,
        mm_spans=mm_spans,
    )


def _step_rows(
    context: StepContext, req_ids: Sequence[ReqId], of_step: torch.Tensor, key: Key, allocate: OutputAllocator
) -> dict[ReqId, torch.Tensor]:
    """Rows of a key that the step emits: behind the cached prefix where there is one."""
    layout = context.layout
    if not context.reads and req_ids == layout.req_ids:  # the common step: nobody hit, everybody is asked for
        # Parts for different owners: not tied to each other as the views of one tensor, hence "unsafe" to autograd.
        parts = _copied(of_step, allocate).unsafe_split_with_sizes(layout.counts)
        return dict(zip(req_ids, parts, strict=True))
    return {r: _merged(context.reads.get(r), key, of_step[layout.rows(r)], allocate) for r in req_ids}


def _merged(read: HitRead | None, key: Key, rows: torch.Tensor, allocate: OutputAllocator) -> torch.Tensor:
    if read is None:
        return _copied(rows, allocate)
    merged = read.rows.pop(key, None)  # gathered with room for the step's rows
    if merged is None:  # no row of this key in the whole span: zeros, fixed when the read was planned
        merged = allocate((len(read) + rows.shape[0], *rows.shape[1:]), rows.dtype)
        merged[: len(read)].zero_()
    merged.narrow(0, len(read), rows.shape[0]).copy_(rows)
    return merged


def _copied(rows: torch.Tensor, allocate: OutputAllocator) -> torch.Tensor:
    return allocate(rows.shape, rows.dtype).copy_(rows)


def _hit_rows(context: StepContext, req_ids: Sequence[ReqId], key: Key) -> dict[ReqId, torch.Tensor]:
    """Cached rows of a key that the step does not emit: they are owed all the same."""
    reads = ((r, context.reads[r]) for r in req_ids if r in context.reads)
    return {r: read.rows.pop(key)[: len(read)] for r, read in reads if key in read.rows}


def _hit_span(context: StepContext, req_id: ReqId) -> Span:
    read = context.reads[req_id]
    return (read.start, read.end)
