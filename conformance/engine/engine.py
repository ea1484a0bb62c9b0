"""The engine: scheduler, batch and model, one step at a time, in the phases in which vLLM's model runner has them.

    sched = engine.schedule()
    # the cache's new_step_starts(sched) belongs here, before the batch drops finished requests
    engine.update_batch(sched)
    output = engine.forward(sched)          # if the step has tokens
    # the cache's save_outputs(...) belongs here
    engine.finish_step(sched)

The KV cache is real in the one way that matters: the forward reads the chain value of the position before from *its
slot* and writes its own there. A wrong block table shows in the rows at once.

``forward`` returns views of buffers that the next forward overwrites, as replayed CUDA graphs do; ``scribble`` does so
at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from conformance.engine.blocks import BlockManager
from conformance.engine.model import FEATURES, VOICE, PrefixModel
from conformance.engine.requests import Request, RequestStatus
from conformance.engine.runner import RunnerBatch
from conformance.engine.scheduler import Scheduler, SchedulerOutput

REFERENCE, TAGS = "reference", "tags"
"""Leftovers: a tensor that is every request's, whatever its length, and a list with one entry for each request."""

REFERENCE_ROWS = 3


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the engine; ``pad_to`` pads a step's tokens to a multiple, as captured graphs do."""

    num_blocks: int = 32
    block_size: int = 4
    max_num_seqs: int = 8
    token_budget: int = 32
    chunk_limit: int = 0
    caching: bool = True
    resumed_as_new: bool = False
    pad_to: int = 1

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.token_budget, self.pad_to) < 1 or self.chunk_limit < 0:
            raise ValueError(f"max_num_seqs, token_budget, pad_to must be positive, chunk_limit not negative: {self}")

    @property
    def max_padded_tokens(self) -> int:
        """The largest padded step."""
        return -(-self.token_budget // self.pad_to) * self.pad_to


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one forward produced, in batch order. ``hidden`` has ``num_padded`` rows, the first ``num_tokens`` real."""

    req_ids: tuple[str, ...]
    hidden: torch.Tensor
    mm: dict[str, Any]
    num_tokens: int
    num_padded: int


class Engine:
    """A deterministic engine. Requests are known by the ids that the caller gives them."""

    def __init__(self, config: EngineConfig, model: PrefixModel | None = None) -> None:
        self.config = config
        self.model = model or PrefixModel()
        self.blocks = BlockManager(config.num_blocks, config.block_size, caching=config.caching)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            chunk_limit=config.chunk_limit,
            resumed_as_new=config.resumed_as_new,
        )
        self.view = RunnerBatch(config.block_size)
        self._kv = np.zeros(config.num_blocks * config.block_size, dtype=np.uint64)
        empty = self.model.rows(self._kv[:0])
        capacity = config.max_padded_tokens
        self._hidden = torch.zeros((capacity, *empty.hidden.shape[1:]), dtype=empty.hidden.dtype)
        self._mm = {key: torch.zeros((capacity, *rows.shape[1:]), dtype=rows.dtype) for key, rows in empty.mm.items()}
        self._reference = torch.zeros((REFERENCE_ROWS, 2))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def live_requests(self) -> dict[str, Request]:
        """Requests that are neither finished nor aborted."""
        return self.scheduler.requests

    def add_request(self, req_id: str, prompt: list[int], max_tokens: int) -> Request:
        """Queue a request; it is the caller's to look at."""
        request = Request(req_id, list(prompt), len(prompt), max_tokens, self.config.block_size)
        self.scheduler.add_request(request)
        return request

    def abort(self, req_id: str) -> None:
        """End a live request between two steps."""
        self.scheduler.finish(req_id, RequestStatus.ABORTED)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step."""
        return self.scheduler.schedule()

    def update_batch(self, sched: SchedulerOutput) -> None:
        """Bring the runner's batch up to the step."""
        self.view.update(sched)

    def forward(self, sched: SchedulerOutput) -> StepOutput:
        """Compute the step's rows, in batch order, into the live buffers."""
        # Whoever was scheduled first may have computed the block that a later request hits in this very step.
        of_request = {req_id: self._compute(req_id, count) for req_id, count in sched.num_scheduled_tokens.items()}
        req_ids = tuple(self.view.batch_req_ids())
        chains = self._kv[np.concatenate([of_request[req_id] for req_id in req_ids])]
        rows = self.model.rows(chains)
        total, pad_to = len(chains), self.config.pad_to
        padded = -(-total // pad_to) * pad_to
        self.scribble()
        self._hidden[:total] = rows.hidden
        mm: dict[str, Any] = {}
        for key, values in rows.mm.items():
            if key != VOICE or rows.emits.any():
                self._mm[key][:total] = values
                # Not every output of a padded forward is padded.
                mm[key] = self._mm[key][: total if key == FEATURES else padded]
        self._reference.copy_(torch.arange(REFERENCE_ROWS * 2).reshape(REFERENCE_ROWS, 2) + self.scheduler.stats.steps)
        mm[REFERENCE] = self._reference
        mm[TAGS] = [torch.from_numpy(self._kv[of_request[req_id][-1:]].astype(np.int64)) for req_id in req_ids]
        return StepOutput(req_ids, self._hidden[:padded], mm, total, padded)

    def scribble(self) -> None:
        """Overwrite the live buffers with values that no row has."""
        self._hidden.fill_(99)
        for buffer in self._mm.values():
            buffer.fill_(99)
        self._reference.fill_(99)

    def finish_step(self, sched: SchedulerOutput) -> list[str]:
        """Sample where a request has caught up with its tokens; return who finished."""
        done = []
        for req_id in sched.num_scheduled_tokens:
            request = self.scheduler.requests.get(req_id)
            if request is None or request.num_computed < request.num_tokens:
                continue
            last = self.view.slots(req_id, request.num_tokens - 1, request.num_tokens)[0]
            request.append_token(self.model.sample(int(self._kv[last])))
            if request.is_done:
                self.scheduler.finish(req_id)
                done.append(req_id)
        return done

    def _compute(self, req_id: str, count: int) -> list[int]:
        """Write the chain values of the request's next tokens to their slots; return the slots."""
        start = self.view.num_computed(req_id)
        slots = self.view.slots(req_id, max(start - 1, 0), start + count)
        chain = int(self._kv[slots.pop(0)]) if start else None
        tokens = self.scheduler.requests[req_id].tokens[start : start + count]
        for slot, token in zip(slots, tokens, strict=True):
            chain = self.model.advance(chain, token)
            self._kv[slot] = chain
        return slots
