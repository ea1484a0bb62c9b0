"""From the specification's states and events to the reference model's actions.

`Replayer.apply` takes the action that an event names, on any state of the reference model. Steps have the same ids on
both sides; tasks and reads are matched by what they are. Rows, which the specification calls by their content, are
numbers here, one for each content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_prefix_ref import HIDDEN_KEY, KeySpec, Machine, Settings
from omni_prefix_ref.errors import NotEnabled
from omni_prefix_ref.state import BatchItem, Slot, TaskId, TaskState

TlaState = Mapping[str, Any]

_ENVIRONMENT = frozenset(("ScheduleRequest", "PreemptRequest", "FreeRequest", "EndSchedule"))
_BASE = 64


class CoverError(Exception):
    """A graph that cannot be replayed: it uses what the reference has no word for."""


def items(value: Any) -> Mapping[Any, Any]:
    """A function's entries, also where TLA+ takes it for a sequence."""
    return dict(enumerate(value, 1)) if isinstance(value, tuple) else value


def row_number(row: tuple[int, ...]) -> int:
    """The number that stands for a content prefix; 0 for zeros."""
    number = 0
    for token in row:
        number = number * _BASE + token + 1
    return number


def key_name(key: str) -> str:
    """What the reference model calls a key of the specification."""
    return HIDDEN_KEY if key == "hidden" else key


def slots_of(blocks: tuple[int, ...], start: int, end: int, size: int) -> tuple[Slot, ...]:
    """Slots of the positions `[start, end)`."""
    return tuple(blocks[p // size] * size + p % size for p in range(start, end))


def step_made(state: TlaState) -> int:
    """The id of the step whose reads have not been attached to an opened step yet."""
    return int(state["step"]) + (1 if state["pc"] in ("schedule", "start") else 0)


@dataclass(frozen=True)
class Shape:
    """The constants of the model that a replay needs."""

    keys: tuple[str, ...]
    deferred: frozenset[str]
    emit_tokens: Mapping[str, frozenset[int]]
    """By key that is not hidden, the tokens that emit it. All tokens of a step emit the same keys."""
    num_blocks: int
    block_size: int
    fine: bool
    """Whether each link of a write's chain is an action of its own."""

    def start(self, machine: type[Machine] = Machine) -> Machine:
        """The reference model's first state. Pages and bytes are never short: they are the business of Handover."""
        keys = tuple(KeySpec(key_name(key), row_bytes=1, deferred=key in self.deferred) for key in self.keys)
        return machine.start(Settings(self.block_size, self.num_blocks, keys, 32, 32, 1 << 20))


# ------------------------------------------------------------------------- one step


@dataclass(frozen=True)
class _Saved:
    """The step being saved, as the reference is told of it."""

    step: int
    batch: tuple[BatchItem, ...]
    emits: frozenset[str]
    rows: Mapping[str, tuple[int, ...]]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for item in self.batch for slot in item.slots)


class Replayer:
    """Applies events to reference states."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def apply(self, machine: Machine, source: TlaState, event: Mapping[str, Any], target: TlaState) -> Machine:
        """The reference's successor under an event. What TLC passes over on the way is passed over."""
        action = event["action"]
        if action in _ENVIRONMENT:
            return machine
        step = getattr(self, f"_{action}", None)
        if step is None:
            raise CoverError(f"{action} is no action that the reference can replay")
        after: Machine = step(machine, source, event, target)
        return after if self.shape.fine else self._queued(after)

    def _queued(self, machine: Machine) -> Machine:
        """In a coarse model whatever takes no more rows is on the queue at once."""
        open_writes = set(machine.open_write.values())
        for task in sorted(machine.tasks):
            if machine.tasks[task].state is TaskState.PENDING and task not in open_writes:
                machine = machine.queue_task(task)
        return machine

    def _saved(self, source: TlaState, step: int) -> _Saved:
        size = self.shape.block_size
        batch = tuple(
            BatchItem(e["req"], e["start"], slots_of(source["table"][e["req"]], e["start"], e["start"] + e["n"], size))
            for e in source["batch"]
        )
        layout = items(source["layout"])
        contents = [layout[slot]["row"] for item in batch for slot in item.slots]
        tokens = {content[-1] for content in contents}
        # `ClaimSlots` says which keys the step emits, and is held against this.
        emits = frozenset(
            key_name(key) for key in self.shape.keys if key == "hidden" or tokens & self.shape.emit_tokens[key]
        )
        numbers = tuple(map(row_number, contents))
        return _Saved(step, batch, emits, dict.fromkeys(sorted(emits), numbers))

    def _deferred(self, saved: _Saved) -> frozenset[str]:
        return saved.emits & {key_name(key) for key in self.shape.deferred}

    def _num_bytes(self, saved: _Saved) -> int:
        return len(self._deferred(saved)) * len(saved.slots)

    def _task(self, machine: Machine, source: TlaState, task: int) -> TaskId:
        return sorted(machine.tasks)[sorted(items(source["tasks"])).index(task)]

    def _read(self, machine: Machine, source: TlaState, read: tuple[int, str]) -> int:
        made = step_made(source)
        for number, hit in machine.reads.items():
            if (made if hit.step is None else hit.step, hit.req) == read:
                return number
        raise CoverError(f"the reference has no read {read}")

    # Names are the specification's.

    def _FinishRequest(self, machine: Machine, _: TlaState, event: Mapping[str, Any], __: TlaState) -> Machine:  # noqa: N802
        return machine.finish_request(event["req"])

    def _StartRequest(self, machine: Machine, _: TlaState, event: Mapping[str, Any], __: TlaState) -> Machine:  # noqa: N802
        return machine.start_request(event["req"], event["computed"], event["blocks"])

    def _PlanRead(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        return machine.plan_read(self._read(machine, source, event["read"]))

    def _ClaimPage(self, machine: Machine, source: TlaState, event: Mapping[str, Any], target: TlaState) -> Machine:  # noqa: N802
        saved = self._saved(source, event["step"])
        machine = machine.claim_page(saved.step, saved.rows)
        return machine if target["pc"] == "budget" else self._reserve(machine, saved)

    def _reserve(self, machine: Machine, saved: _Saved) -> Machine:
        return machine.reserve_budget(self._num_bytes(saved)) if self._num_bytes(saved) else machine

    def _SealWrite(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        return machine.seal_write(items(source["tasks"])[event["task"]]["req"])

    def _ReserveBudget(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        return self._reserve(machine, self._saved(source, event["step"]))

    def _UnplanReads(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        return machine.unplan_reads(self._saved(source, event["step"]).slots)

    def _PreserveReads(self, machine: Machine, _: TlaState, event: Mapping[str, Any], __: TlaState) -> Machine:  # noqa: N802
        return machine.preserve_reads(event["slots"])

    def _ClaimSlots(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        saved = self._saved(source, source["step"])
        told = {key_name(key): slots for key, slots in event["emits"].items() if slots}
        if any(slots != frozenset(saved.slots) for slots in told.values()) or set(told) != saved.emits:
            raise CoverError(f"the step emits {told}, which the replay does not see")
        return machine.claim_slots(saved.step, saved.slots, saved.emits)

    def _RegisterWrite(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        saved = self._saved(source, event["step"])
        return machine.register_write(saved.step, saved.slots, saved.emits - self._deferred(saved))

    def _AppendRows(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        saved = self._saved(source, event["step"])
        rows = {key: saved.rows[key] for key in sorted(self._deferred(saved))}
        return machine.append_rows(saved.batch, rows, self._num_bytes(saved))

    def _OpenStep(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        saved = self._saved(source, event["step"])
        return machine.open_step(saved.step, saved.batch, saved.emits)

    def _QueueTask(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        return machine.queue_task(self._task(machine, source, event["task"]))

    def _ClaimCopy(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        if machine.queue[:1] != (self._task(machine, source, event["task"]),):
            raise NotEnabled
        return machine.claim_copy()

    def _FinishCopy(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        return machine.finish_copy(self._task(machine, source, event["task"]))

    def _WritePool(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        task = self._task(machine, source, event["task"])
        if not self.shape.fine:
            machine = self._ClaimCopy(machine, source, event, source).finish_copy(task)
        return machine.write_pool(task)

    def _CommitTask(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        return machine.commit_task(self._task(machine, source, event["task"]))

    def _FetchRead(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        return machine.fetch_read(self._read(machine, source, event["read"]))

    def _TakeStep(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        step = event["step"]
        if event["how"] == "discard":
            return machine.discard_step(step)
        machine = machine.take_step(step, tuple(item.req for item in machine.steps[step].batch))
        if any(machine.reads[read].failed for read in machine.steps[step].reads.values()):
            return machine.release_step(step)
        self._check_outputs(machine, source, step)
        return machine.release_step(step)

    def _check_outputs(self, machine: Machine, source: TlaState, step: int) -> None:
        """What is handed over is what the specification's span and gathered rows say."""
        outputs = machine.outputs(step)
        for req, span in items(items(source["steps"])[step]).items():
            reads = items(source["reads"])
            cached = items(reads[step, req]["rows"]) if (step, req) in reads else {}
            given = {key for key, by_req in outputs.rows.items() if req in by_req}
            if given != {key_name(key) for key in span["keys"]} or outputs.spans[req] != (span["start"], span["end"]):
                raise CoverError(f"step {step} hands over {given}, {outputs.spans[req]} of {req!r}, not {span}")
            for (key, position), entry in cached.items():
                rows = outputs.rows.get(key_name(key), {}).get(req)
                due = 0 if entry["kind"] == "hole" else row_number(entry["row"])
                if rows is not None and rows[position - span["start"]] != due:
                    raise CoverError(f"step {step} hands over a wrong row of {key} at {position} of {req!r}")
