"""A small seeded scheduler under the rules of ``VllmEnv``, and the consumer of its steps. It drives any cache.

An `Environment` alone chooses what happens: which requests a step computes, on which blocks, which are preempted or
freed and when that is told, which steps are handed over and when. What the cache does meanwhile is told by a recorder
into the same `Tale`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from conformance.schedules.trace import Admission, Part, Start
from conformance.tla.accept import Setting
from conformance.tla.values import Function

Event = Mapping[str, Any]

SETTING = Setting(
    requests=("a", "b", "c", "d"),
    text={"a": (0, 0, 0, 1, 2), "b": (0, 0, 0, 0, 1), "c": (0, 0, 2), "d": (1, 0)},
    prompt_len={"a": 3, "b": 3, "c": 2, "d": 1},
    num_blocks=5,
    block_size=1,
    keys=frozenset({"hidden", "codes", "mm"}),
    hidden=frozenset({"hidden"}),
    deferred=frozenset({"codes"}),
    emit_tokens={"codes": frozenset({0, 1}), "mm": frozenset({1, 2})},
    env=frozenset({"streaming", "whole"}),
    fine=True,
    pressure=False,
)
"""Four requests, three of one family; blocks of one token; a step's tokens are alike, so it emits a key whole."""

MAX_CHUNK = 2
"""Tokens of one request in one step, at most."""
MAX_BATCH = 3


class Cache(Protocol):
    """What an environment needs of a cache: the public contract, in the words of `conformance.schedules`."""

    def start(self, event: Start) -> None:
        """A step starts."""
        ...

    def save(self, batch: Sequence[Part], contents: Sequence[tuple[int, ...]], emits: frozenset[str]) -> int:
        """The step is saved: the content prefix of each token it computed, and the keys that have a row of each."""
        ...

    def take(self, step: int, reqs: tuple[str, ...]) -> bool:
        """Materialize it, any thread. False if that raised a row error."""
        ...

    def discard(self, step: int) -> None:
        """Discard it, any thread."""
        ...

    def tables(self) -> Mapping[str, Any]:
        """Its tables under the names and in the values of ``TraceRows!Tables``, with nothing on its way."""
        ...


@dataclass
class Tale:
    """Events in the order in which they happened, told from any thread."""

    events: list[Event] = field(default_factory=list)
    crash: str = ""
    """Why the tale breaks off, if it does."""

    def tell(self, thread: str, action: str, **fields: Any) -> None:
        """One more event, unless the tale has broken off."""
        if not self.crash:
            self.events.append({"thread": thread, "action": action, **fields})

    def break_off(self, why: str) -> None:
        """What happens from here on is not told."""
        self.crash = self.crash or why


@dataclass(frozen=True)
class Recorded:
    """A trace, and what happened in it."""

    events: tuple[Event, ...]
    seen: Counter[str]
    crash: str = ""
    """Why it breaks off, if it does."""


@dataclass
class _Placed:
    req: str
    kind: str
    start: int
    n: int


@dataclass
class _Request:
    known: int
    status: str = "waiting"
    computed: int = 0
    table: tuple[int, ...] = ()


def _at_once(call: Callable[[], None]) -> None:
    call()


@dataclass
class Environment:
    """The scheduler and the consumer. `consumer` runs each handover: at once, or on a thread of its own.

    Every so many rounds the cache is asked for its tables, which are told as an event.
    """

    cache: Cache
    tale: Tale
    setting: Setting
    random: Random
    consumer: Callable[[Callable[[], None]], None] = _at_once
    inspects: int = 1
    hashes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    requests: dict[str, _Request] = field(default_factory=dict)
    unconsumed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    """What happened, by name."""

    def run(self, rounds: int) -> None:
        """So many rounds of the scheduler. Raises `ValueError` for a setting that is beyond it."""
        if self.setting.block_size != 1 or "whole" not in self.setting.env:
            raise ValueError("only blocks of one token, and steps that emit a key whole")
        for req in self.setting.requests:
            self.requests[req] = _Request(self.setting.prompt_len[req])
        for number in range(rounds):
            if number % self.inspects == self.inspects - 1:
                self._inspect()
            self._consume(0.4)
            self._between()
            self._step()
        self._consume(1.0)
        self._inspect()

    def _inspect(self) -> None:
        tables = {name: Function(t) if isinstance(t, Mapping) else t for name, t in self.cache.tables().items()}
        self.tale.tell("engine", "Inspect", tables=Function(tables))

    # -- between steps

    def _consume(self, chance: float) -> None:
        """Some steps are handed over, some discarded, the others stay for later."""
        for step, reqs in tuple(self.unconsumed.items()):
            if self.random.random() >= chance:
                continue
            del self.unconsumed[step]
            self.seen["late"] += bool(self.unconsumed) and step != max((step, *self.unconsumed))
            discards = self.random.random() < 0.2
            self.seen["discard"] += discards
            self.consumer(self._discarding(step) if discards else self._taking(step, reqs))

    def _discarding(self, step: int) -> Callable[[], None]:
        return lambda: self.cache.discard(step)

    def _taking(self, step: int, reqs: tuple[str, ...]) -> Callable[[], None]:
        def take() -> None:
            if not self.cache.take(step, reqs):
                self.seen["row error"] += 1

        return take

    def _between(self) -> None:
        for req, state in self.requests.items():
            done = state.known == len(self.setting.text[req]) == state.computed
            if state.status == "running" and not done and self.random.random() < 0.15:
                state.status, state.computed, state.table = "preempted", 0, ()
                self.seen["preemption"] += 1
                self.tale.tell("scheduler", "PreemptRequest", req=req)
            elif state.status in ("running", "preempted") and (done or self.random.random() < 0.12):
                self.seen["finish" if done else "abort"] += 1
                self.requests[req] = _Request(self.setting.prompt_len[req], "freed")
                self.tale.tell("scheduler", "FreeRequest", req=req)

    # -- one step

    def _step(self) -> None:
        batch: list[_Placed] = []
        reported: set[str] = set()
        for req in self.random.sample(self.setting.requests, len(self.setting.requests)):
            if len(batch) < MAX_BATCH and self.random.random() < 0.7:
                self._place(req, batch, reported)
        freed = {req for req, state in self.requests.items() if state.status == "freed"}
        if not freed or self.random.random() < 0.6:
            reported |= freed
            for req in freed:
                self.requests[req].status = "gone"
        if not batch and not reported:
            return
        self.tale.tell("scheduler", "EndSchedule", reported=frozenset(reported))
        self.cache.start(
            Start(
                finished=[req for req in self.setting.requests if req in reported],
                admitted=[
                    Admission(req=e.req, computed=e.start, blocks=list(self.requests[e.req].table))
                    for e in batch
                    if e.kind != "running"
                ],
                running={e.req: e.start for e in batch if e.kind == "running"},
                scheduled={e.req: e.n for e in batch},
            )
        )
        if batch:
            self._save(batch)

    def _place(self, req: str, batch: list[_Placed], reported: set[str]) -> None:
        """Put the request into the step, if the rules and the room allow it."""
        state, text = self.requests[req], self.setting.text[req]
        if state.status == "running":
            kind = "continued" if self.random.random() < 0.1 else "running"
            start, limit, kept = state.computed, state.known, state.table
        else:
            kind = "resumed" if state.status == "preempted" else "new"
            kept = self._hit(tuple(text[: state.known - 1]))
            start, limit = len(kept), state.known
        taken = {self.setting.text[e.req][e.start] for e in batch}
        alike = next((i for i in range(start, limit) if text[i] != text[start]), limit)
        used = {block for other in self.requests.values() for block in other.table} | set(kept)
        free = [block for block in range(self.setting.num_blocks) if block not in used]
        most = min(MAX_CHUNK, alike - start, len(free))
        if most < 1 or not taken <= {text[start]}:
            return
        n = self.random.randint(1, most)
        if kind == "new" and state.status == "freed":
            reported.add(req)
            self.seen["id used again at once"] += 1
        state.status, state.computed = "running", start + n
        state.table = (*kept, *self.random.sample(free, n))
        for i in range(start, start + n):
            self.hashes[state.table[i]] = tuple(text[: i + 1])
        batch.append(_Placed(req, kind, start, n))
        self.seen[kind] += 1
        self.seen["hit"] += kind in ("new", "resumed") and start > 0
        self.tale.tell("scheduler", "ScheduleRequest", req=req, kind=kind, computed=start, n=n, blocks=state.table)

    def _hit(self, content: tuple[int, ...]) -> tuple[int, ...]:
        """The longest hit on a content; any of the blocks that hold a part of it."""
        kept: list[int] = []
        for end in range(1, len(content) + 1):
            blocks = sorted(block for block, prefix in self.hashes.items() if prefix == content[:end])
            if not blocks:
                break
            kept.append(self.random.choice(blocks))
        return tuple(kept)

    def _save(self, batch: list[_Placed]) -> None:
        text = self.setting.text
        parts = [Part(req=e.req, start=e.start, slots=list(self.requests[e.req].table[e.start :])) for e in batch]
        contents = [text[e.req][: p + 1] for e in batch for p in range(e.start, e.start + e.n)]
        token = contents[0][-1]
        emits = self.setting.hidden | {key for key, tokens in self.setting.emit_tokens.items() if token in tokens}
        step = self.cache.save(parts, [tuple(content) for content in contents], emits)
        self.unconsumed[step] = tuple(e.req for e in batch)
        for e in batch:
            state = self.requests[e.req]
            state.known += state.computed == state.known < len(text[e.req])

    def ended(self) -> Recorded:
        """The trace so far."""
        return Recorded(
            tuple(self.tale.events), self.seen + Counter(e["action"] for e in self.tale.events), self.tale.crash
        )
