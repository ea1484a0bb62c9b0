"""Part G: what running another implementation brought to light."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_prefix_fast import ModelCachePolicy
from tests.omni_prefix_fast.harness import Engine, column, per_token

DEFERRED = pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])
K: dict[str, Any] = {"k": per_token(1)}


def policy(deferred: bool) -> ModelCachePolicy:
    """Key k deferred, or judged by its shape."""
    return ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()))


# ------------------------------------------------------------------------------------------------------------ D1


@DEFERRED
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
@pytest.mark.parametrize("empty", [True, False], ids=["k empty", "k absent"])
def test_D1_a_key_that_the_hits_step_does_not_emit_still_hands_its_prefix_over(
    finished: bool, empty: bool, deferred: bool
) -> None:
    """B hits A's rows of k in a step without k: rows 0..3 of k reach the consumer, once; its later k rows follow."""
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=K), "A")
    mm = {"k": torch.empty(0, 1)} if empty else {}
    step = engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"] if finished else [], mm=mm)
    outs = engine.take(step, "B")
    assert column((outs.hidden_states or {})["B"]) == list(range(6))
    assert column(outs.mm_outputs["k"]["B"]) == [0, 1, 2, 3]
    assert (outs.spans["B"], outs.mm_spans["k"]["B"]) == ((0, 6), (0, 4))
    outs = engine.take(engine.step(cached=[("B", 2)], mm=K), "B")
    assert column(outs.mm_outputs["k"]["B"]) == [6, 7]
    assert outs.mm_spans["k"]["B"] == (6, 8)


@DEFERRED
def test_D1_only_those_who_hit_it_get_it(deferred: bool) -> None:
    """Beside B, a request that hit nothing and one whose hit has no rows of k get nothing under k."""
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=K), "A")
    engine.take(engine.step(new=[("Z", [1], 0, 4)]), "Z")
    new = [("B", [0, 2], 4, 2), ("N", [3], 0, 2), ("H", [1, 4], 4, 1)]
    outs = engine.take(engine.step(new=new), "B", "N", "H")
    assert {r: column(v) for r, v in outs.mm_outputs["k"].items()} == {"B": [0, 1, 2, 3]}


# ------------------------------------------------------------------------------------------------------------ D2


@DEFERRED
@pytest.mark.parametrize("feature", [(2, 3), (1, 1), (3, 1, 2), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("hit", [4, 3])
def test_D2_rows_of_any_rank_are_cached_with_their_shape(hit: int, feature: tuple[int, ...], deferred: bool) -> None:
    """Rows with several feature dimensions come back from the cache with them, from whole blocks and from parts."""
    engine = Engine(policy=policy(deferred))
    values = torch.arange(5 * 48, dtype=torch.float32).reshape(5, 48)[:, : torch.Size(feature).numel()]
    rows = values.reshape(5, *feature)
    engine.take(engine.step(new=[("A", [0, 1], 0, 4)], mm={"k": rows[:4].clone()}), "A")
    outs = engine.take(engine.step(new=[("B", [0, 1], hit, 5 - hit)], finished=["A"], mm={"k": rows[hit:]}), "B")
    assert torch.equal(outs.mm_outputs["k"]["B"], rows)


# ------------------------------------------------------------------------------------------------------------ D3


@DEFERRED
@pytest.mark.parametrize("recycled", [True, False], ids=["recycled block", "fresh block"])
@pytest.mark.parametrize("beside", [True, False], ids=["beside a writer", "alone"])
def test_D3_a_key_first_seen_on_the_hits_step_has_zeros_before(recycled: bool, beside: bool, deferred: bool) -> None:
    """Nobody emitted k when the hit rows were computed: zeros there, and its own rows; never another request's."""
    engine = Engine(policy=policy(deferred))
    if recycled:
        engine.take(engine.step(new=[("old", [0, 1], 0, 8)], base={"old": 900}), "old")
    engine.take(engine.step(new=[("A", [0], 0, 4)], finished=["old"]), "A")
    new = [("B", [0, 1], 4, 2), ("W", [2], 0, 4)] if beside else [("B", [0, 1], 4, 2)]
    outs = engine.take(engine.step(new=new, base={"W": 500}, mm=K), "B")
    assert column((outs.hidden_states or {})["B"]) == list(range(6))
    assert column(outs.mm_outputs["k"]["B"]) == [0, 0, 0, 0, 4, 5]
