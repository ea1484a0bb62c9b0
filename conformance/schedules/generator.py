"""Random traces: an environment that keeps vLLM's rules, and calls of the cache in every order the contract allows.

A seed is a trace: `generate(seed)` draws the sizes of the cache, then requests, then steps. What is drawn now and then:
same-step hits, chunked prefill, preemption (resumed requests are told as resumed or as new), aborts, streaming
continuations, multimodal items that end inside a block, ids used again, finished ids told late, blocks that were filled
from outside, mm keys that only some steps emit, small budgets, few staging pages, late and out-of-order and partial and
discarded materialize, calls that the contract refuses, full staging pools, failing writes, shutdown.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from conformance.schedules.arrivals import Arrivals
from conformance.schedules.blocks import Blocks
from conformance.schedules.chances import CODES, FEED, HIDDEN, TONES, Chances
from conformance.schedules.consumer import Consumer
from conformance.schedules.content import Prefix
from conformance.schedules.oracle import Delivery, Oracle, Served
from conformance.schedules.scheduler import Limits, Placed, Request, Scheduler
from conformance.schedules.trace import (
    CLOSED,
    CONTRACT,
    MEMORY,
    STAGES,
    TIMEOUT,
    Admission,
    Discard,
    Event,
    Fail,
    Header,
    Materialize,
    Part,
    Rest,
    Save,
    Shutdown,
    Start,
    Trace,
    Unsaved,
)


@dataclass(frozen=True)
class Generated:
    """A trace, and how often it holds what traces are made for."""

    trace: Trace
    counts: Counter[str]
    aborts: tuple[tuple[int, str], ...] = ()
    """Requests that were aborted, with the index of the start that tells their end: a trace does not say which were."""


def generate(seed: int) -> Generated:
    """The trace of a seed."""
    return _Generator(seed).run()


class _Generator:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = self.rng = random.Random(f"omni-prefix trace {seed}")
        hidden = rng.random() < 0.7
        keys = [*([HIDDEN] if hidden else []), FEED, CODES, TONES]
        self.chances = Chances.draw(rng, keys)
        block_size = rng.choice((1, 2, 2, 4))
        num_blocks = rng.randint(4, 10)
        max_tokens = rng.randint(2, 12)
        self.header = Header(
            seed=seed,
            block_size=block_size,
            num_blocks=num_blocks,
            keys=keys,
            staging_depth=rng.randint(1 if hidden else 2, 4),
            page_rows=max_tokens + rng.randrange(3),
            budget_bytes=rng.choice((0, 48, 96, 160, 400, 100_000) if hidden else (160, 400, 100_000)),
        )
        self.limits = Limits(max_tokens, rng.randint(1, 4), rng.choice((2, 4, max_tokens)), rng.choice((2, 2, 3)))
        self.blocks = Blocks(num_blocks, block_size, rng if rng.random() < 0.4 else None)
        self.scheduler = Scheduler(self.blocks, self.limits, rng)
        self.oracle = Oracle([key.name for key in keys])
        self.tell_resumed_as_new = rng.random() < 0.4
        self.arrivals = Arrivals(
            rng,
            capacity=num_blocks * block_size,
            vocabulary=self.limits.vocabulary,
            stream=self.chances.stream,
            item=self.chances.item,
        )
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.ended: list[str] = []
        """Ids whose requests ended and were not reported yet."""
        self.aborted: set[str] = set()
        """Those of them whose requests were aborted."""
        self.aborts: list[tuple[int, str]] = []
        self.consumer = Consumer(rng, self.chances, self.events, self.counts)
        self.fail_at = rng.randrange(2, 16) if rng.random() < 0.15 else None

    def run(self) -> Generated:
        """Draw the whole trace."""
        if self.rng.random() < 0.1:
            self._load_from_outside()
        for index in range(self.rng.randint(6, 24)):
            if index == self.fail_at:
                self._fail()
            self._arrive()
            self._interfere()
            self._step()
            self.consumer.consume_some()
        self._end()
        self.counts["preemptions"] = self.scheduler.preemptions
        self.counts["hit rows"] = self.oracle.hit_rows
        return Generated(Trace(header=self.header, events=self.events), self.counts, tuple(self.aborts))

    def _fail(self) -> None:
        """Something of the environment fails: every other time a write, else anything, here or a little later."""
        fail = Fail(stage=self.rng.choice(("copy", "write")))
        if self.rng.random() < 0.5:
            stage = self.rng.choice(STAGES)
            fail = Fail(stage=stage, after=self.rng.randrange(12 if stage == "interrupt" else 3))
        self.events.append(fail)
        self.counts["failures"] += 1

    # ------------------------------------------------------------------------- requests

    def _arrive(self) -> None:
        while len(self.scheduler.requests) < 5 and self.rng.random() < 0.6:
            request = self.arrivals.draw({request.req for request in self.scheduler.requests})
            self.counts["prompts with an item"] += min(request.content) < 0
            self.scheduler.add(request)

    def _interfere(self) -> None:
        """Aborts and preemptions between steps."""
        for request in list(self.scheduler.requests):
            if self.rng.random() < self.chances.abort:
                self._abort(request)
            elif request.status == "running" and self.rng.random() < self.chances.preempt:
                self.scheduler.preempt(request)

    def _abort(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.ended.append(request.req)
        self.aborted.add(request.req)
        self.counts["aborts"] += 1

    def _tell_aborts(self, finished: list[str]) -> None:
        """The next event is the start that tells these ends."""
        self.aborts += [(len(self.events), req) for req in finished if req in self.aborted]
        self.aborted.difference_update(finished)

    def _load_from_outside(self) -> None:
        size = self.blocks.block_size
        for _ in range(self.rng.randint(1, 2)):
            prefix: Prefix = (0, *self.rng.choice(self.arrivals.documents)[:size])
            if prefix not in self.blocks.published and self.blocks.load(prefix) is not None:
                self.counts["blocks filled from outside"] += 1

    # ------------------------------------------------------------------------- one step

    def _step(self) -> None:
        placed = self.scheduler.schedule()
        if not placed and self.scheduler.requests and self.rng.random() < 0.5:
            # Nobody can go on: streaming requests hold all blocks. An engine gives up on one of them.
            self._abort(self.rng.choice(self.scheduler.requests))
        again = {part.request.req for part in placed if part.kind == "new"}
        told = [req for req in self.ended if req in again or self.rng.random() >= self.chances.late_report]
        self.ended = [req for req in self.ended if req not in told]
        if not placed and not told:
            return
        finished = [*dict.fromkeys(told)]
        if self.rng.random() < 0.05:
            finished.append("never seen")
        for req in told:
            self.oracle.forget(req)
        self._tell_aborts(finished)
        victim = self._start(finished, placed)
        if placed and (victim is not None or self.rng.random() < self.chances.unsaved):
            self._lose(placed)
        elif placed:
            self._save(placed)
        self.ended += [request.req for request in self.scheduler.forward_done(placed)]
        if victim in self.scheduler.requests:
            self._abort(victim)

    def _start(self, finished: list[str], placed: list[Placed]) -> Request | None:
        """A step starts. Now and then it is told wrongly and refused; returns the request that was to blame."""
        admitted = [self._admission(part) for part in placed if part.kind != "running"]
        self.counts.update(f"{part.kind} admissions" for part in placed if part.kind != "running")
        event = Start(
            finished=finished,
            admitted=admitted,
            running={part.request.req: part.start for part in placed if part.kind == "running"},
            scheduled={part.request.req: part.count for part in placed},
        )
        hits = [i for i, a in enumerate(admitted) if a.computed]
        if not hits or self.rng.random() >= self.chances.misuse:
            self.events.append(event)
            return None
        at = self.rng.choice(hits)
        owed = self.oracle.offered(admitted[at].req) < admitted[at].computed
        covered = (admitted[at].computed - 1) // self.blocks.block_size  # one block too few, or no table at all
        short = (admitted[at].blocks or [])[:covered]
        bad = admitted[at].model_copy(update={"blocks": self.rng.choice((None, short)) if owed else None})
        admitted = [*admitted[:at], bad, *admitted[at + 1 :]]
        self.events.append(event.model_copy(update={"admitted": admitted, "error": CONTRACT}))
        self.counts["refused calls"] += 1
        return next(part.request for part in placed if part.request.req == bad.req)

    def _lose(self, placed: list[Placed]) -> None:
        """The engine computes a step, and the cache is never given its rows."""
        parts = [Part(req=p.request.req, start=p.start, slots=self._slots(p)[p.start :]) for p in placed]
        for told, part in zip(parts, placed, strict=True):
            self.oracle.computed(told.slots, part.request.content, part.start, ())
        self.events.append(Unsaved(batch=parts))
        self.counts["unsaved steps"] += 1

    def _admission(self, part: Placed) -> Admission:
        resumed = part.kind == "resumed" and not self.tell_resumed_as_new
        return Admission(req=part.request.req, computed=part.start, blocks=list(part.blocks), resumed=resumed)

    def _save(self, placed: list[Placed]) -> None:
        batch = self.rng.sample(placed, len(placed))
        emits = frozenset(name for name, chance in self.chances.emit.items() if self.rng.random() < chance)
        count = sum(part.count for part in batch)
        slots = {part.request.req: self._slots(part) for part in batch}
        writers = {slot for part in batch for slot in slots[part.request.req][part.start :]}
        rows: dict[str, list[int]] = {key: [] for key in self.oracle.keys if key in emits}
        for part in batch:
            mine = slots[part.request.req][part.start :]
            for key, column in self.oracle.computed(mine, part.request.content, part.start, rows).items():
                rows[key].extend(column)
        deliveries: dict[str, Delivery] = {}
        for part in batch:
            req, end = part.request.req, part.start + part.count
            served = Served(req, part.request.content, slots[req], part.start, end, part.kind != "running")
            deliveries[req] = self.oracle.deliver(served, emits)
        self._count_hits(batch, slots, deliveries, writers)
        parts = [Part(req=p.request.req, start=p.start, slots=list(slots[p.request.req][p.start :])) for p in batch]
        event = Save(
            label=self.consumer.saved,
            batch=parts,
            padded=min(count + self.rng.choice((0, 0, 1)), self.header.page_rows),
            rows=rows,
        )
        self._save_wrongly(event)
        self.events.append(event)
        self.consumer.take(deliveries)
        self.counts["steps"] += 1

    def _save_wrongly(self, event: Save) -> None:
        """Before a save: calls that are refused and change nothing, and a save that finds no page."""
        if event.rows and self.rng.random() < self.chances.misuse:
            key = self.rng.choice(sorted(event.rows))
            width = next(k.width for k in self.header.keys if k.name == key)
            seen = any(key in e.rows for e in self.events if isinstance(e, Save) and not e.error)
            if seen:
                self.events.append(event.model_copy(update={"widths": {key: width + 1}, "error": CONTRACT}))
                self.counts["refused calls"] += 1
        if len(self.consumer.open) < self.header.staging_depth and self.rng.random() < self.chances.misuse:
            count = sum(len(part.slots) for part in event.batch)
            num_bytes = count * sum(k.row_bytes for k in self.header.keys if k.deferred and k.name in event.rows)
            if 0 < num_bytes <= self.header.budget_bytes:
                self.events.append(event.model_copy(update={"clone_fails": True, "error": MEMORY}))
                self.counts["clones that fail"] += 1
        unconsumed, depth = self.consumer.open, self.header.staging_depth
        if len(unconsumed) == depth:
            if self.rng.random() < 0.3:
                self.events.append(event.model_copy(update={"error": TIMEOUT}))
                self.counts["full staging pools"] += 1
            while len(self.consumer.open) == self.header.staging_depth or self.rng.random() < 0.3 * bool(
                self.consumer.open
            ):
                self.consumer.consume_any()

    def _slots(self, part: Placed) -> list[int]:
        size = self.blocks.block_size
        return [part.blocks[p // size] * size + p % size for p in range(part.start + part.count)]

    def _count_hits(
        self,
        batch: list[Placed],
        slots: dict[str, list[int]],
        deliveries: dict[str, Delivery],
        writers: set[int],
    ) -> None:
        for part in batch:
            begin = deliveries[part.request.req].span[0]
            hit = slots[part.request.req][begin : part.start]
            if hit:
                self.counts["hits"] += 1
                self.counts["same-step hits"] += bool(writers.intersection(hit))
                self.counts["gaps of a resume"] += part.kind == "resumed" and begin > 0
            self.counts["lost hits"] += deliveries[part.request.req].lost

    # ------------------------------------------------------------------------- the end

    def _end(self) -> None:
        if self.rng.random() < 0.08:
            self._break_off()
            return
        for request in list(self.scheduler.requests):
            self._abort(request)
        finished = [*dict.fromkeys(self.ended)]
        self.rng.shuffle(finished)
        self._tell_aborts(finished)
        self.events.append(Start(finished=finished))
        self.consumer.consume_all()
        self.events.append(Rest())
        if self.rng.random() < 0.3:
            self.events += [Shutdown(), Shutdown(), Start(error=CLOSED), Discard(label=-1, error=CLOSED)]

    def _break_off(self) -> None:
        """Shutdown in the middle: writes are in flight, steps unconsumed, requests running."""
        self.events += [Shutdown(), Start(error=CLOSED)]
        for label in self.rng.sample(list(self.consumer.open), len(self.consumer.open)):
            self.events.append(Materialize(label=label, reqs=list(self.consumer.open[label]), error=CLOSED))
        self.counts["shutdowns in the middle"] += 1
