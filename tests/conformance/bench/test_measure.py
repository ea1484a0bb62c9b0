"""Repeats are interleaved, and figures are medians and quartiles."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.bench.measure import Figure, Pace, interleave


def test_a_figure_is_the_median_with_its_quartiles() -> None:
    """Whatever the order."""
    assert Figure.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Figure(3.0, 2.0, 4.0, 5)
    assert Figure.of([1.0]) == Figure(1.0, 1.0, 1.0, 1)


def test_contenders_take_turns_and_the_first_steps_of_a_burst_do_not_count() -> None:
    """The order moves on by one each round."""
    taken: list[str] = []

    def contender(name: str) -> Mapping[str, float]:
        taken.append(name)
        return {"step": float(len(taken))}

    figures = interleave({"a": lambda: contender("a"), "b": lambda: contender("b")}, Pace(rounds=2, burst=1, warm=1))
    assert taken == ["a", "a", "b", "b", "b", "b", "a", "a"]
    assert figures["a"]["step"] == Figure(5.0, 2.0, 8.0, 2)
    assert figures["b"]["step"] == Figure(5.0, 4.0, 6.0, 2)
