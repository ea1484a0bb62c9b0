"""`conformance.tla.replay`: the reference model follows the specification, event by event."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from conformance.mutants.table import MUTANTS
from conformance.tla.check import check_manifest
from conformance.tla.graph import read_graph
from conformance.tla.replay import Replay, ReplayError, World, replay, replay_graph
from conformance.tla.tlc import Job, State, run
from conformance.tla.trace import load_trace, read_simulated, save_trace
from omni_prefix_ref import Machine

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(300)]

GRAPH = World(
    block_size=1,
    num_blocks=2,
    keys=("codes", "hidden"),
    hidden=frozenset({"hidden"}),
    deferred=frozenset({"codes"}),
    emit_tokens={"codes": frozenset({0, 1, 2})},
    fine=False,
)
RANDOM = World(
    block_size=1,
    num_blocks=4,
    keys=("codes", "hidden", "mm"),
    hidden=frozenset({"hidden"}),
    deferred=frozenset({"codes"}),
    emit_tokens={"codes": frozenset({0, 1}), "mm": frozenset({1, 2})},
    fine=True,
)
BEHAVIOURS = 12


def job(name: str) -> Job:
    """How the manifest runs a model."""
    return next(task.job for task in check_manifest([name]) if task.name == name)


@cache
def behaviours(folder: Path) -> tuple[tuple[State, ...], ...]:
    """Random behaviours of the model ``rows_replay``."""
    drawn = replace(job("rows_replay"), simulate=BEHAVIOURS, simulate_file=folder / "behaviour")
    assert run(drawn).violation is None
    return tuple(read_simulated(path) for path in sorted(folder.iterdir()))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[State, ...], ...]:
    """The behaviours, drawn once."""
    return behaviours(tmp_path_factory.mktemp("behaviours"))


def test_every_edge_of_a_state_graph_is_followed(tmp_path: Path) -> None:
    """Each transition of ``rows_graph``, one step at a time, successor for successor."""
    dump = tmp_path / "graph.dot"
    result = run(replace(job("rows_graph"), coverage=False, dump=dump))
    graph = read_graph(dump)
    assert len(graph.states) == result.distinct
    assert replay_graph(GRAPH, graph) == len(graph.edges) > result.distinct


def test_random_behaviours_are_followed(drawn: tuple[tuple[State, ...], ...], tmp_path: Path) -> None:
    """Preemption, pressure, same-step hits and early claims among them; also after being saved and loaded."""
    assert len(drawn) == BEHAVIOURS
    for states in drawn:
        replay(RANDOM, states)
    actions = {state.action for states in drawn for state in states}
    assert {"PreemptRequest", "ReserveBudget", "UnplanReads", "PreserveReads", "FetchRead", "CommitTask"} <= actions
    path = tmp_path / "trace.json"
    save_trace(path, "rows_replay", {}, drawn[0])
    replay(RANDOM, load_trace(path)[1])


FAULTY = ("skip_version_bump", "claim_only_emitted", "drop_aborted_write", "old_owner_writes", "commit_lost_slot",
          "plan_without_pin", "finish_leaves_bookkeeping", "step_consumed_twice")  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_a_reference_model_with_a_fault_does_not_follow(name: str, drawn: tuple[tuple[State, ...], ...]) -> None:
    """So that following means something."""
    machine: type[Machine] = next(mutant.machine for mutant in MUTANTS if mutant.name == name)
    left = 0
    for states in drawn:
        replayed = Replay(RANDOM, machine.start(RANDOM.settings()))
        try:
            for before, after in pairwise(states):
                replayed = replayed.follow(before.variables, after.variables)
        except (ReplayError, KeyError):
            left += 1
    assert left > 0
