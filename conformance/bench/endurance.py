"""A long run with hits, preemptions, aborts, late handovers and discarded steps: does anything grow?

On the built-in engine. Blocks are few and requests short, so that blocks change hands all the time. Now and then the
engine is let run dry and every step is consumed; at these points the cache has to be as small as it was at the first of
them: the same number of entries in every container, and no more resident memory.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from resource import RUSAGE_SELF, getrusage
from time import perf_counter
from types import MethodType
from typing import Any

import numpy as np
import torch

from conformance.engine import Engine, EngineConfig, PlannedRequest, PrefixModel, Request, WorkloadConfig, make_workload
from conformance.engine.engine import REFERENCE, TAGS
from conformance.engine.model import FEATURES
from omni_prefix_fast import ModelCachePolicy, OmniPrefixCacheManager, PrefixCacheConfig, StageCacheOutputs
from omni_prefix_fast.layout import BatchView

_LEAVES = (str, bytes, int, float, bool, type(None), type, torch.dtype)
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Endurance:
    """How long, and how often to look."""

    steps: int = 200_000
    looks: int = 20
    checked: int = 16
    """One of so many handed-over steps has its rows compared with the model's."""
    eager: bool = True
    seed: int = 0


@dataclass(slots=True)
class Endured:
    """What the run saw."""

    steps: int = 0
    seconds: float = 0.0
    hits: int = 0
    preemptions: int = 0
    aborts: int = 0
    discarded: int = 0
    rows_checked: int = 0
    resident: list[int] = field(default_factory=list)
    """Bytes at each look."""
    at: list[int] = field(default_factory=list)
    """Steps at each look."""
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Containers that were larger at the last look than at the first: entries then and now, by path."""

    @property
    def growth(self) -> int:
        """Resident bytes gained between the second look and the last; the first is still warming up."""
        return self.resident[-1] - self.resident[min(1, len(self.resident) - 1)]


class _Run:
    def __init__(self, work: Endurance) -> None:
        self.work = work
        self.rng = Random(work.seed)
        settings = EngineConfig(num_blocks=48, block_size=4, max_num_seqs=8, token_budget=48)
        self.engine = Engine(settings)
        depth = 4
        self.cache = OmniPrefixCacheManager(
            PrefixCacheConfig(
                num_blocks=settings.num_blocks,
                block_size=settings.block_size,
                staging_depth=depth,
                staging_capacity_tokens=settings.max_padded_tokens,
                gpu_staging_bytes=2048,
            ),
            self.engine.view,
            eager=work.eager,
        )
        self.cache.register_policy(
            ModelCachePolicy(
                deferred_keys=frozenset({FEATURES}),
                request_keys=frozenset({REFERENCE}),
                request_list_keys=frozenset({TAGS}),
            )
        )
        self.max_open = depth - 1
        self.open: deque[tuple[int, dict[str, Request]]] = deque()
        self.live: dict[str, Request] = {}
        self.generation = 0
        self.seen = Endured()
        self.handed_over = 0

    def run(self) -> Endured:
        """Run and look."""
        began = perf_counter()
        first: Counter[str] | None = None
        for look in range(1, self.work.looks + 1):
            until = self.work.steps * look // self.work.looks
            while self.seen.steps < until:
                self._requests()
            sizes = self._look()
            first = first or sizes
            self.seen.grown = {path: (first[path], n) for path, n in sizes.items() if n > first[path]}
        stats = self.engine.scheduler.stats
        self.seen.hits, self.seen.preemptions, self.seen.aborts = stats.hits, stats.preemptions, stats.aborts
        self.seen.seconds = perf_counter() - began
        self.cache.shutdown()
        return self.seen

    def _requests(self) -> None:
        """Some more requests, until the engine has run dry and every step is consumed."""
        vocabulary = self.engine.model.config.vocab_size
        config = WorkloadConfig(num_requests=100, block_size=self.engine.config.block_size, vocab_size=vocabulary)
        planned = make_workload(self.rng.getrandbits(32), config, prefix=f"{self.generation}-")
        self.generation += 1
        coming = deque(planned)
        aborts: dict[int, list[str]] = {}
        step = 0
        while coming or self.engine.has_work:
            while coming and coming[0].arrival <= step:
                self._arrive(coming.popleft(), step, aborts)
            for req_id in aborts.pop(step, ()):
                if req_id in self.engine.live_requests:
                    self.engine.abort(req_id)
            self._step()
            step += 1
        while self.open:
            self._consume()
        self.live.clear()

    def _arrive(self, each: PlannedRequest, step: int, aborts: dict[int, list[str]]) -> None:
        self.live[each.req_id] = self.engine.add_request(each.req_id, list(each.prompt), each.max_tokens)
        if each.abort_after is not None:
            aborts.setdefault(step + each.abort_after, []).append(each.req_id)

    def _step(self) -> None:
        engine, cache = self.engine, self.cache
        sched = engine.schedule()
        cache.new_step_starts(sched)
        engine.update_batch(sched)
        if not sched.total_num_scheduled_tokens:
            return
        output = engine.forward(sched)
        step_id = cache.save_outputs(
            output.hidden, output.mm, num_tokens_unpadded=output.num_tokens, num_tokens_padded=output.num_padded
        )
        engine.scribble()
        self.open.append((step_id, {req_id: self.live[req_id] for req_id in output.req_ids}))
        engine.finish_step(sched)
        self.seen.steps += 1
        while len(self.open) > self.rng.randint(0, self.max_open):
            self._consume()

    def _consume(self) -> None:
        step_id, requests = self.open.popleft()
        if self.rng.random() < 0.1:
            self.cache.discard_step(step_id)
            self.seen.discarded += 1
            return
        outputs = self.cache.materialize(step_id, list(requests))
        self.handed_over += 1
        if self.handed_over % self.work.checked == 0:
            for req_id, request in requests.items():
                self._check(req_id, request, outputs)

    def _check(self, req_id: str, request: Request, outputs: StageCacheOutputs) -> None:
        start, end = outputs.spans[req_id]
        model: PrefixModel = self.engine.model
        rows = model.rows(model.chains(request.tokens[:end])[start:])
        assert outputs.hidden_states is not None
        assert torch.equal(outputs.hidden_states[req_id], rows.hidden), f"hidden of {req_id}, {start}..{end}"
        assert torch.equal(outputs.mm_outputs[FEATURES][req_id], rows.mm[FEATURES]), f"{FEATURES} of {req_id}"
        self.seen.rows_checked += end - start

    def _look(self) -> Counter[str]:
        self.cache.drain()
        gc.collect()
        self.seen.resident.append(resident_bytes())
        self.seen.at.append(self.seen.steps)
        return container_sizes(self.cache, self.engine.view)


def endure(work: Endurance) -> Endured:
    """Run."""
    return _Run(work).run()


def resident_bytes() -> int:
    """Resident memory of this process: now where the system tells, else the most so far."""
    if _STATM.exists():
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024


def container_sizes(root: Any, leave_out: BatchView) -> Counter[str]:
    """Entries of all containers and arrays that `root` holds, by path; elements of a container share one path."""
    sizes: Counter[str] = Counter()
    seen = {id(leave_out)}
    queue = deque([("", root)])
    while queue:
        path, value = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (Mapping, list, tuple, AbstractSet, deque, np.ndarray, torch.Tensor)):
            sizes[path] += len(value) if not isinstance(value, (np.ndarray, torch.Tensor)) or value.ndim else 1
        if not isinstance(value, (np.ndarray, torch.Tensor)):
            queue.extend((path + name, part) for name, part in _parts(value))
    return +sizes


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [("[]", part) for part in value.values()]
    if isinstance(value, (list, tuple, AbstractSet, deque)):
        return [("[]", part) for part in value]
    if isinstance(value, MethodType):
        return [(".self", value.__self__)]
    names = [*getattr(value, "__dict__", ())]
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [(f".{name}", getattr(value, name)) for name in names if hasattr(value, name)]
