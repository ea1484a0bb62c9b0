"""What happened in an engine, read from its scheduler outputs: hits, hits within a step, preemptions, block reuse.

Counts are taken from the scheduler's own messages, before the cache sees them, so a workload can prove that what it is
for occurred whatever the cache thinks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omni_prefix_fast.types import ReqId
from omni_prefix_fast.vllm.views import HostBlockTables


@dataclass(slots=True)
class Counts:
    """Totals of one run."""

    steps: int = 0
    steps_without_forward: int = 0
    rows_computed: int = 0
    hits: int = 0
    """New requests that found a part of their prompt computed."""
    tokens_hit: int = 0
    same_step_hits: int = 0
    """Hits on a block that another request computes in the very same step."""
    preemptions: int = 0
    resumes: int = 0
    resumes_beyond_delivered: int = 0
    """Resumed requests that found more computed than had been computed for them before they were preempted."""
    chunked_prefills: int = 0
    """Requests whose prompt took more than one step."""
    blocks_reused: int = 0
    """Blocks given to a request after another one had them, not as a hit."""
    padded_steps: int = 0


@dataclass(slots=True)
class _Seen:
    """A request as far as the scheduler announced it."""

    computed_to: int
    prompt_tokens: int
    prefill_steps: int = 0


@dataclass(slots=True)
class Observer:
    """Counts one engine's run."""

    block_size: int
    counts: Counts = field(default_factory=Counts)
    _tables: HostBlockTables = field(default_factory=HostBlockTables)
    _seen: dict[ReqId, _Seen] = field(default_factory=dict)
    _used_blocks: set[int] = field(default_factory=set)

    def observe(self, scheduler_output: Any) -> None:
        """Take in one scheduler output, before the runner does."""
        counts = self.counts
        counts.steps += 1
        counts.rows_computed += scheduler_output.total_num_scheduled_tokens
        counts.steps_without_forward += scheduler_output.total_num_scheduled_tokens == 0
        counts.preemptions += len(scheduler_output.preempted_req_ids or ())
        for req_id in scheduler_output.finished_req_ids:
            self._seen.pop(req_id, None)
        self._tables.observe(scheduler_output)
        admitted = self._admit(scheduler_output)
        self._count_blocks(scheduler_output, admitted)
        self._advance(scheduler_output)

    def _admit(self, scheduler_output: Any) -> dict[ReqId, int]:
        """Requests that were placed in this step, with what was already computed of them."""
        admitted: dict[ReqId, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            admitted[new.req_id] = new.num_computed_tokens
            if new.req_id in self._seen:
                self._resumed(new.req_id, new.num_computed_tokens)
            else:
                self._seen[new.req_id] = _Seen(0, len(new.prompt_token_ids or ()))
                if new.num_computed_tokens:
                    self.counts.hits += 1
                    self.counts.tokens_hit += new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                admitted[req_id] = computed
                self._resumed(req_id, computed)
        return admitted

    def _resumed(self, req_id: ReqId, computed: int) -> None:
        self.counts.resumes += 1
        self.counts.resumes_beyond_delivered += computed > self._seen[req_id].computed_to

    def _count_blocks(self, scheduler_output: Any, admitted: dict[ReqId, int]) -> None:
        """Hits on blocks that this step computes, and blocks that change hands."""
        writers: dict[int, ReqId] = {}
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            start = self._tables.computed(req_id)
            blocks = self._tables.blocks(req_id)
            first, last = start // self.block_size, -(-(start + count) // self.block_size)
            for at in range(first, last):
                block = int(blocks[at])
                writers[block] = req_id
                if at * self.block_size >= start:  # the request begins this block in this step
                    self.counts.blocks_reused += block in self._used_blocks
                    self._used_blocks.add(block)
        for req_id, computed in admitted.items():
            hit = self._tables.blocks(req_id)[: computed // self.block_size]
            self.counts.same_step_hits += any(writers.get(int(b), req_id) != req_id for b in hit)

    def _advance(self, scheduler_output: Any) -> None:
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            seen = self._seen[req_id]
            start = self._tables.computed(req_id)
            if start < seen.prompt_tokens and start + count < seen.prompt_tokens:
                seen.prefill_steps += 1
                self.counts.chunked_prefills += seen.prefill_steps == 1
            seen.computed_to = max(seen.computed_to, start + count)
