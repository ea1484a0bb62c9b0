"""Behaviours of the specification on the reference model: the same events, the same state after each.

An event of ``PrefixCache`` is a call of a method of `Machine`. What the two number differently (steps, tasks, reads) is
matched as it is issued; rows, which the specification calls by their content, get a number for each content.
Only steps that emit a key whole can be replayed; the models ``rows_graph`` and ``rows_replay`` have no others.
"""

# ruff: noqa: SLF001 - each method calls the private parts of the next replay, an object of its own class
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from conformance.tla.graph import Graph
from conformance.tla.tlc import State
from conformance.tla.trace import load_trace
from omni_prefix_ref import Machine
from omni_prefix_ref.state import ZEROS, BatchItem, KeySpec, Settings

AMPLE = 1_000_000
"""Pages and bytes are not the business of PrefixCache, so the reference model gets plenty."""


class ReplayError(Exception):
    """The reference model does not follow: it refuses an event, or is in another state after it."""


@dataclass(frozen=True)
class World:
    """The constants that a replay needs."""

    block_size: int
    num_blocks: int
    keys: tuple[str, ...]
    hidden: frozenset[str]
    deferred: frozenset[str]
    emit_tokens: Mapping[str, frozenset[int]]
    fine: bool

    def settings(self) -> Settings:
        """The reference model's settings."""
        keys = tuple(KeySpec(key, row_bytes=1, deferred=key in self.deferred) for key in self.keys)
        return Settings(self.block_size, self.num_blocks, keys, staging_depth=64, page_rows=AMPLE, budget_bytes=AMPLE)


@dataclass(frozen=True)
class Replay:
    """The reference model at one state of the specification, and which of its ids are which."""

    world: World
    machine: Machine
    steps: Mapping[int, int] = field(default_factory=dict)
    tasks: Mapping[int, int] = field(default_factory=dict)
    reads: Mapping[tuple[int, str], int] = field(default_factory=dict)

    @classmethod
    def start(cls, world: World) -> Replay:
        """Before the first event."""
        return cls(world, Machine.start(world.settings()))

    # ------------------------------------------------------------------------- one event

    def follow(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Replay:
        """Take the event that leads from one state of the specification to the next."""
        event = after["event"]
        if event["thread"] == "scheduler":
            return self
        take = getattr(self, re.sub(r"(?=[A-Z])", "_", event["action"]).lower())
        return _checked(take(event, before, after), after)

    def _on(self, machine: Machine) -> Replay:
        return replace(self, machine=machine)

    def _batch(self, state: Mapping[str, Any]) -> tuple[BatchItem, ...]:
        size = self.world.block_size
        return tuple(
            BatchItem(
                entry["req"],
                entry["start"],
                tuple(
                    state["table"][entry["req"]][p // size] * size + p % size
                    for p in range(entry["start"], entry["start"] + entry["n"])
                ),
            )
            for entry in state["batch"]
        )

    def _slots(self, state: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(slot for item in self._batch(state) for slot in item.slots)

    def _rows(self, state: Mapping[str, Any], emits: frozenset[str]) -> dict[str, tuple[int, ...]]:
        layout = _entries(state["layout"])
        return {key: tuple(number(layout[slot]["row"]) for slot in self._slots(state)) for key in sorted(emits)}

    def _sealed(self, tasks: Iterator[int]) -> Replay:
        """In a coarse model, sealed means queued."""
        machine = self.machine
        for task in () if self.world.fine else tuple(tasks):
            machine = machine.queue_task(self.tasks[task])
        return self._on(machine)

    def _finish_request(self, event: Mapping[str, Any], before: Mapping[str, Any], _: object) -> Replay:
        task = before["open_write"][event["req"]]
        return self._on(self.machine.finish_request(event["req"]))._sealed(iter([task] if task else []))

    def _start_request(self, event: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> Replay:
        machine = self.machine.start_request(event["req"], event["computed"], tuple(event["blocks"]))
        new = [read for read in machine.reads if read not in self.machine.reads]
        named = [read for read in _entries(after["reads"]) if read not in _entries(before["reads"])]
        if len(new) != len(named):
            raise ReplayError(f"StartRequest: the specification opens {named}, the reference model {new}")
        return replace(self, machine=machine, reads={**self.reads, **dict(zip(named, new, strict=True))})

    def _plan_read(self, event: Mapping[str, Any], *_: object) -> Replay:
        return self._on(self.machine.plan_read(self.reads[event["read"]]))

    def _claim_page(self, event: Mapping[str, Any], before: Mapping[str, Any], _: object) -> Replay:
        step = self.machine.next_id
        rows = self._rows(before, emitted(before, self.world))
        machine = self.machine.claim_page(step, rows)
        deferred = len(self._slots(before)) * len(self.world.deferred & rows.keys())
        machine = machine.reserve_budget(deferred) if deferred else machine
        return replace(self, machine=machine, steps={**self.steps, event["step"]: step})

    def _reserve_budget(self, event: Mapping[str, Any], before: Mapping[str, Any], _: object) -> Replay:
        machine = self.machine
        for task in sorted(event["sealed"]):
            machine = machine.seal_write(_entries(before["tasks"])[task]["req"])
        return self._on(machine)._sealed(iter(sorted(event["sealed"])))

    def _unplan_reads(self, _: object, before: Mapping[str, Any], __: object) -> Replay:
        return self._on(self.machine.unplan_reads(self._slots(before)))

    def _preserve_reads(self, event: Mapping[str, Any], *_: object) -> Replay:
        return self._on(self.machine.preserve_reads(tuple(event["slots"])))

    def _claim_slots(self, event: Mapping[str, Any], before: Mapping[str, Any], _: object) -> Replay:
        emits = frozenset(key for key, slots in event["emits"].items() if slots)
        return self._on(self.machine.claim_slots(self.steps[before["step"]], self._slots(before), emits))

    def _register_write(self, event: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> Replay:
        keys = emitted(before, self.world) - self.world.deferred
        machine = self.machine.register_write(self.steps[event["step"]], self._slots(before), keys)
        return self._with_tasks(machine, before, after)._sealed(iter([before["next_task"]]))

    def _append_rows(self, _: object, before: Mapping[str, Any], after: Mapping[str, Any]) -> Replay:
        keys = emitted(before, self.world) & self.world.deferred
        rows = self._rows(before, keys)
        machine = self.machine.append_rows(self._batch(before), rows, len(self._slots(before)) * len(keys))
        return self._with_tasks(machine, before, after)

    def _with_tasks(self, machine: Machine, before: Mapping[str, Any], after: Mapping[str, Any]) -> Replay:
        new = [task for task in machine.tasks if task not in self.machine.tasks]
        named = range(before["next_task"], after["next_task"])
        if len(new) != len(named):
            raise ReplayError(f"the specification registers tasks {list(named)}, the reference model {new}")
        return replace(self, machine=machine, tasks={**self.tasks, **dict(zip(named, new, strict=True))})

    def _open_step(self, event: Mapping[str, Any], before: Mapping[str, Any], _: object) -> Replay:
        step = self.steps[event["step"]]
        return self._on(self.machine.open_step(step, self._batch(before), emitted(before, self.world)))

    def _queue_task(self, event: Mapping[str, Any], *_: object) -> Replay:
        return self._on(self.machine.queue_task(self.tasks[event["task"]]))

    def _claim_copy(self, *_: object) -> Replay:
        return self._on(self.machine.claim_copy())

    def _finish_copy(self, event: Mapping[str, Any], *_: object) -> Replay:
        return self._on(self.machine.finish_copy(self.tasks[event["task"]]))

    def _write_pool(self, event: Mapping[str, Any], *_: object) -> Replay:
        task = self.tasks[event["task"]]
        machine = self.machine if self.world.fine else self.machine.claim_copy().finish_copy(task)
        return self._on(machine.write_pool(task))

    def _commit_task(self, event: Mapping[str, Any], *_: object) -> Replay:
        return self._on(self.machine.commit_task(self.tasks[event["task"]]))

    def _fetch_read(self, event: Mapping[str, Any], *_: object) -> Replay:
        return self._on(self.machine.fetch_read(self.reads[event["read"]]))

    def _take_step(self, event: Mapping[str, Any], before: Mapping[str, Any], _: object) -> Replay:
        step = self.steps[event["step"]]
        if event["how"] == "discard":
            return self._on(self.machine.discard_step(step))
        reqs = tuple(_entries(before["steps"])[event["step"]])
        return self._on(self.machine.take_step(step, reqs).release_step(step))


def emitted(state: Mapping[str, Any], world: World) -> frozenset[str]:
    """The keys that the step being saved emits: those that its tokens, all alike, emit."""
    tokens = {place["row"][-1] for place in _entries(state["layout"]).values()}
    return frozenset(key for key in world.keys if key in world.hidden or tokens & world.emit_tokens[key])


def _entries(value: Any) -> Mapping[Any, Any]:
    """A function as a mapping, also where its domain makes it a sequence."""
    return value if isinstance(value, Mapping) else dict(enumerate(value, 1))


def number(row: Sequence[int]) -> int:
    """A number for a content prefix: different for different ones, 0 for a row of zeros."""
    value = ZEROS
    for token in row:
        value = value * 10 + token + 1
    return value


def _read_state(read: Any) -> str:
    if read.failed:
        return "failed"
    if read.rows is not None:
        return "fetched"
    return "planned" if read.plan is not None else "unplanned"


def _column(by_slot: Mapping[int, Any], size: int) -> tuple[Any, ...]:
    return tuple(by_slot[slot] for slot in range(size))


def seen_in_reference(replayed: Replay) -> dict[str, Any]:
    """What both sides have, as the reference model has it."""
    machine, keys = replayed.machine, replayed.world.keys
    steps = {mine: theirs for theirs, mine in replayed.steps.items()}
    return {
        "version": machine.version,
        "owner": tuple(0 if owner is None else steps[owner] for owner in machine.owner),
        "occupancy": {key: tuple(o.value for o in machine.occupancy[key]) for key in keys},
        "pool": {key: machine.pool[key] for key in keys},
        "log_row": {
            key: tuple(ZEROS if at is None else machine.log[at.chunk].rows[key][at.row] for at in machine.log_row[key])
            for key in keys
        },
        "pins": machine.pins,
        "emitted": dict(machine.emitted),
        "write_n": {req: n for req, n in machine.write_n.items() if n},
        "tasks": {
            theirs: machine.tasks[mine].state.name for theirs, mine in replayed.tasks.items() if mine in machine.tasks
        },
        "queue": tuple(machine.queue),
        "open": dict(machine.open_write),
        "reads": {
            theirs: _read_state(machine.reads[mine]) for theirs, mine in replayed.reads.items() if mine in machine.reads
        },
        "steps": {steps[step]: dict(context.spans) for step, context in machine.steps.items()},
    }


def seen_in_spec(replayed: Replay, state: Mapping[str, Any]) -> dict[str, Any]:
    """The same, as the specification has it."""
    world, mine = replayed.world, replayed.tasks
    size = world.block_size * world.num_blocks

    def rows(name: str) -> dict[str, tuple[int, ...]]:
        by_key = {key: _column(_entries(state[name][key]), size) for key in world.keys}
        return {key: tuple(number(row) for row in column) for key, column in by_key.items()}

    return {
        "version": _column(_entries(state["version"]), size),
        "owner": _column(_entries(state["owner"]), size),
        "occupancy": {key: _column(_entries(state["occupancy"][key]), size) for key in world.keys},
        "pool": rows("pool"),
        "log_row": rows("log_row"),
        "pins": _column(_entries(state["pins"]), size),
        "emitted": dict(_entries(state["emitted"])),
        "write_n": {req: n for req, n in state["write_n"].items() if n},
        "tasks": {task: entry["state"] for task, entry in _entries(state["tasks"]).items()},
        "queue": tuple(mine[task] for task in state["queue"]),
        "open": {req: mine[task] for req, task in state["open_write"].items() if task},
        "reads": {read: entry["state"] for read, entry in _entries(state["reads"]).items()},
        "steps": {
            step: {req: (span["start"], span["end"]) for req, span in spans.items()}
            for step, spans in _entries(state["steps"]).items()
        },
    }


def _checked(replayed: Replay, state: Mapping[str, Any]) -> Replay:
    reference, spec = seen_in_reference(replayed), seen_in_spec(replayed, state)
    for name, value in spec.items():
        if reference[name] != value:
            raise ReplayError(
                f"after {state['event']['action']}, {name}: the specification has {value}, "
                f"the reference model {reference[name]}"
            )
    return replayed


def replay(world: World, states: Sequence[State]) -> Replay:
    """Replay a behaviour from its initial state."""
    replayed = Replay.start(world)
    for before, after in pairwise(states):
        replayed = replayed.follow(before.variables, after.variables)
    return replayed


def replay_file(world: World, path: Path) -> Replay:
    """Replay a saved behaviour."""
    return replay(world, load_trace(path)[1])


def replay_graph(world: World, graph: Graph) -> int:
    """Replay every edge of a state graph, breadth first. Gives the number of edges replayed."""
    onward: dict[int, list[int]] = {}
    for edge in graph.edges:
        onward.setdefault(edge.source, []).append(edge.target)
    reached = {state: Replay.start(world) for state in graph.initial}
    frontier, count = list(reached), 0
    while frontier:
        following: list[int] = []
        for source in frontier:
            for target in onward.get(source, ()):
                arrived = reached[source].follow(graph.states[source], graph.states[target])
                count += 1
                if target not in reached:
                    reached[target] = arrived
                    following.append(target)
        frontier = following
    return count
