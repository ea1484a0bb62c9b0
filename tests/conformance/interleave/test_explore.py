"""The explorer sees: every planted race is found, and no correct program is reported."""

from __future__ import annotations

import pytest

from conformance.interleave import DeadlockError, Pct, Replay, SerialRuntime, Strategy, Uniform, exhaustive, sample
from conformance.interleave.explore import run_once
from conformance.interleave.tasks import EndlessError
from tests.conformance.interleave.planted import PLANTED

RUNS = 200
"""Runs within which each planted race is found by drawing."""
SEEDS = range(3)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_found_within_two_preemptions(name: str) -> None:
    """Exhaustive search finds each; the interleaving that it tells finds it again, ten times of ten."""
    faulty, _ = PLANTED[name]
    found = exhaustive(faulty)
    print(f"{name}: {found}")
    assert found.error is not None, f"{name} was not found: {found}"
    for _ in range(10):
        runtime, error = run_once(faulty, Replay(found.switches))
        assert type(error) is type(found.error)
        assert tuple(runtime.switches) == found.switches


@pytest.mark.parametrize("name", PLANTED)
def test_a_correct_program_is_not_reported(name: str) -> None:
    """Nothing is found in any interleaving within two preemptions, nor in drawn ones."""
    _, correct = PLANTED[name]
    explored = exhaustive(correct)
    print(f"{name}: {explored}")
    assert explored.error is None, explored
    assert explored.runs > 1 or name.startswith("clock"), "one interleaving is no exploration"
    drawn: list[Strategy] = [*(Pct(n, depth=3, points=30) for n in range(100)), *(Uniform(n) for n in range(100))]
    assert sample(correct, drawn).error is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_found_by_priorities(name: str, seed: int) -> None:
    """PCT of depth 2 finds each within 200 runs, whatever the seed of the first."""
    faulty, _ = PLANTED[name]
    found = sample(faulty, (Pct(seed * RUNS + n, depth=2, points=20) for n in range(RUNS)))
    assert found.error is not None, f"seed {seed}: {found}"


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_found_uniformly(name: str) -> None:
    """Uniform choice at every point finds each within 200 runs."""
    faulty, _ = PLANTED[name]
    assert sample(faulty, (Uniform(n) for n in range(RUNS))).error is not None


def test_fewest_preemptions_come_first() -> None:
    """A deadlock that needs one preemption is found with one."""
    faulty, _ = PLANTED["lock: order"]
    runtime, error = run_once(faulty, Replay(exhaustive(faulty).switches))
    assert isinstance(error, DeadlockError)
    assert runtime.baton.preemptions == 1


def test_every_interleaving_is_run_once() -> None:
    """Two threads with two points each: each order of their four parts within the bound comes up, and once."""
    seen: list[str] = []

    def program(runtime: SerialRuntime) -> None:
        order: list[str] = []

        def body(name: str) -> None:
            for _ in range(2):
                order.append(name)
                runtime.point()

        threads = [runtime.spawn(name, lambda name=name: body(name)) for name in "ab"]  # type: ignore[misc]
        for thread in threads:
            thread.join()
        seen.append("".join(order))

    explored = exhaustive(program)
    assert set(seen) == {"aabb", "abab", "abba", "baab", "baba", "bbaa"}
    assert explored.runs == len(seen)


def test_a_program_that_is_too_large_is_refused() -> None:
    """More interleavings than were allowed are an error, not a silent stop."""
    with pytest.raises(EndlessError, match="sample"):
        exhaustive(PLANTED["condition: not checked again"][1], most=10)


def test_only_what_is_marked_is_explored() -> None:
    """A program says where other interleavings are looked for; elsewhere threads run as they come."""

    def program(runtime: SerialRuntime) -> None:
        runtime.explored = False
        started = [runtime.spawn("idle", lambda: runtime.point("idle")) for _ in range(3)]
        runtime.explored = marked
        total = [0]

        def add() -> None:
            seen = total[0]
            runtime.point("between read and write")
            total[0] = seen + 1

        threads = [*started, runtime.spawn("add", add)]
        add()
        for thread in threads:
            thread.join()
        assert total == [1 + 1]

    marked = False
    assert exhaustive(program).runs == 1
    marked = True
    assert exhaustive(program).error is not None


@pytest.mark.parametrize("name", PLANTED)
def test_pruning_finds_the_same(name: str) -> None:
    """What differs in the order of independent operations only is left out, and nothing that goes wrong."""
    faulty, correct = PLANTED[name]
    assert type(exhaustive(faulty, prune=True).error) is type(exhaustive(faulty).error)
    every, pruned = exhaustive(correct), exhaustive(correct, prune=True)
    print(f"{name}: {pruned.runs} of {every.runs}")
    assert pruned.error is None
    assert pruned.runs <= every.runs


def test_pruning_leaves_something_out() -> None:
    """Two threads that use a lock each have many interleavings, and few that differ."""

    def program(runtime: SerialRuntime) -> None:
        locks = [runtime.lock(name) for name in "ab"]

        def use(nth: int) -> None:
            for _ in range(3):
                with locks[nth]:
                    pass

        thread = runtime.spawn("other", lambda: use(1))
        use(0)
        thread.join()

    assert 2 * exhaustive(program, prune=True).runs < exhaustive(program).runs
