"""A trace's start as a scheduler output of vLLM's shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from conformance.schedules.trace import Admission, Start


def scheduler_output(event: Start) -> Any:
    """A scheduler output as vLLM shapes it."""
    new = [a for a in event.admitted if not a.resumed]
    resumed = [a for a in event.admitted if a.resumed]
    cached: list[tuple[str, int, list[int] | None]] = [(a.req, a.computed, a.blocks) for a in resumed]
    cached += [(req, computed, None) for req, computed in event.running.items()]
    return SimpleNamespace(
        finished_req_ids=list(event.finished),
        scheduled_new_reqs=[_new(a) for a in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[req for req, _, _ in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
            new_block_ids=[None if blocks is None else (blocks,) for _, _, blocks in cached],
            resumed_req_ids={a.req for a in resumed},
        ),
        num_scheduled_tokens=dict(event.scheduled),
        total_num_scheduled_tokens=sum(event.scheduled.values()),
    )


def _new(admission: Admission) -> Any:
    blocks = None if admission.blocks is None else (admission.blocks,)
    return SimpleNamespace(
        req_id=admission.req, num_computed_tokens=admission.computed, block_ids=blocks, prompt_token_ids=None
    )
