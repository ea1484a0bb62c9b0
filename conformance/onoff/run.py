"""Run a round: first with prefix caching off, to learn what is owed, then with it on and the cache under test."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, Protocol, Self

import numpy as np
import torch

from conformance.engine import Engine, PlannedRequest, PrefixModel, Request, SchedulerOutput, StepOutput, make_workload
from conformance.engine.engine import REFERENCE, TAGS
from conformance.onoff.consumer import Consumer
from conformance.onoff.ledger import Ledger, Owed, Ticket
from conformance.onoff.rounds import Round
from omni_prefix_fast.types import HIDDEN_KEY, StageCacheOutputs


class Cache(Protocol):
    """The public calls of the cache that a run makes."""

    def register_policy(self, policy: Any) -> None:
        """Say what the model needs."""

    def new_step_starts(self, scheduler_output: Any) -> None:
        """A step begins."""

    def save_outputs(self, hidden: Any, mm_outputs: Any, *, num_tokens_unpadded: int, num_tokens_padded: int) -> int:
        """Keep a step's rows; return its id."""

    def materialize(self, step_id: int, req_ids: list[str]) -> StageCacheOutputs:
        """Hand a step over."""

    def discard_step(self, step_id: int) -> None:
        """Drop a step."""

    def shutdown(self) -> None:
        """End."""


CacheFactory = Callable[[Round, Any], Cache]


def make_cache(setup: Round, view: Any) -> Cache:
    """The cache of this project."""
    from omni_prefix_fast import OmniPrefixCacheManager  # noqa: PLC0415 - only who runs a cache needs the whole package

    return OmniPrefixCacheManager(setup.cache, view, eager=setup.eager)


@dataclass(slots=True)
class Tally:
    """Counters of one or more rounds."""

    requests: int = 0
    steps: int = 0
    asynchronous_steps: int = 0
    admissions: int = 0
    hits: int = 0
    same_step_hits: int = 0
    recycled_same_step_hits: int = 0
    preemptions: int = 0
    resumed_hits: int = 0
    resumed_gaps: int = 0
    aborts: int = 0
    late: int = 0
    threaded: int = 0
    partial: int = 0
    discarded: int = 0
    rows_from_cache: int = 0
    rows_compared: int = 0
    leftovers_compared: int = 0
    rows_kept: int = 0
    missing: int = 0
    differences: int = 0

    def add(self, other: Self) -> None:
        """Add another round's counters."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class RoundResult:
    """What a round found."""

    setup: Round
    tally: Tally = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)


def run_round(
    setup: Round,
    *,
    cache_factory: CacheFactory = make_cache,
    on_progress: Callable[[int], None] | None = None,
) -> RoundResult:
    """Run one round. ``on_progress`` is told how many more requests have ended."""
    planned = make_workload(setup.seed, setup.workload)
    owed = rows_without_cache(setup, planned)
    return _Run(setup, planned, owed, cache_factory, on_progress or (lambda _: None)).run()


def rows_without_cache(setup: Round, planned: list[PlannedRequest]) -> dict[str, Owed]:
    """All rows of all requests, computed with prefix caching off; nobody is aborted here, so that no row is missing."""
    engine = Engine(replace(setup.engine, caching=False), PrefixModel(setup.model))
    requests = {each.req_id: engine.add_request(each.req_id, list(each.prompt), each.max_tokens) for each in planned}
    parts: dict[str, dict[int, tuple[int, dict[str, torch.Tensor]]]] = {req_id: {} for req_id in requests}
    while engine.has_work:
        sched = engine.schedule()
        engine.update_batch(sched)
        if not sched.total_num_scheduled_tokens:
            continue
        output = engine.forward(sched)
        rows = {HIDDEN_KEY: output.hidden} | {key: output.mm[key] for key in output.mm if key not in {REFERENCE, TAGS}}
        row = 0
        for req_id in output.req_ids:
            count = sched.num_scheduled_tokens[req_id]
            part = {key: values[row : row + count].clone() for key, values in rows.items()}
            parts[req_id][engine.view.num_computed(req_id)] = (count, part)
            row += count
        engine.finish_step(sched)
    model = engine.model
    return {req_id: _assemble(parts[req_id], request, model) for req_id, request in requests.items()}


def _assemble(parts: dict[int, tuple[int, dict[str, torch.Tensor]]], request: Request, model: PrefixModel) -> Owed:
    """One tensor a key over all computed positions. A preempted request computed some twice, the same."""
    # The token sampled last was never an input.
    like = model.rows(model.chains(request.tokens[:-1]))
    rows = {HIDDEN_KEY: torch.zeros_like(like.hidden)} | {k: torch.zeros_like(v) for k, v in like.mm.items()}
    filled = np.zeros(len(like.emits), dtype=np.bool_)
    for start, (count, part) in parts.items():
        filled[start : start + count] = True
        for key, values in part.items():
            rows[key][start : start + count] = values
    if not filled.all():
        raise AssertionError(f"{request.req_id}: the run without caching left positions uncomputed")
    return Owed(rows, like.emits)


class _Run:
    """The run with the cache on."""

    def __init__(
        self,
        setup: Round,
        planned: list[PlannedRequest],
        owed: dict[str, Owed],
        cache_factory: CacheFactory,
        on_progress: Callable[[int], None],
    ) -> None:
        self.setup = setup
        self.engine = Engine(setup.engine, PrefixModel(setup.model))
        self.cache = cache_factory(setup, self.engine.view)
        self.cache.register_policy(setup.policy)
        self.ledger = Ledger(owed, hidden=setup.policy.needs_full_hidden_states)
        self.planned = planned
        self.on_progress = on_progress
        self.requests: dict[str, Request] = {}
        self.to_abort: dict[int, list[str]] = {}
        self.computed: dict[str, int] = {}

    def run(self) -> RoundResult:
        """Step until every request has ended and every step is consumed."""
        rng = Random(self.setup.seed + 1)
        coming = list(reversed(self.planned))
        step = 0
        try:
            with Consumer(self.cache, self.ledger, self.setup.manners, rng) as consumer:
                while coming or self.engine.has_work:
                    self._arrive(step, coming)
                    self._abort(step)
                    self._step(consumer)
                    step += 1
                consumer.finish()
        finally:
            self.cache.shutdown()
        self.ledger.close(self.computed)
        return self._result(step, consumer)

    def _arrive(self, step: int, coming: list[PlannedRequest]) -> None:
        while coming and coming[-1].arrival <= step:
            each = coming.pop()
            self.requests[each.req_id] = self.engine.add_request(each.req_id, list(each.prompt), each.max_tokens)
            if each.abort_after is not None:
                self.to_abort.setdefault(step + each.abort_after, []).append(each.req_id)

    def _abort(self, step: int) -> None:
        for req_id in self.to_abort.pop(step, ()):
            if self.requests[req_id].is_live:
                self.engine.abort(req_id)
                self.on_progress(1)

    def _step(self, consumer: Consumer) -> None:
        sched = self.engine.schedule()
        self.cache.new_step_starts(sched)
        self.engine.update_batch(sched)
        if not sched.total_num_scheduled_tokens:
            return
        output = self.engine.forward(sched)
        step_id = self.cache.save_outputs(
            output.hidden, output.mm, num_tokens_unpadded=output.num_tokens, num_tokens_padded=output.num_padded
        )
        ticket = self._ticket(step_id, sched, output)
        # From here on the forward's buffers may be used for something else.
        self.engine.scribble()
        for tag in output.mm[TAGS]:
            tag.fill_(99)
        self.on_progress(len(self.engine.finish_step(sched)))
        consumer.step_saved(ticket)

    def _ticket(self, step_id: int, sched: SchedulerOutput, output: StepOutput) -> Ticket:
        admitted = {new.req_id for new in sched.scheduled_new_reqs} | sched.scheduled_cached_reqs.resumed_req_ids
        computed = {req_id: self.engine.view.num_computed(req_id) for req_id in output.req_ids}
        for req_id, start in computed.items():
            self.computed[req_id] = max(self.computed.get(req_id, 0), start + sched.num_scheduled_tokens[req_id])
        return Ticket(
            step_id,
            computed,
            dict(sched.num_scheduled_tokens),
            frozenset(admitted),
            {
                REFERENCE: dict.fromkeys(output.req_ids, output.mm[REFERENCE].clone()),
                TAGS: {req_id: tag.clone() for req_id, tag in zip(output.req_ids, output.mm[TAGS], strict=True)},
            },
        )

    def _result(self, steps: int, consumer: Consumer) -> RoundResult:
        stats, ledger, counts = self.engine.scheduler.stats, self.ledger, consumer.counts
        tally = Tally(
            requests=len(self.planned),
            steps=steps,
            asynchronous_steps=0 if self.setup.eager else steps,
            admissions=stats.admissions,
            hits=stats.hits,
            same_step_hits=stats.same_step_hits,
            recycled_same_step_hits=stats.recycled_same_step_hits,
            preemptions=stats.preemptions,
            resumed_hits=stats.resumed_hits,
            resumed_gaps=ledger.gaps,
            aborts=stats.aborts,
            late=counts["late"],
            threaded=counts["threaded"] + counts["overlapping"],
            partial=counts["partial"],
            discarded=counts["discarded"],
            rows_from_cache=ledger.rows_from_cache,
            rows_compared=ledger.rows_compared,
            leftovers_compared=ledger.leftovers_compared,
            rows_kept=ledger.rows_kept,
            missing=ledger.missing,
            differences=ledger.differences,
        )
        return RoundResult(self.setup, tally, ledger.notes)
