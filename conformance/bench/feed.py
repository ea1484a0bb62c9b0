"""Steps of an engine, made by hand and fed to one cache, with the time that each call took.

Everything that the engine would do itself (scheduler output, block table, the tensors) is made outside the clock.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch


class Outputs(Protocol):
    """What a cache hands over."""

    @property
    def hidden_states(self) -> Mapping[str, torch.Tensor] | None: ...
    @property
    def mm_outputs(self) -> Mapping[str, Mapping[str, Any]]: ...


class Cache(Protocol):
    """The calls that every implementation under test has."""

    def new_step_starts(self, scheduler_output: Any) -> None: ...
    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: dict[str, Any] | None,
        /,
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int,
    ) -> int: ...
    def materialize(self, step_id: int, req_ids: list[str]) -> Outputs: ...
    def discard_step(self, step_id: int) -> None: ...
    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Admission:
    """A new request: its whole block table, tokens already computed (a hit), tokens to compute in this step."""

    req_id: str
    blocks: Sequence[int]
    computed: int
    count: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes."""

    new: Sequence[Admission] = ()
    running: Mapping[str, int] = field(default_factory=dict)
    finished: Sequence[str] = ()


@dataclass(slots=True)
class Times:
    """Seconds that the calls of one step took."""

    start: float = 0.0
    save: float = 0.0
    materialize: float = 0.0

    @property
    def whole(self) -> float:
        """All of it."""
        return self.start + self.save + self.materialize


class Batch:
    """The engine's batch, in the shape of vLLM's V1 `InputBatch`: what a view reads slots from."""

    def __init__(self, max_requests: int, max_blocks: int) -> None:
        self.table = torch.zeros((max_requests, max_blocks), dtype=torch.int32)
        self.block_table = [SimpleNamespace(block_table=SimpleNamespace(cpu=self.table))]
        self.num_computed_tokens_cpu = np.zeros(max_requests, dtype=np.int32)
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}
        self._free = list(range(max_requests - 1, -1, -1))

    def drop(self, req_id: str) -> None:
        """The request leaves."""
        self._free.append(self.req_id_to_index.pop(req_id))
        self.req_ids.remove(req_id)

    def add(self, new: Admission) -> None:
        """The request joins."""
        row = self._free.pop()
        self.req_ids.append(new.req_id)
        self.req_id_to_index[new.req_id] = row
        self.table[row, : len(new.blocks)] = torch.tensor(list(new.blocks), dtype=torch.int32)
        self.num_computed_tokens_cpu[row] = new.computed


class Feed:
    """One cache and the batch that it sees. `make` gets the batch."""

    def __init__(self, batch: Batch, cache: Cache) -> None:
        self.batch = batch
        self.cache = cache

    def save(self, step: Step, hidden: torch.Tensor, mm: dict[str, Any] | None = None) -> tuple[int, Times]:
        """Run a step up to its save."""
        times = Times()
        sched = self._scheduler_output(step)
        tokens = sched.total_num_scheduled_tokens
        with _clock(times, "start"):
            self.cache.new_step_starts(sched)
        for req_id in step.finished:
            self.batch.drop(req_id)
        for new in step.new:
            self.batch.add(new)
        with _clock(times, "save"):
            step_id = self.cache.save_outputs(hidden, mm or {}, num_tokens_unpadded=tokens, num_tokens_padded=tokens)
        for req_id, count in sched.num_scheduled_tokens.items():
            self.batch.num_computed_tokens_cpu[self.batch.req_id_to_index[req_id]] += count
        return step_id, times

    def materialize(self, step_id: int, times: Times, req_ids: Sequence[str] | None = None) -> Outputs:
        """Hand a saved step over, for everybody or for some."""
        wanted = list(self.batch.req_ids if req_ids is None else req_ids)
        with _clock(times, "materialize"):
            return self.cache.materialize(step_id, wanted)

    def run(self, step: Step, hidden: torch.Tensor, mm: dict[str, Any] | None = None) -> tuple[Outputs, Times]:
        """A whole step."""
        step_id, times = self.save(step, hidden, mm)
        return self.materialize(step_id, times), times

    def _scheduler_output(self, step: Step) -> SimpleNamespace:
        computed = {r: int(self.batch.num_computed_tokens_cpu[self.batch.req_id_to_index[r]]) for r in step.running}
        counts = {**step.running, **{new.req_id: new.count for new in step.new}}
        return SimpleNamespace(
            finished_req_ids=set(step.finished),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=new.req_id,
                    block_ids=(list(new.blocks),),
                    num_computed_tokens=new.computed,
                    prompt_token_ids=None,
                )
                for new in step.new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(step.running),
                num_computed_tokens=list(computed.values()),
                new_block_ids=[None] * len(step.running),
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
        )


@contextmanager
def _clock(times: Times, part: str) -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    began = perf_counter()
    try:
        yield
    finally:
        setattr(times, part, perf_counter() - began)
        if collects:
            gc.enable()


def same_rows(outputs: Outputs, expected: Mapping[str, torch.Tensor], key: str | None = None) -> None:
    """Assert that everybody got exactly the expected rows, of the hidden states or of an mm key."""
    got = outputs.hidden_states if key is None else outputs.mm_outputs[key]
    assert got is not None
    assert got.keys() == expected.keys()
    for req_id, rows in expected.items():
        assert torch.equal(got[req_id], rows), f"{key or 'hidden'} of {req_id} differs"
