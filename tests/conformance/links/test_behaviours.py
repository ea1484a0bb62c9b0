"""Random behaviours of the specification, replayed on the reference model; faults in it are seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from conformance.links.cover import Cover, replay_behaviour
from conformance.links.translate import Replayer, Shape
from conformance.mutants.table import MUTANTS
from conformance.tla.check import check_manifest
from conformance.tla.tlc import State, run
from conformance.tla.trace import load_trace, read_simulated, save_trace
from omni_prefix_ref import Machine

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(300)]

RANDOM = Replayer(
    Shape(
        keys=("codes", "hidden", "mm"),
        deferred=frozenset({"codes"}),
        emit_tokens={"codes": frozenset({0, 1}), "mm": frozenset({1, 2})},
        num_blocks=4,
        block_size=1,
        fine=True,
    )
)
"""The model ``rows_replay``."""
BEHAVIOURS = 12


@cache
def behaviours(folder: Path) -> tuple[tuple[State, ...], ...]:
    """Random behaviours of the model."""
    job = next(task.job for task in check_manifest(["rows_replay"]) if task.name == "rows_replay")
    drawn = replace(job, simulate=BEHAVIOURS, simulate_file=folder / "behaviour")
    assert run(drawn).violation is None
    return tuple(read_simulated(path) for path in sorted(folder.iterdir()))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[State, ...], ...]:
    """The behaviours, drawn once."""
    return behaviours(tmp_path_factory.mktemp("behaviours"))


def test_random_behaviours_are_followed(drawn: tuple[tuple[State, ...], ...]) -> None:
    """Preemption, pressure, same-step hits, early claims and a committer beside a publish among them."""
    assert len(drawn) == BEHAVIOURS
    taken: Counter[str] = Counter()
    for states in drawn:
        cover = replay_behaviour(states, RANDOM)
        assert cover.mismatch is None, str(cover.mismatch)
        assert cover.total == len(states) - 1
        taken += cover.edges
    assert {"PreemptRequest", "SealWrite", "ReserveBudget", "UnplanReads", "PreserveReads", "FetchRead"} <= set(taken)
    assert any(
        state.variables["pc"] in ("register", "append", "replan") and state.variables["event"]["thread"] == "committer"
        for states in drawn
        for state in states
    )


def test_a_saved_behaviour_is_followed(drawn: tuple[tuple[State, ...], ...], tmp_path: Path) -> None:
    """What was written as a trace file and read again is the same behaviour."""
    path = tmp_path / "trace.json"
    save_trace(path, "rows_replay", {}, drawn[0])
    assert replay_behaviour(load_trace(path)[1], RANDOM) == replay_behaviour(drawn[0], RANDOM)


FAULTY = ("skip_version_bump", "claim_only_emitted", "drop_aborted_write", "old_owner_writes", "commit_lost_slot",
          "plan_without_pin", "finish_leaves_bookkeeping", "step_consumed_twice")  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_a_reference_model_with_a_fault_does_not_follow(name: str, drawn: tuple[tuple[State, ...], ...]) -> None:
    """So that following means something."""
    machine: type[Machine] = next(mutant.machine for mutant in MUTANTS if mutant.name == name)
    covers: list[Cover] = [replay_behaviour(states, RANDOM, machine) for states in drawn]
    assert any(cover.mismatch is not None for cover in covers)
