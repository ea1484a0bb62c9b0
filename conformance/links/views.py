"""What the specification and the reference model both say of a state, in one form.

README.md says which variables are compared; of rows, the content; of ids, their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.links.translate import Shape, TlaState, items, key_name, row_number, slots_of
from omni_prefix_ref import Machine
from omni_prefix_ref.state import HitRead, PoolRow, TaskId

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


def view_of_spec(state: TlaState, shape: Shape) -> View:
    """What TLC says, in the common form."""
    tasks = items(state["tasks"])
    rank = {task: i for i, task in enumerate(sorted(tasks))}

    def column(name: str, value: Callable[[Any], Any]) -> dict[str, tuple[Any, ...]]:
        table = state[name]
        return {key_name(k): tuple(value(table[k][s]) for s in sorted(table[k])) for k in table}

    def source(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        match entry["kind"]:
            case "pool":
                return ("pool", entry["slot"], entry["version"])
            case "hole":
                return ("hole",)
            case kind:
                return (kind, row_number(entry["row"]))

    def read(hit: Mapping[str, Any]) -> tuple[Any, ...]:
        rows = items(hit["rows"])
        planned = hit["state"] == "planned"
        return (
            hit["state"],
            hit["start"],
            slots_of(hit["blocks"], hit["start"], hit["end"], shape.block_size),
            {} if hit["state"] == "failed" else {(key_name(k), p): source(rows[k, p]) for k, p in rows},
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
                frozenset(
                    (key_name(r["key"]), r["slot"], r["version"], row_number(r["row"])) for r in tasks[t]["rows"]
                ),
            )
            for t in sorted(tasks)
        ],
        "queue": tuple(rank[t] for t in state["queue"]),
        "open_write": {req: rank[t] for req, t in state["open_write"].items() if t},
        "write_n": {req: n for req, n in state["write_n"].items() if n},
        "reads": {(hit["step"], hit["req"]): read(hit) for hit in items(state["reads"]).values()},
        "steps": {
            number: {
                req: (span["start"], span["hit"], span["end"], frozenset(key_name(k) for k in span["keys"]))
                for req, span in items(spans).items()
            }
            for number, spans in items(state["steps"]).items()
        },
        "emitted": dict(items(state["emitted"])),
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


def view_of_reference(machine: Machine, made: int) -> View:
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
            (made if hit.step is None else hit.step, hit.req): _read_of_reference(machine, hit, rank)
            for hit in machine.reads.values()
        },
        "steps": {number: spans(number) for number in machine.steps},
        "emitted": dict(machine.emitted),
    }


def held(machine: Machine) -> tuple[int, int, int]:
    """Bytes charged, bytes reserved, pages held: no variables of the graph, but a function of its states."""
    return machine.charged, machine.reserved, sum(bool(page.holders) for page in machine.pages)


def compare(machine: Machine, expected: View, made: int) -> str:
    """What differs, in words; empty if nothing does. `made`: see `step_made`."""
    try:
        found = view_of_reference(machine, made)
    except LookupError as error:
        return f"the reference names what it does not have: {error!r}"
    differing = [name for name in COMPARED if found[name] != expected[name]]
    return "\n".join(
        f"{name} differs\n  specification: {expected[name]}\n  reference:     {found[name]}" for name in differing
    )


def render_variables() -> str:
    """The table of variables, for the README."""
    lines = ["| variable | compared, or why not |", "| --- | --- |"]
    lines += [f"| `{name}` | compared |" for name in COMPARED]
    lines += [f"| `{name}` | {why} |" for name, why in NOT_COMPARED.items()]
    return "\n".join(lines)
