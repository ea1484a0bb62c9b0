"""Every edge of the small state graphs, replayed on the reference model; faults in it are seen."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from conformance.links.cover import Cover, replay
from conformance.links.models import MODELS, GraphModel
from conformance.links.sources import spec_actions
from conformance.links.translate import Replayer, row_number
from conformance.links.views import COMPARED, NOT_COMPARED
from conformance.mutants import faults
from conformance.tla.graph import Graph
from omni_prefix_ref import Machine

DEADLINE = 50.0
BY_NAME = {model.name: model for model in MODELS}
ALL_MODELS = pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)


@functools.cache
def graph_of(model: str) -> Graph:
    """TLC runs once for each model."""
    return BY_NAME[model].graph(DEADLINE)


def replayed(model: GraphModel, machine: type[Machine] = Machine) -> Cover:
    """A model's edges, on the reference or on a faulty one."""
    return replay(graph_of(model.name), Replayer(model.shape), machine)


@pytest.mark.tlc
@ALL_MODELS
def test_every_edge_is_replayed(model: GraphModel) -> None:
    """Action by action, no state and no edge left out, and no difference in any variable that both describe."""
    graph, cover = graph_of(model.name), replayed(model)
    assert cover.mismatch is None, str(cover.mismatch)
    assert cover.states == len(graph.states)
    assert cover.edges == Counter(edge.action for edge in graph.edges)
    assert cover.total > 3000


@pytest.mark.tlc
def test_every_action_of_the_cache_is_replayed() -> None:
    """Together the graphs have an edge of each action of `PrefixCache`, less those of engines that the gate refuses."""
    taken = {edge.action for model in MODELS for edge in graph_of(model.name).edges}
    actions = {place.name for place in spec_actions() if place.module == "PrefixCache"}
    assert taken == actions - {"WithdrawRequest", "LoadBlock"}


@pytest.mark.tlc
@ALL_MODELS
def test_every_variable_is_compared_or_has_its_reason(model: GraphModel) -> None:
    """A new variable of the specification cannot be passed over in silence."""
    state = next(iter(graph_of(model.name).states.values()))
    assert set(state) == set(COMPARED) | set(NOT_COMPARED)
    assert not set(COMPARED) & set(NOT_COMPARED)


@pytest.mark.tlc
@pytest.mark.parametrize(
    ("model", "fault", "variable"),
    [
        ("rows_graph", faults.SkipVersionBump, "version"),
        ("rows_graph", faults.PlanWithoutPin, "pins"),
        ("rows_graph", faults.PlanSameStepOnce, "reads"),
        ("rows_graph", faults.DropAbortedWrite, "occupancy"),
        ("rows_graph", faults.StepConsumedTwice, "steps"),
        ("rows_graph", faults.FinishLeavesBookkeeping, "emitted"),
        ("rows_graph", faults.DiscardKeepsPage, "pages held"),
        ("resume", faults.ContinuationIsHit, "reads"),
        ("resume", faults.SkipChainStep, "tasks"),
        ("resume", faults.PageFreedAtMaterialize, "tasks"),
        ("evict", faults.NoCopyAside, "reads"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_a_fault_is_seen_at_an_edge(model: str, fault: type[Machine], variable: str) -> None:
    """The story names the variable, both values and the way there."""
    mismatch = replayed(BY_NAME[model], fault).mismatch
    assert mismatch is not None
    assert variable in mismatch.story
    assert mismatch.path
    assert all(action in str(mismatch) for action in mismatch.path)


def test_rows_are_told_apart() -> None:
    """Each content prefix has a number of its own, and zeros have 0."""
    rows = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    assert len({row_number(row) for row in rows}) == len(rows)
    assert row_number(()) == 0
