"""The eager production package along the state graph of TLC: every choice of the environment at every state at rest.

The package cannot be put into a state, so it walks: from the beginning, a new choice wherever there is one. What it
does with each choice has to be a path of the graph, event by event; where it comes to rest, its own tables have to be
those of the state that the path leads to, and what it hands over has to be the rows that the graph's reads have.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.drivers.rows import decode
from conformance.drivers.standing import StandingRuntime
from conformance.links.environment import Tale
from conformance.links.record_fast import AMPLE, FastCache
from conformance.links.sink import Sink
from conformance.links.translate import TlaState, items, row_number, slots_of
from conformance.schedules.trace import Admission, Part, Start
from conformance.tla.accept import Setting
from conformance.tla.graph import Edge, Graph
from omni_prefix_fast import StageCacheOutputs
from omni_prefix_fast.device import HostDevice

PAGES = 4
"""More than the graph ever has steps unconsumed."""


@dataclass(frozen=True)
class Moves:
    """The scheduler's moves, as the states of the graph that they lead to."""

    states: tuple[int, ...]


@dataclass(frozen=True)
class Take:
    """A step is consumed."""

    step: int
    how: str


Choice = Moves | Take


class FollowError(Exception):
    """The package leaves the graph, or is in another state. The message tells the events up to there."""


def plain(value: Any) -> Any:
    """A value of the specification without the difference between a sequence and a function of 1, 2 and so on."""
    if isinstance(value, (Mapping, tuple)):
        return {key: plain(entry) for key, entry in items(value).items()}
    return value


def tables_of(state: TlaState) -> dict[str, Any]:
    """``TraceRows!Tables`` of a state."""
    tasks, steps, reads = items(state["tasks"]), items(state["steps"]), items(state["reads"])
    opened = {req: (task, state["write_n"][req]) for req, task in state["open_write"].items() if task}
    return {name: state[name] for name in ("version", "owner", "pins", "occupancy", "emitted")} | {
        "open_write": opened,
        "tasks": {task: entry["state"] for task, entry in tasks.items()},
        "steps": frozenset(steps),
        "reads": {read: hit["state"] for read, hit in reads.items() if read[0] in steps},
    }


@dataclass
class Followed:
    """What was walked."""

    walks: int = 0
    rests: int = 0
    """States at rest at which tables were compared, each once."""
    edges: Counter[str] = field(default_factory=Counter)
    """By action, edges of the graph that were walked, each once."""


class Follower:
    """Walks one graph."""

    def __init__(self, graph: Graph, setting: Setting) -> None:
        self.graph = graph
        self.setting = setting
        self.followed = Followed()
        self._out: dict[int, list[Edge]] = defaultdict(list)
        for edge in graph.edges:
            self._out[edge.source].append(edge)
        self._left: dict[int, list[Choice]] = {}
        """Choices at a state that nobody has made yet."""
        self._known: dict[int, dict[Choice, int]] = defaultdict(dict)
        """Where the choices at a state led to."""
        self._walked: set[tuple[int, int]] = set()

    def follow(self) -> Followed:
        """Make every choice. Raises `FollowError` at the first difference."""
        (first,) = self.graph.initial
        while way := self._way_to_a_choice(first):
            _Walk(self, first).go(way)
            self.followed.walks += 1
        self.followed.rests = len(self._left)
        return self.followed

    def _way_to_a_choice(self, first: int) -> list[Choice]:
        """The shortest way from the beginning to a choice that nobody has made, and that choice."""
        came: dict[int, list[Choice]] = {first: []}
        waiting = deque([first])
        while waiting:
            state = waiting.popleft()
            if left := self.choices(state):
                return [*came[state], left[-1]]
            for choice, target in self._known[state].items():
                if target not in came:
                    came[target] = [*came[state], choice]
                    waiting.append(target)
        return []

    def choices(self, state: int) -> list[Choice]:
        """Choices at a state at rest that nobody has made yet."""
        if state not in self._left:
            steps = items(self.graph.states[state]["steps"])
            takes = [Take(step, how) for step in steps for how in ("materialize", "discard")]
            self._left[state] = [*map(Moves, self._moves(state)), *takes]
        return self._left[state]

    def _moves(self, state: int) -> list[tuple[int, ...]]:
        """The scheduler's moves from one state at rest until the cache is told of them, or all is at rest again."""
        found: list[tuple[int, ...]] = []
        for edge in self._out[state]:
            target = self.graph.states[edge.target]
            if target["event"]["thread"] != "scheduler":
                continue
            if target["event"]["action"] == "ScheduleRequest":
                found += [(edge.target, *further) for further in self._moves(edge.target)]
            else:
                found.append((edge.target,))
        return found

    def made(self, state: int, choice: Choice, target: int) -> None:
        """A choice led somewhere."""
        self._known[state][choice] = target
        self._left[state].remove(choice)

    def step(self, state: int, event: Mapping[str, Any]) -> int | None:
        """The state that an event leads to, if the graph has it."""
        told = plain(event)
        for edge in self._out[state]:
            there = self.graph.states[edge.target]["event"]
            if there["action"] == event["action"] and all(
                plain(there.get(name)) == value for name, value in told.items()
            ):
                if (state, edge.target) not in self._walked:
                    self._walked.add((state, edge.target))
                    self.followed.edges[event["action"]] += 1
                return edge.target
        return None


class _Walk:
    """One production cache, from the beginning."""

    def __init__(self, follower: Follower, first: int) -> None:
        self._follower = follower
        self._graph = follower.graph
        self._setting = follower.setting
        self._tale = Tale()
        sink = Sink(self._tale, follower.setting, thread=lambda: "engine", point=lambda: None)
        self._cache = FastCache(
            follower.setting, sink, AMPLE, pages=PAGES, eager=True, runtime=StandingRuntime(), device=HostDevice()
        )
        self._steps: dict[int, int] = {}
        """The package's step ids, by the specification's."""
        self._rows: dict[tuple[int, str, int], int] = {}
        """By step, request and position, the row that the forward computed."""
        self._at = first

    def go(self, way: list[Choice]) -> None:
        """Make these choices, then new ones as long as there are any."""
        for choice in way:
            self._choose(choice)
        while left := self._follower.choices(self._at):
            self._choose(left[-1])

    def _choose(self, choice: Choice) -> None:
        source = self._at
        match choice:
            case Take(step, how):
                self._take(step, how)
            case Moves(states):
                for state in states:
                    self._see(self._graph.states[state]["event"])
                if self._graph.states[self._at]["event"]["action"] == "EndSchedule":
                    self._start(states)
        if choice in self._follower.choices(source):  # else it was compared then
            self._compare()
            self._follower.made(source, choice, self._at)

    def _see(self, event: Mapping[str, Any]) -> None:
        """Take an event along the graph."""
        target = self._follower.step(self._at, event)
        if target is None:
            raise FollowError(f"{event} is no step of the graph after\n{self._told()}")
        self._at = target

    def _told(self) -> str:
        return "\n".join(map(str, self._tale.events))

    def _see_all(self, before: int) -> None:
        if self._tale.crash:
            raise FollowError(f"{self._tale.crash} after\n{self._told()}")
        for event in self._tale.events[before:]:
            self._see(event)

    def _start(self, moves: tuple[int, ...]) -> None:
        state = self._graph.states[self._at]
        placed = [self._graph.states[move]["event"] for move in moves[:-1]]
        before = len(self._tale.events)
        self._cache.start(
            Start(
                finished=[req for req in self._setting.requests if req in state["reported"]],
                admitted=[
                    Admission(req=e["req"], computed=e["computed"], blocks=list(e["blocks"]))
                    for e in placed
                    if e["kind"] != "running"
                ],
                running={e["req"]: e["computed"] for e in placed if e["kind"] == "running"},
                scheduled={e["req"]: e["n"] for e in placed},
            )
        )
        if placed:
            size, layout = self._setting.block_size, items(state["layout"])
            parts = [
                Part(
                    req=e["req"],
                    start=e["computed"],
                    slots=list(slots_of(e["blocks"], e["computed"], e["computed"] + e["n"], size)),
                )
                for e in placed
            ]
            contents = [layout[slot]["row"] for part in parts for slot in part.slots]
            step = int(state["step"]) + 1
            self._steps[step] = self._cache.save(parts, contents, self._setting.keys)
            for part in parts:
                for position, slot in enumerate(part.slots, part.start):
                    self._rows[step, part.req, position] = row_number(layout[slot]["row"])
        self._see_all(before)

    def _take(self, step: int, how: str) -> None:
        before = len(self._tale.events)
        spans = items(items(self._graph.states[self._at]["steps"])[step])
        if how == "discard":
            self._cache.discard(self._steps[step])
            self._see_all(before)
            return
        self._cache.take(self._steps[step], tuple(spans))
        *fetches, taken = self._tale.events[before:]
        for event in fetches:
            self._see(event)
        reads = items(self._graph.states[self._at]["reads"])
        self._see(taken)
        outputs = self._cache.outputs
        assert outputs is not None
        for req, span in spans.items():
            cached = items(reads[step, req]["rows"]) if (step, req) in reads else {}
            self._check_rows(outputs, step, req, span, cached)

    def _check_rows(
        self, outputs: StageCacheOutputs, step: int, req: str, span: Mapping[str, Any], cached: Mapping[Any, Any]
    ) -> None:
        if outputs.spans[req] != (span["start"], span["end"]):
            raise FollowError(f"step {step} hands over {outputs.spans[req]} of {req!r}, not {span}\n{self._told()}")
        for key in self._setting.keys:
            given = outputs.hidden_states if key == "hidden" else outputs.mm_outputs.get(key, {})
            found = decode(self._cache.keys[key], (given or {})[req])
            due = [row_number(cached[key, p]["row"]) for p in range(span["start"], span["hit"])]
            due += [self._rows[step, req, p] for p in range(span["hit"], span["end"])]
            if found != due:
                raise FollowError(f"step {step} hands over {found} as {key} of {req!r}, not {due}\n{self._told()}")

    def _compare(self) -> None:
        found, due = plain(self._cache.tables()), plain(tables_of(self._graph.states[self._at]))
        for name, table in due.items():
            if found[name] != table:
                raise FollowError(f"{name}: the package has {found[name]}, the graph {table}, after\n{self._told()}")
