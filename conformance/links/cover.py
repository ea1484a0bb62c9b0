"""Every edge of a state graph of TLC, and random behaviours of TLC, replayed on the reference model.

A reference state is kept for each state of the graph: that of the path by which a breadth-first walk first came there.
For each edge the action is applied to the reference state of its source, with the arguments that the event of its
target names; then every variable that both describe is compared with the target.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from conformance.links.translate import CoverError, Replayer, TlaState, step_made
from conformance.links.views import View, compare, held, view_of_spec
from conformance.tla.graph import Edge, Graph
from conformance.tla.tlc import State
from omni_prefix_ref import Machine
from omni_prefix_ref.errors import NotEnabled, OmniPrefixCacheRowError, OmniPrefixCacheUnmatchError

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
        if story := compare(first, known[number][1], step_made(graph.states[number])):
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
                story = compare(after, view, step_made(target))
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


def _path(graph: Graph, came: Mapping[int, int | None], number: int) -> tuple[str, ...]:
    actions = []
    here: int | None = number
    while here is not None and came[here] is not None:
        actions.append(_told(graph.states[here]["event"]))
        here = came[here]
    return tuple(reversed(actions))


# ------------------------------------------------------------------------- one behaviour


def replay_behaviour(states: Sequence[State], replayer: Replayer, machine: type[Machine] = Machine) -> Cover:
    """Replay a behaviour from its initial state; stop at the first event after which the two differ."""
    shape, cover = replayer.shape, Cover()
    now = shape.start(machine)
    taken: list[str] = []
    for before, after in pairwise(states):
        event = after.variables["event"]
        taken.append(_told(event))
        edge = Edge(0, 0, event["action"])
        story, found = _one(replayer, now, before.variables, after.variables, edge)
        if found is not None:
            now = found
            story = compare(now, view_of_spec(after.variables, shape), step_made(after.variables))
        if story:
            cover.mismatch = Mismatch(tuple(taken), story)
            return cover
        cover.states += 1
        cover.edges[event["action"]] += 1
    return cover
