"""Cached rows and this step's rows, put together for the consumer.

Rows are copied out of the staging page, since the page is used again; the gathered rows of a hit already have room for
the step's own behind them, so they are not copied twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from omni_prefix_fast.intake import share_of
from omni_prefix_fast.steps import StepContext
from omni_prefix_fast.types import HIDDEN_KEY, Key, ReqId, Span, StageCacheOutputs

PageRows = Callable[[Key], torch.Tensor]
"""The step's rows of a key in its staging page, `(num_tokens, *feature)`."""


def merge(context: StepContext, req_ids: Sequence[ReqId], page_rows: PageRows) -> StageCacheOutputs:
    """Outputs of a step for `req_ids`, whose hit reads have been fetched."""
    emitted = set(context.emitted)
    hit_keys = {key for r in req_ids if r in context.reads for key in context.reads[r].rows}
    mm: dict[Key, dict[ReqId, Any]] = {}
    mm_spans: dict[Key, dict[ReqId, Span]] = {}
    hidden: dict[ReqId, torch.Tensor] | None = None
    for key in (*context.emitted, *sorted(hit_keys - emitted)):
        rows, spans = _of_key(context, req_ids, key, page_rows if key in emitted else None)
        if key == HIDDEN_KEY:
            hidden = rows
        else:
            mm[key] = dict(rows)
            mm_spans[key] = spans
    if context.hands_hidden and hidden is None:
        hidden = {}
    for key, leftover in context.leftovers.items():
        mm.setdefault(key, {}).update((r, share_of(leftover, context.layout, r)) for r in req_ids)
    return StageCacheOutputs(
        hidden_states=hidden,
        mm_outputs=mm,
        spans={r: context.span(r) for r in req_ids},
        mm_spans=mm_spans,
    )


def _of_key(
    context: StepContext, req_ids: Sequence[ReqId], key: Key, page_rows: PageRows | None
) -> tuple[dict[ReqId, torch.Tensor], dict[ReqId, Span]]:
    rows: dict[ReqId, torch.Tensor] = {}
    spans: dict[ReqId, Span] = {}
    fresh = [r for r in req_ids if r not in context.reads]
    if page_rows is not None and fresh:
        of_step = page_rows(key)
        if len(fresh) == len(context.layout.req_ids):  # the common step: nobody hit, everybody is asked for
            rows.update(
                zip(context.layout.req_ids, torch.split(of_step.clone(), list(context.layout.counts)), strict=True)
            )
        else:
            rows.update((r, of_step[context.layout.rows(r)].clone()) for r in fresh)
        spans.update((r, context.span(r)) for r in fresh)
    for req_id in req_ids:
        read = context.reads.get(req_id)
        if read is None:
            continue
        gathered = read.rows.pop(key, None)
        if page_rows is None:
            if gathered is not None:
                rows[req_id] = gathered
                spans[req_id] = (read.start, read.end)
            continue
        of_request = page_rows(key)[context.layout.rows(req_id)]
        if gathered is None:  # no row of this key in the whole span: zeros, fixed when the read was planned
            gathered = of_request.new_zeros((len(read) + of_request.shape[0], *of_request.shape[1:]))
        gathered[len(read) :] = of_request
        rows[req_id] = gathered
        spans[req_id] = context.span(req_id)
    return rows, spans
