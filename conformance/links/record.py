"""The reference model's own traces, as events of the specification.

An `Environment` is a small seeded scheduler under the rules of ``VllmEnv``: which requests a step computes, on which
blocks, which are preempted or freed, and when that is told. It alone chooses what happens. The reference model's driver
is called through its public contract and chooses the actions; a `Recorder` observes them and tells them as events.
`conformance.tla.accept` then asks TLC whether the whole is a behaviour of ``PrefixCache``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from conformance.tla.accept import Setting
from conformance.tla.replay import AMPLE, number
from conformance.tla.values import Function
from omni_prefix_ref import Admission, BatchItem, EagerDriver, KeySpec, Machine, Settings, StepStart
from omni_prefix_ref.errors import OmniPrefixCacheRowError

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

_MAX_CHUNK = 2


def reference_settings(setting: Setting) -> Settings:
    """The reference model's settings, with pages and bytes enough that neither is ever waited for."""
    keys = tuple(KeySpec(key, row_bytes=1, deferred=key in setting.deferred) for key in sorted(setting.keys))
    return Settings(setting.block_size, setting.num_blocks, keys, staging_depth=64, page_rows=AMPLE, budget_bytes=AMPLE)


class LaggingDriver(EagerDriver):
    """The eager driver, whose committer stops short at random and goes on when it is called again."""

    def __init__(self, settings: Settings, *, lag: Random, **kwargs: Any) -> None:
        super().__init__(settings, **kwargs)
        self._lag = lag

    def dispatch(self) -> None:
        self.queue_tasks()
        while self._lag.random() < 0.8 and self.commit_some():
            pass


# ------------------------------------------------------------------------- what the reference model does


class RecordError(Exception):
    """The reference model did what has no event here."""


_ENGINE = {
    "finish_request": "FinishRequest",
    "start_request": "StartRequest",
    "plan_read": "PlanRead",
    "claim_page": "ClaimPage",
    "unplan_reads": "UnplanReads",
    "preserve_reads": "PreserveReads",
    "claim_slots": "ClaimSlots",
    "register_write": "RegisterWrite",
    "append_rows": "AppendRows",
    "open_step": "OpenStep",
}
_COMMITTER = {
    "queue_task": "QueueTask",
    "claim_copy": "ClaimCopy",
    "finish_copy": "FinishCopy",
    "write_pool": "WritePool",
    "commit_task": "CommitTask",
}
_SILENT = frozenset({"abandon_reads", "take_step", "outputs", "reserve_budget"})
"""Bytes are none of PrefixCache's business, and there a step is taken where its rows are handed over."""
_IDLE = frozenset({"unplan_reads", "fetch_read", "abandon_reads"})
"""Stages that the reference model runs, and the specification passes over, where there is nothing to do."""


class Recorder:
    """An observer. Steps, tasks and reads get the numbers that the specification gives them."""

    def __init__(self, setting: Setting) -> None:
        self.events: list[Event] = []
        self._setting = setting
        self._steps: dict[int, int] = {}
        self._tasks: dict[int, int] = {}
        self._reads: dict[int, tuple[int, str]] = {}

    def tell(self, thread: str, action: str, **fields: Any) -> None:
        """One more event."""
        self.events.append({"thread": thread, "action": action, **fields})

    def __call__(self, action: str, args: tuple[Any, ...], before: Machine, after: Machine) -> None:
        """An action of the reference model."""
        for task in sorted(after.tasks.keys() - before.tasks.keys()):
            self._tasks[task] = len(self._tasks) + 1
        for read in sorted(after.reads.keys() - before.reads.keys()):
            self._reads[read] = (len(self._steps) + 1, after.reads[read].req)
        if action == "claim_page":
            self._steps[args[0]] = len(self._steps) + 1
        if action in _IDLE and after == before:
            return
        if action in _ENGINE:
            self.tell("engine", _ENGINE[action], **self._engine_fields(action, args))
        elif action in _COMMITTER:
            task = before.queue[0] if action == "claim_copy" else args[0]
            self.tell("committer", _COMMITTER[action], task=self._tasks[task])
        elif action == "fetch_read":
            self.tell("builder", "FetchRead", read=self._reads[args[0]])
        elif action in ("release_step", "discard_step"):
            how = "materialize" if action == "release_step" else "discard"
            self.tell("builder", "TakeStep", step=self._steps[args[0]], how=how)
        elif action not in _SILENT or action == "abandon_reads":
            raise RecordError(f"{action}{args} has no event")

    def _engine_fields(self, action: str, args: tuple[Any, ...]) -> Event:
        fields: Event
        match action:
            case "finish_request":
                fields = {"req": args[0]}
            case "start_request":
                fields = {"req": args[0], "computed": args[1], "blocks": tuple(args[2])}
            case "plan_read":
                fields = {"read": self._reads[args[0]]}
            case "preserve_reads":
                fields = {"slots": frozenset(args[0])}
            case "claim_slots":
                slots = frozenset(args[1])
                emits = {key: slots if key in args[2] else frozenset() for key in self._setting.keys}
                fields = {"slots": slots, "emits": Function(emits)}
            case "claim_page" | "register_write" | "open_step":
                fields = {"step": self._steps[args[0]]}
            case _:  # the actions that are not told the step run for the one being made
                fields = {"step": len(self._steps)}
        return fields


# ------------------------------------------------------------------------- what the scheduler does


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


@dataclass
class Environment:
    """A seeded scheduler and consumer over a driver of the reference model. `run` gives the trace."""

    driver: EagerDriver
    recorder: Recorder
    setting: Setting
    random: Random
    hashes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    requests: dict[str, _Request] = field(default_factory=dict)
    unconsumed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    """What happened, by name."""

    def run(self, rounds: int) -> tuple[Event, ...]:
        """So many rounds of the scheduler."""
        for req in self.setting.requests:
            self.requests[req] = _Request(self.setting.prompt_len[req])
        for _ in range(rounds):
            self._consume(0.4)
            self._between()
            self._step()
        self._consume(1.0)
        return tuple(self.recorder.events)

    # -- between steps

    def _consume(self, chance: float) -> None:
        """Some steps are handed over, some discarded, the others stay for later."""
        for step, reqs in tuple(self.unconsumed.items()):
            if self.random.random() >= chance:
                continue
            del self.unconsumed[step]
            self.seen["late"] += bool(self.unconsumed) and step != max((step, *self.unconsumed))
            if self.random.random() < 0.2:
                self.driver.discard_step(step)
                self.seen["discard"] += 1
                continue
            try:
                self.driver.materialize(step, reqs)
            except OmniPrefixCacheRowError:
                self.seen["row error"] += 1

    def _between(self) -> None:
        for req, state in self.requests.items():
            done = state.known == len(self.setting.text[req]) == state.computed
            if state.status == "running" and not done and self.random.random() < 0.15:
                state.status, state.computed, state.table = "preempted", 0, ()
                self.seen["preemption"] += 1
                self.recorder.tell("scheduler", "PreemptRequest", req=req)
            elif state.status in ("running", "preempted") and (done or self.random.random() < 0.12):
                self.seen["finish" if done else "abort"] += 1
                self.requests[req] = _Request(self.setting.prompt_len[req], "freed")
                self.recorder.tell("scheduler", "FreeRequest", req=req)

    # -- one step

    def _step(self) -> None:
        batch: list[_Placed] = []
        reported: set[str] = set()
        for req in self.random.sample(self.setting.requests, len(self.setting.requests)):
            if len(batch) < 3 and self.random.random() < 0.7:
                self._place(req, batch, reported)
        freed = {req for req, state in self.requests.items() if state.status == "freed"}
        if not freed or self.random.random() < 0.6:
            reported |= freed
            for req in freed:
                self.requests[req].status = "gone"
        if not batch and not reported:
            return
        self.recorder.tell("scheduler", "EndSchedule", reported=frozenset(reported))
        self.driver.new_step_starts(
            StepStart(
                finished=tuple(req for req in self.setting.requests if req in reported),
                admitted=tuple(
                    Admission(e.req, e.start, self.requests[e.req].table) for e in batch if e.kind != "running"
                ),
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
        most = min(_MAX_CHUNK, alike - start, len(free))
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
        self.recorder.tell("scheduler", "ScheduleRequest", req=req, kind=kind, computed=start, n=n, blocks=state.table)

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
        items = tuple(BatchItem(e.req, e.start, self.requests[e.req].table[e.start : e.start + e.n]) for e in batch)
        contents = [text[e.req][: p + 1] for e in batch for p in range(e.start, e.start + e.n)]
        token = contents[0][-1]
        emits = self.setting.hidden | {key for key, tokens in self.setting.emit_tokens.items() if token in tokens}
        rows = {key: tuple(map(number, contents)) for key in sorted(emits)}
        step = self.driver.save_outputs(items, rows)
        self.unconsumed[step] = tuple(e.req for e in batch)
        for e in batch:
            state = self.requests[e.req]
            state.known += state.computed == state.known < len(text[e.req])


@dataclass(frozen=True)
class Recorded:
    """A trace, and what happened in it."""

    events: tuple[Event, ...]
    seen: Counter[str]


def record(
    seed: int,
    *,
    rounds: int = 12,
    machine: type[Machine] = Machine,
    setting: Setting = SETTING,
) -> Recorded:
    """A random trace of the reference model: its eager driver with even seeds, a committer that lags with odd ones."""
    if setting.block_size != 1 or setting.pressure or "whole" not in setting.env:
        raise ValueError("only blocks of one token, no pressure, and steps that emit a key whole")
    random, recorder = Random(seed), Recorder(setting)
    settings = reference_settings(setting)
    driver = (
        LaggingDriver(settings, lag=Random(seed), machine=machine, observers=[recorder])
        if seed % 2
        else EagerDriver(settings, machine=machine, observers=[recorder])
    )
    environment = Environment(driver, recorder, setting, random)
    events = environment.run(rounds)
    seen = environment.seen + Counter(event["action"] for event in events)
    return Recorded(events, seen)
