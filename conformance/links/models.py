"""The models whose state graphs are replayed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from conformance.links.sources import SPEC
from conformance.links.translate import CoverError, Shape
from conformance.tla.config import Config
from conformance.tla.graph import Graph, read_graph
from conformance.tla.tlc import Job, run
from conformance.tla.values import parse_value

_GRAPH = Config.load(SPEC / "MCRows_graph.cfg")


@dataclass(frozen=True)
class GraphModel:
    """A small model: `spec/MCRows_graph.cfg`, or that one with other constants along a story of ``GuidedRows``."""

    name: str
    constraint: str | None = None
    constants: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """Nothing is checked here: model-check does that. All states count, so there is no view."""
        constraint = self.constraint or _GRAPH.constraint
        constants = {**_GRAPH.constants, **self.constants}
        return replace(_GRAPH, constants=constants, constraint=constraint, invariants=(), properties=(), view=None)

    @property
    def shape(self) -> Shape:
        """What the replay needs to know of the constants."""
        constants = self.config.constants
        if constants["EmitTokens"] != "<- Whole":
            raise CoverError("a step of the reference emits a key whole, so a model to replay has to")

        def value(name: str) -> object:
            return parse_value(constants[name].removeprefix("= "))

        def strings(name: str) -> frozenset[str]:
            found = value(name)
            assert isinstance(found, frozenset)
            return found

        blocks, size = value("Blocks"), value("BlockSize")
        assert isinstance(blocks, frozenset)
        assert isinstance(size, int)
        if value("Watched") != frozenset(range(len(blocks) * size)):
            raise CoverError("the reference watches every slot, so a model to replay has to")
        keys = strings("Keys")
        whole = {key: frozenset({0, 1, 2}) for key in keys}
        return Shape(tuple(sorted(keys)), strings("Deferred"), whole, len(blocks), size, value("Fine") is True)

    def graph(self, deadline: float) -> Graph:
        """Let TLC walk through all states, and read them."""
        module = Path(__file__).with_name("GuidedRows.tla") if self.constraint else SPEC / "MCRows.tla"
        with tempfile.TemporaryDirectory(prefix="graph-") as folder:
            dump = Path(folder) / "graph.dot"
            run(Job(module, self.config.render(), deadline, library=SPEC, dump=dump))
            return read_graph(dump)


_THREE = {"Order": "<- Order3", "Text": "<- Text3", "PromptLen": "<- Prompt3", "MaxBatch": "= 1"}
_ONE = {"Order": "<- Order1", "Text": "<- Text1", "PromptLen": "<- Prompt1", "MaxBatch": "= 1"}
_TWO = {"Order": "<- Order2", "Text": "<- Text2", "PromptLen": "<- Prompt2", "MaxBatch": "= 2"}

EAGER = GraphModel("eager", "Eager", {**_TWO, "MaxPreempt": "= 1", "Fine": "= TRUE"})
"""What the eager cache can do: its paths are replayed on the production package."""

MODELS: tuple[GraphModel, ...] = (
    GraphModel("rows_graph"),
    GraphModel("resume", "Resume", {**_ONE, "MaxPreempt": "= 1", "Fine": "= TRUE"}),
    GraphModel("evict", "Evict", {**_THREE, "MaxPreempt": "= 0", "Fine": "= FALSE", "Pressure": "= TRUE"}),
)
