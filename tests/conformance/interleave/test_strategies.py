"""Strategies: the same arguments decide the same, and each looks where it has to."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from conformance.interleave import Pct, Replay, SerialRuntime, Strategy, Uniform, drawn
from conformance.interleave.strategies import NEVER


def _order(strategy: Strategy, threads: int = 3) -> str:
    """Who ran at each of the points of some threads that never wait."""
    order: list[str] = []
    runtime = SerialRuntime(strategy)

    def body(name: str) -> None:
        for _ in range(8):
            order.append(name)
            runtime.point()

    def program() -> None:
        started = [runtime.spawn(name, lambda name=name: body(name)) for name in "abc"[:threads]]  # type: ignore[misc]
        for thread in started:
            thread.join()

    runtime.run(program)
    return "".join(order)


@pytest.mark.parametrize(
    "make",
    [
        Uniform,
        lambda seed: Uniform(seed, 0.2),
        lambda seed: Pct(seed, depth=3, points=30),
        lambda seed: drawn(seed, 30),
    ],
    ids=["uniform", "uniform, slower", "pct", "drawn"],
)
def test_a_seed_is_an_order(make: Callable[[int], Strategy]) -> None:
    """The same seed gives the same order; other seeds give others."""
    assert all(_order(make(seed)) == _order(make(seed)) for seed in range(10))
    assert len({_order(make(seed)) for seed in range(30)}) >= 5


def test_priorities_alone_let_a_thread_run_to_its_end() -> None:
    """PCT of depth 1: nobody is preempted but by somebody above him, so each thread runs in one go."""
    orders = {_order(Pct(seed, depth=1, points=30)) for seed in range(60)}
    assert orders == {"".join(name * 8 for name in order) for order in ("abc", "acb", "bac", "bca", "cab", "cba")}


@pytest.mark.parametrize("depth", [2, 3])
def test_a_change_point_costs_one_switch(depth: int) -> None:
    """PCT of depth d: at most d - 1 threads are broken off before they end."""
    for seed in range(40):
        order = _order(Pct(seed, depth=depth, points=30))
        runs = 1 + sum(a != b for a, b in itertools.pairwise(order))
        assert runs <= 3 + depth - 1, f"seed {seed}: {order}"


def test_a_replay_looks_at_its_switches_only() -> None:
    """Every other point costs nothing."""
    replayed = Replay([(7, "b"), (3, "a")])
    assert [replayed.next_look(point) for point in (0, 4, 7, 8)] == [3, 7, 7, NEVER]
    assert _order(Replay([])) == "a" * 8 + "b" * 8 + "c" * 8


def test_a_pace_is_a_probability() -> None:
    """Others are refused by name."""
    for pace in (0.0, 1.5):
        with pytest.raises(ValueError, match="pace is"):
            Uniform(0, pace)
    looks = [Uniform(seed, 0.1).next_look(0) for seed in range(400)]
    assert 6 < sum(looks) / len(looks) < 12
