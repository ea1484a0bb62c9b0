"""Writes a trace step by step, as an engine would run it, with what is due worked out by the oracle.

A request's tokens are the letters of a text, and rows follow from it: two requests with one beginning are due the same
rows there, and a wrong row is visible at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from conformance.schedules.content import Prefix
from conformance.schedules.oracle import HIDDEN_KEY, Delivery, Oracle, Served, due_of
from conformance.schedules.trace import (
    Admission,
    Discard,
    Event,
    Fail,
    Header,
    KeySetting,
    Materialize,
    Part,
    Rest,
    Save,
    Start,
    Trace,
    Unsaved,
)

HIDDEN = KeySetting(name=HIDDEN_KEY, width=2, item_bytes=4)
K = KeySetting(name="k", width=2, item_bytes=8)
"""An immediate key, of 16 bytes a row."""
C = KeySetting(name="c", width=2, item_bytes=8, deferred=True)
"""A deferred one."""


@dataclass(frozen=True)
class Placed:
    """A request's part of a step: it computes `count` tokens from `computed` on."""

    req: str
    content: Prefix
    blocks: tuple[int, ...]
    computed: int
    count: int
    kind: str
    """new, resumed or running."""


def content_of(text: str, salt: int = 0) -> Prefix:
    """A text as content."""
    return (salt, *map(ord, text))


class Script:
    """A trace in the making. Block tables are the caller's; nothing checks that an engine would make them so."""

    def __init__(
        self,
        *,
        keys: Sequence[KeySetting] = (HIDDEN, K),
        block_size: int = 4,
        num_blocks: int = 8,
        depth: int = 4,
        page_rows: int = 64,
        budget: int = 10_000,
    ) -> None:
        self.header = Header(
            seed=0,
            block_size=block_size,
            num_blocks=num_blocks,
            keys=list(keys),
            staging_depth=depth,
            page_rows=page_rows,
            budget_bytes=budget,
        )
        self.oracle = Oracle([key.name for key in keys])
        self.events: list[Event] = []
        self.live: dict[str, Placed] = {}
        """Each live request as its last step left it; `computed` is where the next begins, `count` 0."""
        self.open: dict[int, dict[str, Delivery]] = {}
        self._labels = 0

    # ------------------------------------------------------------------------- parts of a step

    def new(
        self, req: str, text: str, blocks: Sequence[int], *, hit: int = 0, count: int | None = None, salt: int = 0
    ) -> Placed:
        """A request comes in, its first `hit` tokens computed already; it computes the rest, or `count` tokens."""
        return Placed(
            req, content_of(text, salt), tuple(blocks), hit, len(text) - hit if count is None else count, "new"
        )

    def resumed(self, req: str, blocks: Sequence[int], *, hit: int = 0, count: int | None = None) -> Placed:
        """A preempted request comes back, as vLLM's cached requests tell it."""
        was = self.live[req]
        rest = len(was.content) - 1 - hit
        return replace(was, blocks=tuple(blocks), computed=hit, count=rest if count is None else count, kind="resumed")

    def again(self, req: str, text: str, *, blocks: Sequence[int] | None = None) -> Placed:
        """A live request comes in as new, with `text` to compute behind what it computed: a streaming continuation."""
        was = self.live[req]
        content = was.content + content_of(text)[1:]
        held = was.blocks if blocks is None else tuple(blocks)
        return replace(was, content=content, blocks=held, count=len(content) - 1 - was.computed, kind="new")

    def go(self, req: str, text: str = "", *, count: int | None = None, blocks: Sequence[int] | None = None) -> Placed:
        """A running request computes what is left of its tokens, and of `text` behind them."""
        was = self.live[req]
        content = was.content + content_of(text)[1:]
        left = len(content) - 1 - was.computed
        held = was.blocks if blocks is None else tuple(blocks)
        return replace(was, content=content, blocks=held, count=left if count is None else count, kind="running")

    # ------------------------------------------------------------------------- calls

    def step(self, *placed: Placed, finished: Sequence[str] = (), emits: Collection[str] | None = None) -> int:
        """Start a step and save it; returns its label. `emits`: the keys it emits, all if left out."""
        self.start(*placed, finished=finished)
        return self.save(*placed, emits=emits)

    def start(
        self,
        *placed: Placed,
        finished: Sequence[str] = (),
        error: str | None = None,
        tables: Mapping[str, list[int] | None] | None = None,
    ) -> None:
        """Start a step. `tables`: what the engine tells of some requests' blocks instead of the truth."""
        told: dict[str, list[int] | None] = {p.req: list(p.blocks) for p in placed}
        told.update(tables or {})
        for req in finished:
            self.live.pop(req, None)
            self.oracle.forget(req)
        admitted = [
            Admission(req=p.req, computed=p.computed, blocks=told[p.req], resumed=p.kind == "resumed")
            for p in placed
            if p.kind != "running"
        ]
        self.events.append(
            Start(
                finished=list(finished),
                admitted=admitted,
                running={p.req: p.computed for p in placed if p.kind == "running"},
                scheduled={p.req: p.count for p in placed},
                error=error,
            )
        )

    def save(self, *placed: Placed, emits: Collection[str] | None = None, padding: int = 0) -> int:
        """Save the step that was started, the batch in the order given; returns its label."""
        emitted = frozenset(self.oracle.keys if emits is None else emits)
        rows: dict[str, list[int]] = {key: [] for key in self.oracle.keys if key in emitted}
        for part in placed:
            computed = self.oracle.computed(self._slots(part)[part.computed :], part.content, part.computed, rows)
            for key, column in computed.items():
                rows[key].extend(column)
        deliveries = {part.req: self.oracle.deliver(self._served(part), emitted) for part in placed}
        for part in placed:
            self.live[part.req] = replace(part, computed=part.computed + part.count, count=0, kind="running")
        label, self._labels = self._labels, self._labels + 1
        count = sum(part.count for part in placed)
        self.events.append(Save(label=label, batch=self._batch(placed), padded=count + padding, rows=rows))
        self.open[label] = deliveries
        return label

    def save_wrongly(
        self, *placed: Placed, error: str, widths: dict[str, int] | None = None, clone_fails: bool = False
    ) -> None:
        """A save of the started step that is refused, and changes nothing."""
        rows = {key: [0] * sum(part.count for part in placed) for key in self.oracle.keys}
        event = Save(
            label=self._labels,
            batch=self._batch(placed),
            padded=sum(part.count for part in placed),
            rows=rows,
            widths=widths or {},
            clone_fails=clone_fails,
            error=error,
        )
        self.events.append(event)

    def lose(self, *placed: Placed) -> None:
        """The engine computes the started step, and the cache is never given its rows."""
        for part in placed:
            self.oracle.computed(self._slots(part)[part.computed :], part.content, part.computed, ())
            self.live[part.req] = replace(part, computed=part.computed + part.count, count=0, kind="running")
        self.events.append(Unsaved(batch=self._batch(placed)))

    def take(self, label: int, *reqs: str) -> None:
        """Materialize a step for these requests, for all of its batch if none is named."""
        deliveries = self.open.pop(label)
        wanted = list(reqs or deliveries)
        due, error = due_of(deliveries, wanted)
        self.events.append(Materialize(label=label, reqs=wanted, due=due, error=error))

    def discard(self, label: int) -> None:
        """Consume a step and hand nothing over."""
        del self.open[label]
        self.events.append(Discard(label=label))

    def fail(self, stage: str) -> None:
        """The next copy, or the next pool write, fails."""
        self.events.append(Fail.model_validate({"stage": stage}))

    def end(self) -> Trace:
        """Everybody finishes, every step that is open is handed over, nothing is left behind."""
        if self.live:
            self.start(finished=list(self.live))
        for label in list(self.open):
            self.take(label)
        self.events.append(Rest())
        return self.trace()

    def trace(self) -> Trace:
        """The trace so far."""
        return Trace(header=self.header, events=list(self.events))

    # ------------------------------------------------------------------------- slots

    def _slots(self, part: Placed) -> list[int]:
        """Slots of the positions up to the end of what the step computes."""
        size = self.header.block_size
        return [part.blocks[p // size] * size + p % size for p in range(part.computed + part.count)]

    def _batch(self, placed: Sequence[Placed]) -> list[Part]:
        return [Part(req=p.req, start=p.computed, slots=self._slots(p)[p.computed :]) for p in placed]

    def _served(self, part: Placed) -> Served:
        end = part.computed + part.count
        return Served(part.req, part.content, self._slots(part), part.computed, end, part.kind != "running")
