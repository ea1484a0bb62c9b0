"""Part F: gates, identity of blocks, partial hits, counters, late keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_prefix_fast import (
    HIDDEN_KEY,
    ModelCachePolicy,
    OmniPrefixCacheConfigError,
    OmniPrefixCacheContractError,
    OmniPrefixCacheRowError,
    check_prefix_cache_kv_groups,
    check_prefix_cache_kv_transfer,
)
from tests.omni_prefix_fast.cases.stages import gate, kv_cache
from tests.omni_prefix_fast.harness import Engine, column, filled, per_token

DEFERRED = pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])
K: dict[str, Any] = {"k": per_token(1)}


def policy(deferred: bool, **more: Any) -> ModelCachePolicy:
    """Key k, per token, deferred or not."""
    return ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()), token_keys=frozenset({"k"}), **more)


# ----------------------------------------------------------------------------------------------------------- E41


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_E41_a_stage_that_receives_kv_is_refused(role: str) -> None:
    """KV of elsewhere looks like a local hit, so the stage is refused at set-up: role and setting are named."""
    with pytest.raises(OmniPrefixCacheConfigError, match=rf"kv_role is '{role}'.*kv_role to 'kv_producer'"):
        gate(kv_role=role)
    assert gate(kv_role=role, enable_prefix_caching=False) is None
    assert gate(kv_role=role, is_pooling_model=True) is None


@pytest.mark.parametrize("role", [None, "kv_producer"])
def test_E41_a_stage_that_only_produces_kv_is_allowed(role: str | None) -> None:
    """Without a KV transfer, and with the producer's role, the stage gets its cache."""
    assert gate(kv_role=role) is not None
    check_prefix_cache_kv_transfer(None)


@DEFERRED
@pytest.mark.parametrize(("known", "hit"), [(8, 12), (4, 12), (0, 4), (8, 9)], ids=str)
def test_E41_a_hit_beyond_the_hidden_rows_is_an_error(known: int, hit: int, deferred: bool) -> None:
    """KV covers more tokens than there are hidden rows: the error names request and first lost position; others live.

    Never are the rows that do exist glued to the new ones.
    """
    engine = Engine(policy=policy(deferred))
    if known:
        engine.take(engine.step(new=[("A", [0, 1, 2], 0, known)], mm=K), "A")
    step = engine.step(new=[("B", [0, 1, 2, 3], hit, 1), ("C", [5], 0, 2)], finished=["A"], mm=K)
    right = rf"request 'B' hit positions 0\.\.{hit - 1}, but {hit - known} of them.*first at position {known}"
    with pytest.raises(OmniPrefixCacheRowError, match=right):
        engine.take(step, "B", "C")
    step = engine.step(new=[("D", [0, 1, 2, 3], hit, 1), ("E", [6], 0, 2)], finished=["B", "C"], mm=K)
    assert engine.hidden(step, "E") == [0, 1]  # the failed read is the business of whoever asks for it
    assert engine.hidden(engine.step(cached=[("E", 1)], finished=["D"], mm=K), "E") == [2]


def test_E41_hits_beyond_the_rows_are_an_error_before_any_row_was_saved() -> None:
    """The very first request of a cache is told to have hit something: an error, although no key is known yet."""
    engine = Engine()
    with pytest.raises(OmniPrefixCacheRowError, match="'B'"):
        engine.take(engine.step(new=[("B", [0, 1], 4, 1)]), "B")


# ----------------------------------------------------------------------------------------------------------- E42


@DEFERRED
@pytest.mark.parametrize("running", [True, False], ids=["at once", "one after the other"])
def test_E42_equal_tokens_in_different_blocks_are_different_rows(running: bool, deferred: bool) -> None:
    """Two prompts of equal token ids and different conditioning have different blocks: each hit reads its own block."""
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("blue", [0], 0, 4)], base={"blue": 100}, mm=K), "blue")
    gone = [] if running else ["blue"]
    engine.take(engine.step(new=[("red", [1], 0, 4)], finished=gone, base={"red": 200}, mm=K), "red")
    new = [("blue again", [0, 2], 4, 1), ("red again", [1, 3], 4, 1)]
    output = engine.schedule(new=new, base={"blue again": 100, "red again": 200})
    for request in output.scheduled_new_reqs:
        request.prompt_token_ids = [1] * 5
    engine.cache.new_step_starts(output)
    engine.update(output)
    outs = engine.take(engine.save(mm=K), "red again", "blue again")
    for req_id, base in (("blue again", 100), ("red again", 200)):
        assert column((outs.hidden_states or {})[req_id]) == list(range(base, base + 5))
        assert column(outs.mm_outputs["k"][req_id]) == list(range(base, base + 5))


@DEFERRED
def test_E42_an_equal_digest_hits_and_another_one_recomputes(deferred: bool) -> None:
    """The engine says which: a request told of no hit has its own rows, one told of a hit those of the block."""
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("A", [0], 0, 4)], base={"A": 100}, mm=K), "A")
    new = [("same", [0, 2], 4, 1), ("other", [3], 0, 5 - 1)]
    outs = engine.take(engine.step(new=new, base={"same": 100, "other": 200}, mm=K), "same", "other")
    assert column((outs.hidden_states or {})["same"]) == list(range(100, 105))
    assert column((outs.hidden_states or {})["other"]) == list(range(200, 204))


# ----------------------------------------------------------------------------------------------------------- E43


@pytest.mark.parametrize(("block_size", "unit"), [(4, 2), (4, 1), (16, 8), (16, 4), (16, 32)], ids=str)
def test_E43_hits_inside_a_block_are_refused_at_set_up(block_size: int, unit: int) -> None:
    """Prefixes that match in another unit than whole blocks are refused, naming both sizes and the setting."""
    with pytest.raises(OmniPrefixCacheConfigError, match=rf"every {unit} tokens.* has {block_size}.*prefix_match_unit"):
        gate(block_size=block_size, prefix_match_unit=unit)
    assert gate(block_size=block_size, prefix_match_unit=block_size) is not None
    assert gate(block_size=block_size) is not None


@pytest.mark.parametrize("name", ["hash_block_size", "cache_hit_alignment_tokens"])
def test_E43_what_the_engine_made_of_the_unit_counts_too(name: str) -> None:
    """The unit is looked for in what the engine derived from the setting as well."""
    with pytest.raises(OmniPrefixCacheConfigError, match="every 2 tokens"):
        check_prefix_cache_kv_groups(kv_cache(4, **{name: 2}))
    check_prefix_cache_kv_groups(kv_cache(4, **{name: 4}))


# ----------------------------------------------------------------------------------------------------------- E44


@DEFERRED
def test_E44_counters_tell_what_happened(deferred: bool) -> None:
    """A computes 12, B hits 8 of 12, C is shorter than a block: asked 27 tokens, 8 hit, 8 rows of each key, one short.

    Two readings at once are equal: reading loses nothing.
    """
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("A", [0, 1, 2], 0, 12)], mm=K), "A")
    engine.take(engine.step(new=[("B", [0, 1, 3], 8, 4)], finished=["A"], mm=K), "B")
    engine.take(engine.step(new=[("C", [4], 0, 3)], finished=["B"], mm=K), "C")
    engine.cache.new_step_starts(engine.schedule(finished=["C", "never"]))
    seen = engine.cache.statistics()
    assert engine.cache.statistics() == seen
    assert (seen.requests_started, seen.requests_hit, seen.requests_below_block, seen.requests_finished) == (3, 1, 1, 3)
    assert (seen.tokens_asked, seen.tokens_hit) == (12 + 12 + 3, 8)
    assert seen.rows_hit == {HIDDEN_KEY: 8, "k": 8}
    assert seen.rows_saved == 12 + 4 + 3
    assert (seen.steps_saved, seen.steps_materialized, seen.steps_discarded) == (3, 3, 0)


@pytest.mark.parametrize("how", ["chunks", "continuations", "resumes"])
def test_E44_a_request_is_counted_once(how: str) -> None:
    """Chunks, continuations and returns after preemption are one request: its tokens are asked for once."""
    engine = Engine()
    for at in range(0, 8, 2):
        entry: dict[str, Any] = {"new": [("A", [0, 1], at, 2)]}
        if at and how == "chunks":
            entry = {"cached": [("A", 2)]}
        if at and how == "resumes":
            entry = {"resumed": [("A", [0, 1], at, 2)]}
        output = engine.schedule(**entry)
        for request in output.scheduled_new_reqs:
            request.prompt_token_ids = list(range(8))
        engine.cache.new_step_starts(output)
        engine.update(output)
        engine.take(engine.save(), "A")
    seen = engine.cache.statistics()
    assert (seen.requests_started, seen.requests_hit, seen.tokens_asked, seen.tokens_hit) == (1, 0, 8, 0)
    assert seen.requests_resumed == (0 if how == "chunks" else 3)
    assert sum(seen.rows_hit.values()) == 0


def test_E44_rows_that_nobody_was_handed_are_no_hits() -> None:
    """Hits of a discarded step, of a request that nobody asked for, and positions without rows are not counted."""
    engine = Engine(policy=ModelCachePolicy(token_keys=frozenset({"k"})))
    engine.take(engine.step(new=[("A", [0, 1], 0, 4)], mm=K), "A")
    engine.take(engine.step(cached=[("A", 4)]), "A")  # no k
    engine.cache.discard_step(engine.step(new=[("B", [0, 1, 2], 8, 1)], mm=K))
    engine.take(engine.step(new=[("C", [0, 1, 3], 8, 1)], mm=K))
    assert sum(engine.cache.statistics().rows_hit.values()) == 0
    engine.take(engine.step(new=[("D", [0, 1, 4], 8, 1)], mm=K), "D")
    assert engine.cache.statistics().rows_hit == {HIDDEN_KEY: 8, "k": 4}
    assert engine.cache.statistics().steps_discarded == 1


@pytest.mark.parametrize(
    "changes", [{"kv_role": "kv_both"}, {"prefix_match_unit": 2}, {"speculative_config": object()}]
)
def test_E44_a_stage_where_the_cache_cannot_act_is_told_so(changes: dict[str, Any]) -> None:
    """No silent no-op: where rows could be wrong the stage does not start, and the message names the way out."""
    with pytest.raises(OmniPrefixCacheConfigError, match="or set enable_prefix_caching to False for this stage"):
        gate(**changes)


# ----------------------------------------------------------------------------------------------------------- E45


@DEFERRED
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_E45_a_declared_key_with_too_few_rows_is_refused_by_name(rows: int, deferred: bool) -> None:
    """A key with rows for some of the 4 tokens only is named by the error; tables untouched; the step can be saved."""
    engine = Engine(policy=policy(deferred))
    engine.start(new=[("A", [0], 0, 4)])
    before = engine.settled()
    with pytest.raises(OmniPrefixCacheContractError, match=rf"key 'k' is declared per token.* has {rows} rows for 4"):
        engine.save(mm={"first": filled(range(4), 1), "k": filled(range(rows), 1)})
    assert engine.cache.inspect() == before
    assert engine.mm(engine.save(mm=K), "k", "A") == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", [1, 3, 5, 9])
def test_E45_an_undeclared_key_with_too_few_rows_is_left_out_of_the_cache(rows: int) -> None:
    """An undeclared key that falls short loses its standing: handed over whole, never mixed with cached rows."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=K), "A")
    short = filled(range(50, 50 + rows), 1)
    outs = engine.take(engine.step(new=[("B", [0, 1], 4, 4)], mm={"k": short}), "B")
    assert torch.equal(outs.mm_outputs["k"]["B"], short)
    assert "k" not in outs.mm_spans
    outs = engine.take(engine.step(new=[("C", [0, 1, 2], 8, 1)], mm={}), "C")
    assert column((outs.hidden_states or {})["C"]) == list(range(9))
    assert "k" not in outs.mm_outputs


# ----------------------------------------------------------------------------------------------------------- E46


@DEFERRED
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
def test_E46_a_model_that_needs_the_tail_only_has_its_codes_cached(finished: bool, deferred: bool) -> None:
    """No hidden output at all for the model that opted out; B's codes are A's, position for position, and its own.

    Rows 0..3 of A are placeholders: they come back as the placeholders that they are, at their positions.
    """
    engine = Engine(policy=policy(deferred, needs_full_hidden_states=False))
    final = [-1, -1, -1, -1, 4, 5, 6, 7]
    outs = engine.take(engine.step(new=[("A", [0, 1], 0, 8)], hidden=None, mm={"k": filled(final, 2)}), "A")
    assert outs.hidden_states is None
    step = engine.step(new=[("B", [0, 1, 2], 8, 1)], finished=["A"] if finished else [], mm={"k": per_token(2)})
    outs = engine.take(step, "B")
    assert outs.hidden_states is None
    assert column(outs.mm_outputs["k"]["B"]) == [*final, 8]
    assert outs.mm_spans["k"]["B"] == (0, 9)
    assert HIDDEN_KEY not in engine.cache.footprint().pool_bytes


@DEFERRED
def test_E46_later_rows_of_a_slot_replace_placeholders_and_not_the_other_way(deferred: bool) -> None:
    """Codes written as placeholders and computed again once valid: a hit reads the valid ones, whatever lands last."""
    engine = Engine(policy=policy(deferred, needs_full_hidden_states=False))
    first = engine.step(new=[("A", [0], 0, 4)], hidden=None, mm={"k": filled([-1] * 4, 1)})
    second = engine.step(resumed=[("A", [0], 0, 4)], hidden=None, mm=K)
    assert engine.mm(second, "k", "A") == [0, 1, 2, 3]
    assert engine.mm(first, "k", "A") == [-1] * 4
    step = engine.step(new=[("B", [0, 1], 4, 1)], finished=["A"], hidden=None, mm=K)
    assert engine.mm(step, "k", "B") == list(range(5))


# ----------------------------------------------------------------------------------------------------------- E48


@DEFERRED
@pytest.mark.parametrize(
    ("hit", "chunks"),
    [
        (0, [16, 16, 5]),
        (32, [5]),
        (32, [1, 1, 1, 1, 1]),
        (0, [16, 16, 4, 1]),
        (0, [1, 16, 16, 4]),
        (16, [16, 4, 1]),
        (32, [4, 1]),
        (0, [36, 1]),
    ],
    ids=str,
)
def test_E48_chunk_boundaries_of_a_prefill_lose_nothing(hit: int, chunks: list[int], deferred: bool) -> None:
    """Prompt of 37 in blocks of 16, cold, hit and in chunks down to one token: the deliveries concatenate to 0..36."""
    engine = Engine(num_blocks=16, block_size=16, policy=policy(deferred))
    table = [7, 3, 5]
    if hit:
        engine.take(engine.step(new=[("cold", [*table[: hit // 16], 8], 0, hit + 5)], mm=K), "cold")
    rows: list[int] = []
    codes: list[int] = []
    for i, count in enumerate(chunks):
        entry: dict[str, Any] = {"cached": [("P", count)]} if i else {"new": [("P", table, hit, count)]}
        outs = engine.take(engine.step(**entry, mm=K), "P")
        assert outs.spans["P"][0] == len(rows)
        rows += column((outs.hidden_states or {})["P"])
        codes += column(outs.mm_outputs["k"]["P"])
        assert outs.spans["P"][1] == len(rows)
    assert rows == codes == list(range(37))
