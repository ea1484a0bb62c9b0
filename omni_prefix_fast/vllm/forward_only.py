"""What a stage hands over without a cache: the rows that each forward returned, and their positions.

A stage with prefix caching off has no use for the cache, but the next stage needs its rows all the same, from the same
sinks. `ForwardOnly` answers the same calls as the cache does. It is also the other half of the comparison that counts:
with the cache on and with it off, the rows at the same position are the same bits.

Guarantees: no row is kept past its step; rows handed over share no memory with the engine's buffers. Engine thread
saves, any thread materializes. Nothing here imports vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omni_prefix_fast.config import ModelCachePolicy
from omni_prefix_fast.errors import OmniPrefixCacheContractError
from omni_prefix_fast.events import read_scheduler_output
from omni_prefix_fast.intake import KeySorter, Leftover, share_of
from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.types import HIDDEN_KEY, Key, ReqId, StageCacheOutputs, StepId


@dataclass(frozen=True, slots=True)
class _Saved:
    layout: StepLayout
    hands_hidden: bool
    rows: Mapping[Key, torch.Tensor]
    leftovers: Mapping[Key, Leftover]


class ForwardOnly:
    """Stands where the cache would: saves a step's rows, hands them over once, remembers nothing else."""

    def __init__(self, batch_req_ids: Callable[[], Sequence[ReqId]], policy: ModelCachePolicy) -> None:
        self._batch_req_ids = batch_req_ids
        self._policy = policy
        self._sorter = KeySorter(policy)
        self._lock = threading.Lock()
        self._saved: dict[StepId, _Saved] = {}
        self._next_step: StepId = 0
        self._computed: dict[ReqId, int] = {}
        self._scheduled: Mapping[ReqId, int] = {}

    def new_step_starts(self, scheduler_output: Any) -> None:
        """Remember how far each request of the step is."""
        events = read_scheduler_output(scheduler_output)
        for req_id in events.finished:
            self._computed.pop(req_id, None)
        self._computed.update((one.req_id, one.computed) for one in events.admitted)
        self._computed.update(events.computed)
        self._scheduled = events.num_scheduled

    def save_outputs(
        self, hidden: Any, mm_outputs: Mapping[Key, Any] | None, *, num_tokens_unpadded: int, num_tokens_padded: int
    ) -> StepId:
        """Copy the step's rows to the host; see the cache's method of this name."""
        step_id = self._next_step
        req_ids = tuple(r for r in self._batch_req_ids() if r in self._scheduled)
        counts = [self._scheduled[r] for r in req_ids]
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        if int(offsets[-1]) != num_tokens_unpadded:
            raise OmniPrefixCacheContractError(
                f"step {step_id}: {int(offsets[-1])} tokens are scheduled but num_tokens_unpadded={num_tokens_unpadded}"
            )
        layout = StepLayout(
            step_id=step_id,
            req_ids=req_ids,
            index={r: i for i, r in enumerate(req_ids)},
            counts=tuple(counts),
            offsets=tuple(int(at) for at in offsets),
            starts=tuple(self._computed[r] for r in req_ids),
            ends=tuple(self._computed[r] + n for r, n in zip(req_ids, counts, strict=True)),
            slots=np.empty(0, dtype=np.int64),  # nothing is kept by slot
        )
        intake = self._sorter.sort(hidden, mm_outputs, layout, num_tokens_padded)
        rows = {key: tensor.detach().to("cpu", copy=True) for key, tensor in intake.rows.items()}
        with self._lock:
            self._saved[step_id] = _Saved(layout, self._policy.needs_full_hidden_states, rows, intake.leftovers)
        self._next_step += 1
        return step_id

    def materialize(self, step_id: StepId, req_ids: Sequence[ReqId]) -> StageCacheOutputs:
        """The forward's rows of a step, once."""
        with self._lock:
            saved = self._saved.pop(step_id, None)
        if saved is None:
            raise OmniPrefixCacheContractError(f"step {step_id} was never saved, or was consumed before")
        layout = saved.layout
        spans = {r: (layout.starts[i], layout.ends[i]) for r, i in layout.index.items()}
        by_key: dict[Key, dict[ReqId, Any]] = {
            key: {r: tensor[layout.rows(r)].clone() for r in req_ids} for key, tensor in saved.rows.items()
        }
        hidden = by_key.pop(HIDDEN_KEY, {}) if saved.hands_hidden else None
        mm_spans = {key: {r: spans[r] for r in req_ids} for key in by_key}
        for key, leftover in saved.leftovers.items():
            by_key.setdefault(key, {}).update((r, share_of(leftover, layout, r)) for r in req_ids)
        return StageCacheOutputs(
            hidden_states=hidden, mm_outputs=by_key, spans={r: spans[r] for r in req_ids}, mm_spans=mm_spans
        )

    def discard_step(self, step_id: StepId) -> None:
        """Drop a step's rows, once."""
        with self._lock:
            if self._saved.pop(step_id, None) is None:
                raise OmniPrefixCacheContractError(f"step {step_id} was never saved, or was consumed before")

    def shutdown(self) -> None:
        """Drop everything."""
        with self._lock:
            self._saved.clear()
