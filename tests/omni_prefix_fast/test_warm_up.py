"""`warm_up`: what the keys need is there before the first request, and nothing else is different."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from omni_prefix_fast import (
    HIDDEN_KEY,
    ModelCachePolicy,
    OmniPrefixCacheClosedError,
    OmniPrefixCacheContractError,
)
from tests.omni_prefix_fast.harness import WIDTH, Engine, column, per_token

HIDDEN = (torch.float32, (WIDTH,))
FEATURE = (torch.float32, (3,))
CODES = (torch.int64, (4,))
KEYS = {HIDDEN_KEY: HIDDEN, "feature": FEATURE, "codes": CODES}
POLICY = ModelCachePolicy(deferred_keys=frozenset({"codes"}))
MM = {"feature": per_token(3), "codes": per_token(4, dtype=torch.int64)}


def warmed(**settings: Any) -> Engine:
    """An engine whose cache has every key of the tests open."""
    engine = Engine(policy=POLICY, **settings)
    engine.cache.warm_up(KEYS)
    return engine


def counting(allocate: Callable[..., Any], sizes: list[int]) -> Callable[..., Any]:
    """The same function, which also writes the bytes of what it made down."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        made = allocate(*args, **kwargs)
        sizes.append(int(made.nbytes))
        return made

    return counted


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_the_first_save_allocates_nothing_big(warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4,096 blocks every pool and table takes 16 KiB or more; a step of 2 tokens makes arrays of a few bytes."""
    engine = Engine(policy=POLICY, num_blocks=4096)
    if warm:
        engine.cache.warm_up(KEYS)
    before = engine.cache.footprint()
    sizes: list[int] = []
    for module in (torch, np):
        for name in ("zeros", "empty", "full", "ones"):
            monkeypatch.setattr(module, name, counting(getattr(module, name), sizes))
    step = engine.step(new=[("A", [0], 0, 2)], mm=MM)
    monkeypatch.undo()
    after = engine.cache.footprint()
    assert (max(sizes, default=0) < 4096) == warm
    assert (before.pool_bytes, before.staging_bytes, before.table_bytes) == (
        (after.pool_bytes, after.staging_bytes, after.table_bytes) if warm else ({}, {}, before.table_bytes)
    )
    assert (after.table_bytes == before.table_bytes) == warm
    assert engine.hidden(step, "A") == [0, 1]


def test_steps_hand_over_the_same_as_without_it() -> None:
    """A hit, a deferred key and a step that emits nothing of a key: the same rows, spans, tables and statistics."""
    outs, states, statistics = [], [], []
    for engine in (warmed(), Engine(policy=POLICY)):
        first = engine.step(new=[("A", [0, 1], 0, 6)], mm=MM)
        second = engine.step(new=[("B", [0, 2], 4, 3)], finished=["A"], mm={"codes": MM["codes"]})
        outs.append([engine.take(first, "A"), engine.take(second, "B")])
        states.append(engine.settled())
        statistics.append(engine.cache.statistics())
    for with_it, without in zip(*outs, strict=True):
        assert (with_it.spans, with_it.mm_spans) == (without.spans, without.mm_spans)
        assert with_it.hidden_states is not None
        assert without.hidden_states is not None
        for req_id, rows in without.hidden_states.items():
            assert torch.equal(with_it.hidden_states[req_id], rows)
        assert {key: column(rows) for key, by in with_it.mm_outputs.items() for rows in by.values()} == {
            key: column(rows) for key, by in without.mm_outputs.items() for rows in by.values()
        }
    assert states[0] == states[1]
    assert statistics[0] == statistics[1]


def test_a_key_that_is_never_emitted_changes_nothing() -> None:
    """No table of it is looked at, and a hit owes no zeros of it."""
    engine = warmed()
    engine.take(engine.step(new=[("A", [0, 1], 0, 6)]), "A")
    outs = engine.take(engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"]), "B")
    assert outs.mm_outputs == {}
    assert set(engine.cache.inspect().occupancy) == {HIDDEN_KEY}


def test_an_undeclared_key_may_still_turn_out_not_to_be_per_token() -> None:
    """It is handed over as a leftover, and nothing was demoted: it never had rows."""
    engine = warmed()
    outs = engine.take(engine.step(new=[("A", [0], 0, 2)], mm={"feature": torch.ones(5)}), "A")
    assert torch.equal(outs.mm_outputs["feature"]["A"], torch.ones(5))
    assert engine.cache.statistics().keys_demoted == 0


def test_a_second_one_keeps_the_rows_and_opens_what_is_new() -> None:
    """Also after steps were saved."""
    engine = Engine(policy=POLICY)
    engine.cache.warm_up({HIDDEN_KEY: HIDDEN})
    engine.take(engine.step(new=[("A", [0, 1], 0, 6)]), "A")
    engine.cache.warm_up(KEYS)
    engine.cache.warm_up(KEYS)
    assert set(engine.cache.footprint().pool_bytes) == set(KEYS)
    step = engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"], mm=MM)
    assert engine.hidden(step, "B") == list(range(6))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([("feature", FEATURE)], "takes a mapping"),
        ({3: FEATURE}, "3"),
        ({"feature": torch.float32}, "'feature'.*dtype, feature shape"),
        ({"feature": ("float32", (3,))}, "'feature'.*dtype, feature shape"),
        ({"feature": (torch.float32, (-1,))}, "'feature'.*dtype, feature shape"),
        ({"feature": (torch.float32, 3)}, "'feature'.*dtype, feature shape"),
        ({"feature": (torch.quint8, (3,))}, "'feature'.*quint8"),
        ({"feature": (torch.float32, ())}, "'feature'.*token_keys"),
        ({"reference": FEATURE}, "'reference'.*request_keys"),
        ({"entries": FEATURE}, "'entries'.*request_keys"),
        ({"open": (torch.float32, (5,))}, "'open'"),
        ({"open": (torch.int64, (3,))}, "'open'"),
        ({"shapeless": FEATURE}, "'shapeless'.*seen before"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_no_save_could_keep_is_refused_and_nothing_is_allocated(keys: Any, message: str) -> None:
    """The error names the key; the good key beside the bad one was not opened either."""
    policy = ModelCachePolicy(request_keys=frozenset({"reference"}), request_list_keys=frozenset({"entries"}))
    engine = Engine(policy=policy)
    mm = {"open": per_token(3), "shapeless": torch.ones(5)}
    engine.take(engine.step(new=[("A", [0], 0, 2)], mm=mm), "A")
    before = engine.cache.footprint()
    with pytest.raises(OmniPrefixCacheContractError, match=message):
        engine.cache.warm_up({"good": FEATURE, **keys} if isinstance(keys, dict) else keys)
    assert engine.cache.footprint() == before


def test_keys_beside_the_declared_ones_are_refused() -> None:
    """Where a policy names the per-token keys, nothing else is ever kept; hidden states only if it wants them."""
    engine = Engine(policy=ModelCachePolicy(needs_full_hidden_states=False, token_keys=frozenset({"flag"})))
    engine.cache.warm_up({"flag": (torch.bool, ())})
    for key in ("feature", HIDDEN_KEY):
        with pytest.raises(OmniPrefixCacheContractError, match=key):
            engine.cache.warm_up({key: FEATURE})


def test_a_narrower_type_fits_an_open_key() -> None:
    """As it would in a save."""
    engine = warmed()
    engine.cache.warm_up({HIDDEN_KEY: (torch.bfloat16, (WIDTH,))})
    with pytest.raises(OmniPrefixCacheContractError, match=HIDDEN_KEY):
        engine.cache.warm_up({HIDDEN_KEY: (torch.float64, (WIDTH,))})


def test_a_save_that_does_not_fit_what_was_warmed_up_is_refused() -> None:
    """Warming up opens the key; the save is the second to speak."""
    engine = Engine(policy=POLICY)
    engine.cache.warm_up({HIDDEN_KEY: (torch.float32, (WIDTH + 1,))})
    engine.start(new=[("A", [0], 0, 2)])
    with pytest.raises(OmniPrefixCacheContractError, match=HIDDEN_KEY):
        engine.save()


def test_after_shutdown_it_is_refused() -> None:
    """Like every other call."""
    engine = warmed()
    engine.cache.shutdown()
    with pytest.raises(OmniPrefixCacheClosedError):
        engine.cache.warm_up(KEYS)
