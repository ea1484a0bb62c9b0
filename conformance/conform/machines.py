"""A hypothesis state machine: an engine's events one by one, chosen and made small by hypothesis.

For local use, beside the random traces: hypothesis looks for short sequences, and its own shrinking knows the choices
that were made. Every event goes to the production cache, eager, and to the reference model with its rules checked; the
rows due are those of the cache-off oracle.

    from hypothesis.stateful import run_state_machine_as_test
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=10_000, stateful_step_count=60))
"""

from __future__ import annotations

import random

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance.drivers.agree import tables_differ
from conformance.drivers.fast import FastDriver
from conformance.drivers.reference import ReferenceDriver
from conformance.schedules.blocks import Blocks
from conformance.schedules.chances import CODES, FEED, HIDDEN
from conformance.schedules.driver import Driver
from conformance.schedules.oracle import Delivery, Oracle, Served, due_of
from conformance.schedules.replay import Judge
from conformance.schedules.scheduler import Limits, Placed, Request, Scheduler
from conformance.schedules.trace import (
    CONTRACT,
    Admission,
    Discard,
    Event,
    Header,
    Materialize,
    Part,
    Rest,
    Save,
    Start,
    Trace,
    Unsaved,
)

MOST_TOKENS = 8
"""Tokens of the largest step."""
VOCABULARY = 2
ALIVE = 4
"""Requests that may be there at once."""


class CacheMachine(RuleBasedStateMachine):
    """Rules are what an engine does between two calls of the cache; invariants hold after each of them."""

    @initialize(
        block_size=st.sampled_from((1, 2)),
        num_blocks=st.integers(4, 7),
        depth=st.integers(1, 3),
        budget=st.sampled_from((100_000, 96, 0)),
        hidden=st.booleans(),
    )
    def begin(self, block_size: int, num_blocks: int, depth: int, budget: int, *, hidden: bool) -> None:
        """A cache and an engine, empty."""
        keys = [*([HIDDEN] if hidden else []), FEED, CODES]
        self.header = Header(
            seed=0,
            block_size=block_size,
            num_blocks=num_blocks,
            keys=keys,
            staging_depth=depth,
            page_rows=MOST_TOKENS,
            budget_bytes=budget,
        )
        self.blocks = Blocks(num_blocks, block_size, None)
        limits = Limits(MOST_TOKENS, ALIVE, MOST_TOKENS // 2, VOCABULARY)
        self.scheduler = Scheduler(self.blocks, limits, random.Random(0))
        self.oracle = Oracle([key.name for key in keys])
        self.reference: Driver = ReferenceDriver(self.header)
        self.fast: Driver = FastDriver(self.header)
        self.judges = Judge(), Judge()
        self.events: list[Event] = []
        self.ended: list[str] = []
        self.open: dict[int, dict[str, Delivery]] = {}
        self.labels = 0

    # ------------------------------------------------------------------------- rules

    @precondition(lambda self: len(self.scheduler.requests) < ALIVE)
    @rule(
        shared=st.integers(0, 6),
        tail=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
        more=st.integers(0, 3),
    )
    def arrive(self, shared: int, tail: list[int], more: int) -> None:
        """A request arrives; its prompt begins as others' do. Ids are used again."""
        alive = {request.req for request in self.scheduler.requests}
        req = next(f"r{i}" for i in range(ALIVE) if f"r{i}" not in alive)
        capacity = self.header.num_blocks * self.header.block_size
        prompt = ((0,) * shared + tuple(tail))[: capacity - 1]
        self.scheduler.add(Request(req, (0, *prompt), min(len(prompt) + more, capacity)))

    @precondition(lambda self: self.scheduler.requests)
    @rule(which=st.integers(0, ALIVE - 1))
    def abort(self, which: int) -> None:
        """A request ends before its time; that is told with the next step that is told of ends."""
        request = self.scheduler.requests[which % len(self.scheduler.requests)]
        self.scheduler.remove(request)
        self.ended.append(request.req)

    @precondition(lambda self: any(request.status == "running" for request in self.scheduler.requests))
    @rule(which=st.integers(0, ALIVE - 1))
    def preempt(self, which: int) -> None:
        """A running request gives its blocks back and will start over."""
        running = [request for request in self.scheduler.requests if request.status == "running"]
        self.scheduler.preempt(running[which % len(running)])

    @precondition(lambda self: len(self.open) < self.header.staging_depth)
    @rule(emits=st.sets(st.sampled_from((FEED.name, CODES.name))), late=st.booleans(), lost=st.booleans())
    def step(self, emits: set[str], *, late: bool, lost: bool) -> None:
        """A step is scheduled and computed. `late`: ends are told later. `lost`: the cache never gets its rows."""
        placed = self.scheduler.schedule()
        again = {part.request.req for part in placed if part.kind == "new"}
        told = [req for req in self.ended if not late or req in again]
        self.ended = [req for req in self.ended if req not in told]
        if not placed and not told:
            return
        for req in told:
            self.oracle.forget(req)
        self._start([*dict.fromkeys(told)], placed)
        if placed:
            (self._lose if lost else self._save)(placed, frozenset(emits | {HIDDEN.name}))
        self.ended += [request.req for request in self.scheduler.forward_done(placed)]

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), count=st.integers(0, ALIVE), discard=st.booleans())
    def consume(self, which: int, count: int, *, discard: bool) -> None:
        """A step is handed over, to some of its requests, or discarded; a second time is refused."""
        label = sorted(self.open)[which % len(self.open)]
        deliveries = self.open.pop(label)
        if discard:
            self._apply(Discard(label=label))
        else:
            reqs = list(deliveries)[: max(1, len(deliveries) - count)]
            due, error = due_of(deliveries, reqs)
            self._apply(Materialize(label=label, reqs=reqs, due=due, error=error))
        self._apply(Materialize(label=label, reqs=[], error=CONTRACT))

    @invariant()
    def tables_agree(self) -> None:
        """Tables of the production cache are the reference model's."""
        if getattr(self, "events", None):
            different = tables_differ(self.reference.snapshot(), self.fast.snapshot())
            assert different is None, different

    def teardown(self) -> None:
        """Everything ends and is consumed: nothing is left behind. The events are noted, as a trace's lines."""
        if not hasattr(self, "events"):
            return
        for request in list(self.scheduler.requests):
            self.scheduler.remove(request)
            self.ended.append(request.req)
        try:
            self._apply(Start(finished=[*dict.fromkeys(self.ended)]))
            for label in list(self.open):
                self.open.pop(label)
                self._apply(Discard(label=label))
            self._apply(Rest())
        finally:
            note("\n".join(Trace(header=self.header, events=self.events).lines()))

    # ------------------------------------------------------------------------- events

    def _apply(self, event: Event) -> None:
        index = len(self.events)
        self.events.append(event)
        for judge, driver in zip(self.judges, (self.reference, self.fast), strict=True):
            mismatch = judge.judge(index, event, driver.apply(event))
            assert mismatch is None, f"{type(driver).__name__}: {mismatch}"

    def _start(self, finished: list[str], placed: list[Placed]) -> None:
        admitted = [
            Admission(
                req=part.request.req, computed=part.start, blocks=list(part.blocks), resumed=part.kind == "resumed"
            )
            for part in placed
            if part.kind != "running"
        ]
        running = {part.request.req: part.start for part in placed if part.kind == "running"}
        scheduled = {part.request.req: part.count for part in placed}
        self._apply(Start(finished=finished, admitted=admitted, running=running, scheduled=scheduled))

    def _slots(self, part: Placed) -> list[int]:
        size = self.blocks.block_size
        return [part.blocks[p // size] * size + p % size for p in range(part.start + part.count)]

    def _parts(self, placed: list[Placed]) -> list[Part]:
        return [Part(req=p.request.req, start=p.start, slots=self._slots(p)[p.start :]) for p in placed]

    def _lose(self, placed: list[Placed], _: frozenset[str]) -> None:
        for told, part in zip(self._parts(placed), placed, strict=True):
            self.oracle.computed(told.slots, part.request.content, part.start, ())
        self._apply(Unsaved(batch=self._parts(placed)))

    def _save(self, placed: list[Placed], emits: frozenset[str]) -> None:
        rows: dict[str, list[int]] = {key: [] for key in self.oracle.keys if key in emits}
        parts = self._parts(placed)
        for told, part in zip(parts, placed, strict=True):
            for key, column in self.oracle.computed(told.slots, part.request.content, part.start, rows).items():
                rows[key].extend(column)
        deliveries: dict[str, Delivery] = {}
        for part in placed:
            end = part.start + part.count
            served = Served(
                part.request.req, part.request.content, self._slots(part), part.start, end, part.kind != "running"
            )
            deliveries[part.request.req] = self.oracle.deliver(served, emits)
        count = sum(part.count for part in placed)
        self._apply(Save(label=self.labels, batch=parts, padded=count, rows=rows))
        self.open[self.labels] = deliveries
        self.labels += 1
