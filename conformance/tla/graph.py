"""TLC's state graph, as ``-dump dot,actionlabels`` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.tla.tlc import parse_state

_NODE = re.compile(r'^(-?\d+) \[label="(.*?)"(,style = filled)?\];?$', re.DOTALL)
_EDGE = re.compile(r'^(-?\d+) -> (-?\d+) \[label="(\w*)"')


@dataclass(frozen=True)
class Edge:
    """One transition: its action leads from one state to another."""

    source: int
    target: int
    action: str


@dataclass(frozen=True)
class Graph:
    """States by TLC's fingerprint, the initial ones, and the transitions between them."""

    states: dict[int, dict[str, Any]]
    initial: frozenset[int]
    edges: tuple[Edge, ...]


def _statements(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield line.strip()


def read_graph(path: Path) -> Graph:
    """Read a dumped state graph."""
    states: dict[int, dict[str, Any]] = {}
    initial: set[int] = set()
    edges: list[Edge] = []
    for line in _statements(path.read_text()):
        if edge := _EDGE.match(line):
            edges.append(Edge(int(edge[1]), int(edge[2]), edge[3]))
        elif node := _NODE.match(line):
            label = node[2].replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
            states[int(node[1])] = parse_state(label)
            if node[3]:
                initial.add(int(node[1]))
    return Graph(states, frozenset(initial), tuple(edges))
