"""The reference model's own traces, as events of the specification.

The reference model's driver is called by an `Environment` through its public contract and chooses the actions; a
`Recorder` observes them and tells them as events. `conformance.tla.accept` then asks TLC whether the whole is a
behaviour of ``PrefixCache``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from conformance.links.environment import SETTING, Environment, Event, Recorded, Tale
from conformance.links.translate import row_number
from conformance.schedules.trace import Part, Start
from conformance.tla.accept import Setting
from conformance.tla.values import Function
from omni_prefix_ref import Admission, BatchItem, EagerDriver, KeySpec, Machine, Settings, StepStart
from omni_prefix_ref.errors import OmniPrefixCacheRowError
from omni_prefix_ref.state import HitRead, LogRow, PoolRow

AMPLE = 1_000_000
"""Rows, of pages and of the device, enough that nobody ever waits for one."""


def reference_settings(setting: Setting, budget: int = AMPLE) -> Settings:
    """The reference model's settings, with pages enough that none is ever waited for."""
    keys = tuple(KeySpec(key, row_bytes=1, deferred=key in setting.deferred) for key in sorted(setting.keys))
    return Settings(
        setting.block_size, setting.num_blocks, keys, staging_depth=64, page_rows=AMPLE, budget_bytes=budget
    )


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
    "seal_write": "SealWrite",
    "reserve_budget": "ReserveBudget",
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
_SILENT = frozenset({"abandon_reads", "take_step", "outputs"})
"""In PrefixCache a step is taken where its rows are handed over."""
_IDLE = frozenset({"unplan_reads", "fetch_read", "abandon_reads"})
"""Stages that the reference model runs, and the specification passes over, where there is nothing to do."""


def _kinds(read: HitRead) -> dict[tuple[str, int], str]:
    """What each key and position of a planned read resolved to."""
    named = {PoolRow: "pool", LogRow: "log", type(None): "hole"}
    return {
        (key, read.start + at): named[type(source)]
        for key, sources in (read.plan or {}).items()
        for at, source in enumerate(sources)
    }


def _state(read: HitRead) -> str:
    if read.failed:
        return "failed"
    if read.rows is not None:
        return "fetched"
    return "planned" if read.plan is not None else "unplanned"


class Recorder:
    """An observer. Steps, tasks and reads get the numbers that the specification gives them."""

    def __init__(self, setting: Setting, tale: Tale) -> None:
        self.tale = tale
        self._setting = setting
        self.steps: dict[int, int] = {}
        self.tasks: dict[int, int] = {}
        self.reads: dict[int, tuple[int, str]] = {}

    def __call__(self, action: str, args: tuple[Any, ...], before: Machine, after: Machine) -> None:
        """An action of the reference model."""
        for task in sorted(after.tasks.keys() - before.tasks.keys()):
            self.tasks[task] = len(self.tasks) + 1
        for read in sorted(after.reads.keys() - before.reads.keys()):
            self.reads[read] = (len(self.steps) + 1, after.reads[read].req)
        if action == "claim_page":
            self.steps[args[0]] = len(self.steps) + 1
        if (action in _IDLE and after == before) or (action == "reserve_budget" and not self._setting.pressure):
            return
        if action in _ENGINE:
            self.tale.tell("engine", _ENGINE[action], **self._engine_fields(action, args, before, after))
        elif action in _COMMITTER:
            task = before.queue[0] if action == "claim_copy" else args[0]
            self.tale.tell("committer", _COMMITTER[action], task=self.tasks[task])
        elif action == "fetch_read":
            self.tale.tell("builder", "FetchRead", read=self.reads[args[0]])
        elif action in ("release_step", "discard_step"):
            how = "materialize" if action == "release_step" else "discard"
            self.tale.tell("builder", "TakeStep", step=self.steps[args[0]], how=how)
        elif action not in _SILENT or action == "abandon_reads":
            raise RecordError(f"{action}{args} has no event")

    def _engine_fields(self, action: str, args: tuple[Any, ...], before: Machine, after: Machine) -> Event:
        fields: Event
        match action:
            case "finish_request":
                fields = {"req": args[0]}
            case "start_request":
                fields = {"req": args[0], "computed": args[1], "blocks": tuple(args[2])}
            case "plan_read":
                fields = {"read": self.reads[args[0]], "kinds": Function(_kinds(after.reads[args[0]]))}
            case "seal_write":
                fields = {"task": self.tasks[before.open_write[args[0]]]}
            case "preserve_reads":
                fields = {"slots": frozenset(args[0])}
            case "claim_slots":
                slots = frozenset(args[1])
                versions = {slot: after.version[slot] for slot in slots}
                emits = {key: slots if key in args[2] else frozenset() for key in self._setting.keys}
                fields = {"slots": slots, "versions": Function(versions), "emits": Function(emits)}
            case "claim_page" | "register_write" | "open_step":
                fields = {"step": self.steps[args[0]]}
            case _:  # the actions that are not told the step run for the one being made
                fields = {"step": len(self.steps)}
        return fields


# ------------------------------------------------------------------------- what the environment asks for


class ReferenceCache:
    """A driver of the reference model, as an environment calls it."""

    def __init__(self, driver: EagerDriver, recorder: Recorder) -> None:
        self._driver = driver
        self._recorder = recorder

    def start(self, event: Start) -> None:
        """See `Cache`."""
        admitted = (Admission(a.req, a.computed, None if a.blocks is None else tuple(a.blocks)) for a in event.admitted)
        self._driver.new_step_starts(StepStart(tuple(event.finished), tuple(admitted), event.scheduled))

    def save(self, batch: Sequence[Part], contents: Sequence[tuple[int, ...]], emits: frozenset[str]) -> int:
        """See `Cache`."""
        items = tuple(BatchItem(part.req, part.start, tuple(part.slots)) for part in batch)
        return self._driver.save_outputs(items, {key: tuple(map(row_number, contents)) for key in sorted(emits)})

    def take(self, step: int, reqs: tuple[str, ...]) -> bool:
        """See `Cache`."""
        try:
            self._driver.materialize(step, reqs)
        except OmniPrefixCacheRowError:
            return False
        return True

    def discard(self, step: int) -> None:
        """See `Cache`."""
        self._driver.discard_step(step)

    def tables(self) -> Mapping[str, Any]:
        """See `Cache`. Between two actions all is at rest."""
        machine, step, task = self._driver.machine, self._recorder.steps, self._recorder.tasks
        opened = ((read, hit) for context in machine.steps.values() for read in context.reads.values()
                  for hit in [machine.reads[read]])  # fmt: skip
        return {
            "version": dict(enumerate(machine.version)),
            "owner": {slot: 0 if owner is None else step[owner] for slot, owner in enumerate(machine.owner)},
            "pins": dict(enumerate(machine.pins)),
            "occupancy": {
                key: Function({slot: found.value for slot, found in enumerate(column)})
                for key, column in machine.occupancy.items()
            },
            "emitted": dict(machine.emitted),
            "open_write": {req: (task[write], machine.write_n[req]) for req, write in machine.open_write.items()},
            "tasks": {task[number]: write.state.name for number, write in machine.tasks.items()},
            "steps": frozenset(step[number] for number in machine.steps),
            "reads": {self._recorder.reads[read]: _state(hit) for read, hit in opened},
        }


def record(
    seed: int,
    *,
    rounds: int = 12,
    machine: type[Machine] = Machine,
    setting: Setting = SETTING,
    budget: int = AMPLE,
) -> Recorded:
    """A random trace of the reference model: its eager driver with even seeds, a committer that lags with odd ones.

    `budget`: deferred rows that fit on the device; with `setting.pressure` it has to be one that a step fits in.
    """
    tale = Tale()
    recorder = Recorder(setting, tale)
    settings = reference_settings(setting, budget)
    driver = (
        LaggingDriver(settings, lag=Random(seed), machine=machine, observers=[recorder])
        if seed % 2
        else EagerDriver(settings, machine=machine, observers=[recorder])
    )
    environment = Environment(ReferenceCache(driver, recorder), tale, setting, Random(seed))
    environment.run(rounds)
    return environment.ended()
