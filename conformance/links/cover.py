"""Every edge of a state graph of TLC, replayed on the reference model.

A reference state is kept for each state of the graph: that of the path by which a breadth-first walk first came there.
For each edge the action is applied to the reference state of its source, with the arguments that the event of its
target names; then every variable that both describe is compared with the target. README.md says which those are.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.tla.graph import Edge, Graph
from omni_prefix_ref import HIDDEN_KEY, KeySpec, Machine, Settings
from omni_prefix_ref.errors import NotEnabled, OmniPrefixCacheRowError, OmniPrefixCacheUnmatchError
from omni_prefix_ref.state import BatchItem, HitRead, PoolRow, Slot, TaskId, TaskState

TlaState = Mapping[str, Any]
View = dict[str, Any]
"""Variables by name, in one form for both descriptions."""

COMPARED = (
    "version",
    "owner",
    "occupancy",
    "pool",
    "log_row",
    "pins",
    "tasks",
    "queue",
    "open_write",
    "write_n",
    "reads",
    "steps",
    "emitted",
)
"""The variables of the specification that are compared."""
NOT_COMPARED: Mapping[str, str] = {
    "status": "the environment's",
    "known": "the environment's",
    "computed": "the environment's",
    "table": "the environment's",
    "hash": "the environment's",
    "preempts": "the environment's",
    "life": "the environment's",
    "reported": "the environment's",
    "batch": "the step being made: the reference is told of it with each action",
    "layout": "the step being made: the reference is told of it with each action",
    "pc": "program order, which is the driver's",
    "event": "the last action, with its arguments: what is replayed",
    "step": "the counter of step ids: the replay hands the reference the same ids, and `owner` and `steps` hold them",
    "next_task": "a counter of ids: the reference numbers tasks, reads and chunks together; ids compare by their order",
    "handed": "a ghost: what the consumers have",
}
"""The others, each with the reason."""

_ENVIRONMENT = frozenset(("ScheduleRequest", "PreemptRequest", "FreeRequest", "EndSchedule"))
_BASE = 64


class CoverError(Exception):
    """A graph that cannot be replayed: it uses what the reference has no word for."""


def _items(value: Any) -> Mapping[Any, Any]:
    """A function's entries, also where TLA+ takes it for a sequence."""
    return dict(enumerate(value, 1)) if isinstance(value, tuple) else value


def row_number(row: tuple[int, ...]) -> int:
    """The number that stands for a content prefix; 0 for zeros."""
    number = 0
    for token in row:
        number = number * _BASE + token + 1
    return number


def _key(key: str) -> str:
    return HIDDEN_KEY if key == "hidden" else key


def _slots(blocks: tuple[int, ...], start: int, end: int, size: int) -> tuple[Slot, ...]:
    return tuple(blocks[p // size] * size + p % size for p in range(start, end))


@dataclass(frozen=True)
class Shape:
    """The constants of the model that a replay needs."""

    keys: tuple[str, ...]
    deferred: frozenset[str]
    num_blocks: int
    block_size: int
    fine: bool
    """Whether each link of a write's chain is an action of its own."""

    def start(self, machine: type[Machine] = Machine) -> Machine:
        """The reference model's first state. Pages and bytes are never short: they are the business of Handover."""
        keys = tuple(KeySpec(_key(key), row_bytes=1, deferred=key in self.deferred) for key in self.keys)
        return machine.start(Settings(self.block_size, self.num_blocks, keys, 32, 32, 1 << 20))


# ------------------------------------------------------------------------- one form for both


def _step_made(state: TlaState) -> int:
    """The id of the step whose reads have not been attached to an opened step yet."""
    return int(state["step"]) + (1 if state["pc"] in ("schedule", "start") else 0)


def view_of_spec(state: TlaState, shape: Shape) -> View:
    """What TLC says, in the common form."""
    tasks = _items(state["tasks"])
    rank = {task: i for i, task in enumerate(sorted(tasks))}

    def column(name: str, value: Callable[[Any], Any]) -> dict[str, tuple[Any, ...]]:
        table = state[name]
        return {_key(k): tuple(value(table[k][s]) for s in sorted(table[k])) for k in table}

    def source(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        match entry["kind"]:
            case "pool":
                return ("pool", entry["slot"], entry["version"])
            case "hole":
                return ("hole",)
            case kind:
                return (kind, row_number(entry["row"]))

    def read(hit: Mapping[str, Any]) -> tuple[Any, ...]:
        rows = _items(hit["rows"])
        planned = hit["state"] == "planned"
        return (
            hit["state"],
            hit["start"],
            _slots(hit["blocks"], hit["start"], hit["end"], shape.block_size),
            {} if hit["state"] == "failed" else {(_key(k), p): source(rows[k, p]) for k, p in rows},
            frozenset(rank[e["task"]] for e in rows.values() if planned and e["task"] in rank),
        )

    return {
        "version": tuple(state["version"][s] for s in sorted(state["version"])),
        "owner": tuple(state["owner"][s] for s in sorted(state["owner"])),
        "occupancy": column("occupancy", str),
        "pool": column("pool", row_number),
        "log_row": column("log_row", row_number),
        "pins": tuple(state["pins"][s] for s in sorted(state["pins"])),
        "tasks": [
            (
                tasks[t]["req"],
                tasks[t]["n"],
                tasks[t]["state"],
                frozenset((_key(r["key"]), r["slot"], r["version"], row_number(r["row"])) for r in tasks[t]["rows"]),
            )
            for t in sorted(tasks)
        ],
        "queue": tuple(rank[t] for t in state["queue"]),
        "open_write": {req: rank[t] for req, t in state["open_write"].items() if t},
        "write_n": {req: n for req, n in state["write_n"].items() if n},
        "reads": {(hit["step"], hit["req"]): read(hit) for hit in _items(state["reads"]).values()},
        "steps": {
            number: {
                req: (span["start"], span["hit"], span["end"], frozenset(_key(k) for k in span["keys"]))
                for req, span in _items(spans).items()
            }
            for number, spans in _items(state["steps"]).items()
        },
        "emitted": dict(_items(state["emitted"])),
    }


def _row(machine: Machine, key: str, source: Any) -> int:
    return machine._row(key, source)  # noqa: SLF001 - where a source leads is the machine's to say


def _read_of_reference(machine: Machine, hit: HitRead, rank: Mapping[TaskId, int]) -> tuple[Any, ...]:
    if hit.failed:
        return "failed", hit.start, hit.slots, {}, frozenset()
    if hit.plan is None:
        return "unplanned", hit.start, hit.slots, {}, frozenset()
    found: dict[tuple[str, int], tuple[Any, ...]] = {}
    for key, sources in hit.plan.items():
        for i, source in enumerate(sources):
            match source:
                case None:
                    found[key, hit.start + i] = ("hole",)
                case _ if hit.rows is not None:
                    found[key, hit.start + i] = ("row", hit.rows[key][i])
                case PoolRow(slot, version):
                    found[key, hit.start + i] = ("pool", slot, version)
                case _:
                    found[key, hit.start + i] = ("log", _row(machine, key, source))
    if hit.rows is not None:
        return "fetched", hit.start, hit.slots, found, frozenset()
    return "planned", hit.start, hit.slots, found, frozenset(rank[t] for t in hit.writers if t in rank)


def view_of_reference(machine: Machine, step_made: int) -> View:
    """What the reference model says, in the common form."""
    rank = {task: i for i, task in enumerate(sorted(machine.tasks))}

    def spans(number: int) -> dict[str, tuple[Any, ...]]:
        context = machine.steps[number]
        told = {}
        for item in context.batch:
            number_read = context.reads.get(item.req)
            plan = (machine.reads[number_read].plan or {}) if number_read is not None else {}
            cached = {key for key, sources in plan.items() if any(source is not None for source in sources)}
            start, end = context.spans[item.req]
            told[item.req] = (start, item.start, end, context.emits | cached)
        return told

    return {
        "version": machine.version,
        "owner": tuple(step or 0 for step in machine.owner),
        "occupancy": {key: tuple(o.value for o in column) for key, column in machine.occupancy.items()},
        "pool": dict(machine.pool),
        "log_row": {
            key: tuple(0 if source is None else _row(machine, key, source) for source in column)
            for key, column in machine.log_row.items()
        },
        "pins": machine.pins,
        "tasks": [
            (
                task.req or "",
                task.write_n,
                task.state.name,
                frozenset((e.key, e.slot, e.version, _row(machine, e.key, e.source)) for e in task.entries),
            )
            for _, task in sorted(machine.tasks.items())
        ],
        "queue": tuple(rank[t] for t in machine.queue),
        "open_write": {req: rank[t] for req, t in machine.open_write.items()},
        "write_n": dict(machine.write_n),
        "reads": {
            (step_made if hit.step is None else hit.step, hit.req): _read_of_reference(machine, hit, rank)
            for hit in machine.reads.values()
        },
        "steps": {number: spans(number) for number in machine.steps},
        "emitted": dict(machine.emitted),
    }


def held(machine: Machine) -> tuple[int, int, int]:
    """Bytes charged, bytes reserved, pages held: no variables of the graph, but a function of its states."""
    return machine.charged, machine.reserved, sum(bool(page.holders) for page in machine.pages)


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
            BatchItem(e["req"], e["start"], _slots(source["table"][e["req"]], e["start"], e["start"] + e["n"], size))
            for e in source["batch"]
        )
        layout = _items(source["layout"])
        contents = [layout[slot]["row"] for item in batch for slot in item.slots]
        # `ClaimSlots` says which keys the step emits, and is held against this.
        emitted = map(_key, self.shape.keys)
        numbers = tuple(map(row_number, contents))
        emits = frozenset(emitted)
        return _Saved(step, batch, emits, dict.fromkeys(sorted(emits), numbers))

    def _deferred(self, saved: _Saved) -> frozenset[str]:
        return saved.emits & {_key(key) for key in self.shape.deferred}

    def _num_bytes(self, saved: _Saved) -> int:
        return len(self._deferred(saved)) * len(saved.slots)

    def _task(self, machine: Machine, source: TlaState, task: int) -> TaskId:
        return sorted(machine.tasks)[sorted(_items(source["tasks"])).index(task)]

    def _read(self, machine: Machine, source: TlaState, read: tuple[int, str]) -> int:
        made = _step_made(source)
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

    def _ReserveBudget(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        tasks = _items(source["tasks"])
        for task in sorted(event["sealed"]):
            machine = machine.seal_write(tasks[task]["req"])
        return self._reserve(machine, self._saved(source, event["step"]))

    def _UnplanReads(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        return machine.unplan_reads(self._saved(source, event["step"]).slots)

    def _PreserveReads(self, machine: Machine, _: TlaState, event: Mapping[str, Any], __: TlaState) -> Machine:  # noqa: N802
        return machine.preserve_reads(event["slots"])

    def _ClaimSlots(self, machine: Machine, source: TlaState, event: Mapping[str, Any], _: TlaState) -> Machine:  # noqa: N802
        saved = self._saved(source, source["step"])
        told = {_key(key): slots for key, slots in event["emits"].items() if slots}
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
        for req, span in _items(_items(source["steps"])[step]).items():
            reads = _items(source["reads"])
            cached = _items(reads[step, req]["rows"]) if (step, req) in reads else {}
            given = {key for key, by_req in outputs.rows.items() if req in by_req}
            if given != {_key(key) for key in span["keys"]} or outputs.spans[req] != (span["start"], span["end"]):
                raise CoverError(f"step {step} hands over {given}, {outputs.spans[req]} of {req!r}, not {span}")
            for (key, position), entry in cached.items():
                rows = outputs.rows.get(_key(key), {}).get(req)
                due = 0 if entry["kind"] == "hole" else row_number(entry["row"])
                if rows is not None and rows[position - span["start"]] != due:
                    raise CoverError(f"step {step} hands over a wrong row of {key} at {position} of {req!r}")


# ------------------------------------------------------------------------- all edges


@dataclass(frozen=True)
class Mismatch:
    """The first edge at which the two differ."""

    path: tuple[str, ...]
    """The actions from the initial state on, the last one being the edge's."""
    story: str

    def __str__(self) -> str:
        steps = "\n".join(f"  {i}. {action}" for i, action in enumerate(self.path, 1))
        return f"after\n{steps}\n{self.story}"


@dataclass
class Cover:
    """What was replayed."""

    states: int = 0
    edges: Counter[str] = field(default_factory=Counter)
    """By action, edges that were replayed and compared."""
    mismatch: Mismatch | None = None

    @property
    def total(self) -> int:
        return self.edges.total()


def _told(event: Mapping[str, Any]) -> str:
    arguments = ", ".join(
        f"{name}={value!r}" for name, value in sorted(event.items()) if name not in ("action", "thread")
    )
    return f"{event['action']}({arguments})"


def replay(graph: Graph, replayer: Replayer, machine: type[Machine] = Machine) -> Cover:
    """Replay every edge; stop at the first that differs."""
    shape, cover = replayer.shape, Cover()
    out: dict[int, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        out[edge.source].append(edge)
    known: dict[int, tuple[Machine, View]] = {}
    came: dict[int, int | None] = {}
    waiting: deque[int] = deque()
    for number in sorted(graph.initial):
        first = shape.start(machine)
        known[number], came[number] = (first, view_of_spec(graph.states[number], shape)), None
        if story := _compare(first, known[number][1], _step_made(graph.states[number])):
            cover.mismatch = Mismatch((), story)
            return cover
        waiting.append(number)
    while waiting:
        number = waiting.popleft()
        cover.states += 1
        for edge in out[number]:
            target = graph.states[edge.target]
            event = target["event"]
            story, after = _one(replayer, known[number][0], graph.states[number], target, edge)
            if after is not None and not story:
                seen = known.get(edge.target)
                view = seen[1] if seen else view_of_spec(target, shape)
                story = _compare(after, view, _step_made(target))
                if seen and not story and held(seen[0]) != held(after):
                    story = f"bytes charged, reserved, pages held: {held(after)}, on another path {held(seen[0])}"
                if not seen:
                    known[edge.target], came[edge.target] = (after, view), number
                    waiting.append(edge.target)
            if story:
                cover.mismatch = Mismatch((*_path(graph, came, number), _told(event)), story)
                return cover
            cover.edges[event["action"]] += 1
    return cover


def _one(
    replayer: Replayer, machine: Machine, source: TlaState, target: TlaState, edge: Edge
) -> tuple[str, Machine | None]:
    event = target["event"]
    if edge.action and edge.action != event["action"]:
        return f"the edge is called {edge.action}, its event {event['action']}", None
    try:
        return "", replayer.apply(machine, source, event, target)
    except NotEnabled:
        return f"{event['action']} is not enabled in the reference", None
    except (OmniPrefixCacheUnmatchError, OmniPrefixCacheRowError, CoverError, LookupError) as error:
        return f"{type(error).__name__} in the reference: {error}", None


def _compare(machine: Machine, expected: View, step_made: int) -> str:
    try:
        found = view_of_reference(machine, step_made)
    except LookupError as error:
        return f"the reference names what it does not have: {error!r}"
    differing = [name for name in COMPARED if found[name] != expected[name]]
    return "\n".join(
        f"{name} differs\n  specification: {expected[name]}\n  reference:     {found[name]}" for name in differing
    )


def _path(graph: Graph, came: Mapping[int, int | None], number: int) -> tuple[str, ...]:
    actions = []
    here: int | None = number
    while here is not None and came[here] is not None:
        actions.append(_told(graph.states[here]["event"]))
        here = came[here]
    return tuple(reversed(actions))


def render_variables() -> str:
    """The table of variables, for the README."""
    lines = ["| variable | compared, or why not |", "| --- | --- |"]
    lines += [f"| `{name}` | compared |" for name in COMPARED]
    lines += [f"| `{name}` | {why} |" for name, why in NOT_COMPARED.items()]
    return "\n".join(lines)
