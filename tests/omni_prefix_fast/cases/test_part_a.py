"""Part A: which rows come back on a hit. Slots, the merge, and what counts as one row a token."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_prefix_fast import (
    HIDDEN_KEY,
    FullAttentionGroupView,
    ModelCachePolicy,
    OmniPrefixCacheConfigError,
    OmniPrefixCacheContractError,
)
from omni_prefix_fast.types import Occupancy
from tests.omni_prefix_fast.cases.stages import gate
from tests.omni_prefix_fast.harness import Admission, Engine, Running, column, filled, per_token

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]
ORDERS = list(permutations(["d", "h", "n"]))


def name(value: object) -> str:
    """A short id for a parameter."""
    return "".join(value) if isinstance(value, tuple) else str(value).removeprefix("torch.")


# ----------------------------------------------------------------------------------------------------------- E01


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_E01_a_hit_hands_over_the_whole_prompt(dtype: torch.dtype, finished: bool) -> None:
    """A computes 0..7; B hits those 8 and computes 8..11: A gets 8 rows and B 12, hidden states and mm key alike."""
    engine = Engine(dtype=dtype)
    mm = {"k": per_token(3, dtype=dtype, add=50)}
    first = engine.take(engine.step(new=[("A", [0, 1], 0, 8)], mm=mm), "A")
    assert first.hidden_states is not None
    assert column(first.hidden_states["A"]) == list(range(8))
    assert column(first.mm_outputs["k"]["A"]) == list(range(50, 58))
    step = engine.step(new=[("B", [0, 1, 2], 8, 4)], finished=["A"] if finished else [], mm=mm)
    second = engine.take(step, "B")
    assert second.hidden_states is not None
    assert second.hidden_states["B"].dtype == second.mm_outputs["k"]["B"].dtype == dtype
    assert column(second.hidden_states["B"]) == list(range(12))
    assert column(second.mm_outputs["k"]["B"]) == list(range(50, 62))
    assert second.spans == {"B": (0, 12)}


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
@pytest.mark.parametrize("tail", [1, 2, 5])
def test_E01_row_count_is_hit_plus_scheduled(block_size: int, blocks: int, tail: int) -> None:
    """For every block size, hit length and tail there are hit + scheduled rows, in order, and the span says so."""
    hit = blocks * block_size
    pages = -(-(hit + tail) // block_size)
    engine = Engine(num_blocks=16, block_size=block_size)
    engine.take(engine.step(new=[("A", [5, 4, 3, 6], 0, 4 * block_size)]), "A")
    table = [5, 4, 3, 6][:blocks] + list(range(7, 7 + pages - blocks))
    outs = engine.take(engine.step(new=[("B", table, hit, tail)], finished=["A"]), "B")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == list(range(hit + tail))
    assert outs.spans["B"] == (0, hit + tail)


# ----------------------------------------------------------------------------------------------------------- E02


def mixed_batch(order: tuple[str, ...], padded: int | None) -> tuple[Engine, int]:
    """One step: decode d at position 3 (base 40), h hits 8 and computes 8, 9, new n computes 0..2 (base 60)."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0, 1], 0, 8), ("d", [3], 0, 3)], base={"d": 40, "n": 60}), "A", "d")
    step = engine.step(
        new=[("h", [0, 1, 2], 8, 2), ("n", [4], 0, 3)],
        cached=[("d", 1)],
        finished=["A"],
        order=order,
        padded=padded,
        mm={"k": per_token(1, add=100)},
    )
    return engine, step


@pytest.mark.parametrize("padded", [None, 8, 16], ids=["unpadded", "pad8", "pad16"])
@pytest.mark.parametrize("asked", [("d", "h", "n"), ("n", "h", "d"), ("h",), ("n",), ("d", "n")], ids=name)
@pytest.mark.parametrize("order", ORDERS, ids=name)
def test_E02_each_request_gets_its_own_rows(order: tuple[str, ...], asked: tuple[str, ...], padded: int | None) -> None:
    """The batch is cut by computed tokens: whatever the order of rows, padding or question, nobody gets another's."""
    engine, step = mixed_batch(order, padded)
    right = {"d": [43], "h": [*range(8), 8, 9], "n": [60, 61, 62]}
    outs = engine.take(step, *asked)
    assert outs.hidden_states is not None
    assert {r: column(rows) for r, rows in outs.hidden_states.items()} == {r: right[r] for r in asked}
    assert outs.spans == {r: {"d": (3, 4), "h": (0, 10), "n": (0, 3)}[r] for r in asked}
    computed = {"d": [143], "h": [*[0] * 8, 108, 109], "n": [160, 161, 162]}  # A emitted no k: zeros where h hit
    assert {r: column(rows) for r, rows in outs.mm_outputs["k"].items()} == {r: computed[r] for r in asked}


# ----------------------------------------------------------------------------------------------------------- E03


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])
def test_E03_a_hit_is_not_the_writers_whole_prefix(finished: bool, deferred: bool) -> None:
    """B shares two blocks of A's three and diverges: it gets those and its own; each block keeps its own rows."""
    policy = ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()), token_keys=frozenset({"k"}))
    engine = Engine(policy=policy)
    mm = {"k": per_token(1)}
    engine.take(engine.step(new=[("A", [0, 1, 2], 0, 12)], mm=mm), "A")
    step = engine.step(
        new=[("B", [0, 1, 3], 8, 4)], finished=["A"] if finished else [], base={"B": 500, "D": 900}, mm=mm
    )
    outs = engine.take(step, "B")
    assert outs.hidden_states is not None
    own = [*range(8), *range(508, 512)]
    assert column(outs.hidden_states["B"]) == column(outs.mm_outputs["k"]["B"]) == own
    # A third request on each of the two third blocks; A finishes meanwhile, if it has not.
    step = engine.step(
        new=[("C", [0, 1, 2, 4], 12, 1), ("D", [0, 1, 3, 5], 12, 1)], finished=[] if finished else ["A"], mm=mm
    )
    outs = engine.take(step, "C", "D")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["C"]) == column(outs.mm_outputs["k"]["C"]) == [*range(12), 12]
    assert column(outs.hidden_states["D"]) == column(outs.mm_outputs["k"]["D"]) == [*own, 912]


# ----------------------------------------------------------------------------------------------------------- E04


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])
@pytest.mark.parametrize("feature", [(4,), (64,), (8, 8)], ids=str)
def test_E04_no_key_is_too_big_to_be_cached(deferred: bool, feature: tuple[int, ...]) -> None:
    """With every byte bound far below the key's pool, even below one row, its cached rows still come back on a hit."""
    policy = ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()))
    engine = Engine(policy=policy, gpu_staging_bytes=100, copy_chunk_bytes=1)
    mm = {"k": per_token(*feature, add=7)}
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=mm), "A")
    outs = engine.take(engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"], mm=mm), "B")
    assert outs.mm_outputs["k"]["B"].shape == (6, *feature)
    assert column(outs.mm_outputs["k"]["B"]) == list(range(7, 13))


# ----------------------------------------------------------------------------------------------------------- E06


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])
@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("hit", range(1, 12))
def test_E06_no_row_of_a_partial_block_is_dropped(hit: int, block_size: int, deferred: bool) -> None:
    """A hit that ends inside a block hands over every row up to there, although the slots behind are another's."""
    blocks = list(range(-(-12 // block_size)))
    policy = ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()), token_keys=frozenset({"k"}))
    engine = Engine(num_blocks=12, block_size=block_size, policy=policy)
    mm = {"k": per_token(1)}
    engine.take(engine.step(new=[("old", blocks, 0, 12)], base={"old": 90}, mm=mm), "old")
    engine.take(engine.step(new=[("A", blocks, 0, hit)], finished=["old"], mm=mm), "A")
    outs = engine.take(engine.step(new=[("B", blocks, hit, 12 - hit)], finished=["A"], mm=mm), "B")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == column(outs.mm_outputs["k"]["B"]) == list(range(12))


def test_E06_five_long_requests_in_chunks_of_64() -> None:
    """Blocks of 16, five identical requests of 206 tokens in chunks of 64, 200 hit by the later ones: no tail lost."""
    engine = Engine(num_blocks=80, block_size=16)
    shared = list(range(13))
    for start in range(0, 206, 64):
        count = min(64, 206 - start)
        if start:
            engine.take(engine.step(cached=[("r0", count)]), "r0")
        else:
            engine.take(engine.step(new=[("r0", shared, 0, count)]), "r0")
    for i in range(1, 5):  # each copies the last, partly filled block into one of its own
        own = [*shared[:12], 12 + i]
        engine.take(engine.step(new=[("fill", own, 192, 8)]), "fill")
        assert engine.hidden(engine.step(new=[(f"r{i}", own, 200, 6)], finished=["fill"]), f"r{i}") == list(range(206))


# ----------------------------------------------------------------------------------------------------------- E07

REFERENCE = filled([71, 72, 73, 74], 2)


def test_E07_a_declared_reference_is_whole_at_every_step() -> None:
    """A reference of 4 rows is handed over whole, whether the step has 4 tokens or 2, to one request or to two."""
    engine = Engine(policy=ModelCachePolicy(request_keys=frozenset({"codes.ref"})))
    steps: list[tuple[list[Admission], list[Running]]] = [
        ([("A", [0], 0, 4)], []),
        ([], [("A", 2, [1])]),
        ([("B", [2], 0, 2), ("C", [3], 0, 2)], []),
        ([("D", [0, 4], 4, 4)], []),
    ]
    for new, cached in steps:
        step = engine.step(new=new, cached=cached, mm={"codes.ref": REFERENCE.clone()})
        requests = [part.req_id for part in engine.parts]
        outs = engine.take(step, *requests)
        for req_id in requests:
            assert torch.equal(outs.mm_outputs["codes.ref"][req_id], REFERENCE)
    assert set(engine.cache.footprint().pool_bytes) == {HIDDEN_KEY}


def test_E07_an_undeclared_reference_is_not_a_key_for_good() -> None:
    """Four rows at a step of four tokens look per token; at the next step they cannot be, and stay whole from then."""
    engine = Engine()
    mm = {"codes.ref": REFERENCE}
    outs = engine.take(engine.step(new=[("A", [0], 0, 4)], mm=mm), "A")
    assert torch.equal(outs.mm_outputs["codes.ref"]["A"], REFERENCE)
    outs = engine.take(engine.step(cached=[("A", 2, [1])], mm=mm), "A")
    assert torch.equal(outs.mm_outputs["codes.ref"]["A"], REFERENCE)
    assert "codes.ref" not in engine.cache.inspect().occupancy
    outs = engine.take(engine.step(new=[("B", [2], 0, 2), ("C", [3], 0, 2)], mm=mm), "B", "C")
    assert all(torch.equal(outs.mm_outputs["codes.ref"][r], REFERENCE) for r in "BC")
    outs = engine.take(engine.step(new=[("D", [0, 4], 4, 4)], mm=mm), "D")  # a hit on the blocks of the first sight
    assert torch.equal(outs.mm_outputs["codes.ref"]["D"], REFERENCE)
    assert engine.cache.statistics().keys_demoted == 1


@pytest.mark.parametrize("requests", [1, 5])
def test_E07_a_reference_as_long_as_the_padded_batch_is_whole(requests: int) -> None:
    """5 tokens padded to 16 and a declared reference of 16 rows: everybody gets (16, 2), a later hit too."""
    reference = filled(range(16), 2)
    new = [(f"r{i}", [i, i + 5], 0, 5 // requests) for i in range(requests)]
    engine = Engine(policy=ModelCachePolicy(request_keys=frozenset({"codes.ref"})), num_blocks=16)
    outs = engine.take(engine.step(new=new, padded=16, mm={"codes.ref": reference}), *(r for r, *_ in new))
    assert all(torch.equal(outs.mm_outputs["codes.ref"][r], reference) for r, *_ in new)
    hit = 4 if requests == 1 else 1
    outs = engine.take(engine.step(new=[("h", [0, 12, 13], hit, 5)], padded=16, mm={"codes.ref": reference}), "h")
    assert torch.equal(outs.mm_outputs["codes.ref"]["h"], reference)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=name)
def test_E07_one_number_a_token_is_no_feature_row(dtype: torch.dtype) -> None:
    """A 1-D tensor as long as the step opens no key: a later hit gets this step's entries only."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"lengths": torch.arange(4, dtype=dtype)}), "A")
    outs = engine.take(engine.step(new=[("B", [0, 1], 4, 4)], mm={"lengths": torch.arange(4, 8, dtype=dtype)}), "B")
    assert outs.mm_outputs["lengths"]["B"].tolist() == [4, 5, 6, 7]
    assert set(engine.cache.inspect().occupancy) == set(engine.cache.footprint().pool_bytes) == {HIDDEN_KEY}


@pytest.mark.parametrize("counts", [(1, 1), (3, 2)], ids=str)
def test_E07_one_length_a_request_is_never_cached_by_slot(counts: tuple[int, int]) -> None:
    """Two requests and lengths [7, 8], with as many tokens as requests or more: leftovers, handed out, never pooled."""
    engine = Engine(policy=ModelCachePolicy(request_list_keys=frozenset({"each"})))
    new = [("a", [0], 0, counts[0]), ("b", [1], 0, counts[1])]
    mm = {"lengths": torch.tensor([7, 8]), "each": [torch.tensor([7]), torch.tensor([8])]}
    outs = engine.take(engine.step(new=new, mm=mm), "a", "b")
    assert [outs.mm_outputs["each"][r].tolist() for r in "ab"] == [[7], [8]]
    assert set(engine.cache.footprint().pool_bytes) == {HIDDEN_KEY}


# ----------------------------------------------------------------------------------------------------------- E08


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")], ids=name)
def test_E08_nobody_gets_the_whole_batch(order: tuple[str, ...]) -> None:
    """2 tokens of a and 3 of b: each gets its rows of t, and its own element of a list declared one a request."""
    engine = Engine(policy=ModelCachePolicy(request_list_keys=frozenset({"refs"})))
    new = [("a", [0], 0, 2), ("b", [1], 0, 3)]
    refs = {"a": torch.full((8,), 8.0), "b": torch.full((12,), 12.0)}
    step = engine.step(new=new, order=order, base={"b": 100}, mm={"t": per_token(2), "refs": [refs[r] for r in order]})
    outs = engine.take(step, "a", "b")
    assert {r: column(outs.mm_outputs["t"][r]) for r in "ab"} == {"a": [0, 1], "b": [100, 101, 102]}
    for req_id in "ab":
        assert torch.equal(outs.mm_outputs["refs"][req_id], refs[req_id])


@pytest.mark.parametrize("asked", [("a",), ("b",), ("b", "a")], ids=name)
def test_E08_one_row_a_token_is_cut_in_nested_leftovers_too(asked: tuple[str, ...]) -> None:
    """Inside a dictionary, tensors with one entry a token are cut to each request; the others stay whole, unshared."""
    engine = Engine()
    nested = {"codes": {"per_token": torch.arange(5), "bos": torch.full((3,), 9)}}
    outs = engine.take(engine.step(new=[("a", [0], 0, 2), ("b", [1], 0, 3)], mm=nested), *asked)
    right = {"a": [0, 1], "b": [2, 3, 4]}
    assert {r: v["per_token"].tolist() for r, v in outs.mm_outputs["codes"].items()} == {r: right[r] for r in asked}
    storages = {v["bos"].untyped_storage().data_ptr() for v in outs.mm_outputs["codes"].values()}
    assert len(storages) == len(asked)


# ----------------------------------------------------------------------------------------------------------- E10


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_E10_context_parallel_is_refused_at_start_up(world: int, kind: str) -> None:
    """Ranks that stripe one request's tokens are refused before the first step, with the setting and its value."""
    setting = f"{kind}_context_parallel_size"
    with pytest.raises(OmniPrefixCacheConfigError, match=rf"{setting} is {world}.*Set {setting} to 1"):
        gate(parallel_config=SimpleNamespace(**{setting: world}))
    assert gate(parallel_config=SimpleNamespace(**{setting: 1})) is not None


def test_E10_a_striped_block_table_is_refused_by_the_view() -> None:
    """Whoever builds the view on a block table of a striped engine is refused too, should the gate be left out."""
    table = SimpleNamespace(dcp_world_size=2, block_size=4)
    with pytest.raises(OmniPrefixCacheConfigError, match="decode_context_parallel_size=2"):
        FullAttentionGroupView(SimpleNamespace(block_table=[table]), 4)


# ----------------------------------------------------------------------------------------------------------- E11

WIDENED = [
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.int64, torch.int32),
    (torch.int32, torch.uint8),
]
MISFITS: list[tuple[torch.dtype, torch.dtype, tuple[int, ...]]] = [
    (torch.float32, torch.int64, (2,)),
    (torch.float32, torch.float32, (3,)),
    (torch.float32, torch.float32, (1,)),
    (torch.float32, torch.float32, (2, 1)),
    (torch.float32, torch.float64, (2,)),
    (torch.float16, torch.bfloat16, (2,)),
    (torch.int64, torch.float32, (2,)),
    (torch.int32, torch.int64, (2,)),
    (torch.int64, torch.bool, (2,)),
]


def typed_engine(key: str, deferred: bool, dtype: torch.dtype) -> Engine:
    """A[0] computed 0..3 with rows of `key` of that type, width 2, and finished or not."""
    policy = ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()))
    engine = Engine(policy=policy, dtype=dtype if key == HIDDEN_KEY else torch.float32)
    mm: dict[str, Any] = {} if key == HIDDEN_KEY else {"k": per_token(2, dtype=dtype)}
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=mm), "A")
    return engine


@pytest.mark.parametrize(("key", "deferred"), [(HIDDEN_KEY, False), ("k", False), ("k", True)])
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "running"])
@pytest.mark.parametrize(("wide", "narrow"), WIDENED, ids=name)
def test_E11_a_narrower_type_is_kept_exactly(
    key: str, deferred: bool, finished: bool, wide: torch.dtype, narrow: torch.dtype
) -> None:
    """New rows of a type that the key's own type holds are handed over in the key's type, every value preserved."""
    engine = typed_engine(key, deferred, wide)
    engine.dtype = narrow if key == HIDDEN_KEY else torch.float32
    mm: dict[str, Any] = {} if key == HIDDEN_KEY else {"k": per_token(2, dtype=narrow)}
    outs = engine.take(engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"] if finished else [], mm=mm), "B")
    rows = (outs.hidden_states or {})["B"] if key == HIDDEN_KEY else outs.mm_outputs["k"]["B"]
    assert rows.dtype == wide
    assert column(rows) == list(range(6))
    outs = engine.take(engine.step(new=[("C", [0, 1], 6, 1)], finished=["B"], mm=mm), "C")  # and B's own, cached
    rows = (outs.hidden_states or {})["C"] if key == HIDDEN_KEY else outs.mm_outputs["k"]["C"]
    assert column(rows) == list(range(7))


@pytest.mark.parametrize(("key", "deferred"), [(HIDDEN_KEY, False), ("k", False), ("k", True)])
@pytest.mark.parametrize(("first", "then", "feature"), MISFITS, ids=str)
def test_E11_a_type_or_width_that_does_not_fit_is_refused_by_name(
    key: str, deferred: bool, first: torch.dtype, then: torch.dtype, feature: tuple[int, ...]
) -> None:
    """The error names the key; no table, page or byte has changed; the same step with right rows then works."""
    engine = typed_engine(key, deferred, first)
    engine.start(new=[("B", [0, 1], 4, 2)], finished=["A"], base={"B": 10})
    before, footprint = engine.settled(), engine.cache.footprint()
    wrong = engine.rows(*feature, dtype=then)
    save: dict[str, Any] = {"hidden": wrong} if key == HIDDEN_KEY else {"mm": {"k": wrong, "other": per_token(1)}}
    with pytest.raises(OmniPrefixCacheContractError, match=key):
        engine.save(**save)
    assert engine.settled() == before
    assert engine.cache.footprint() == footprint
    step = engine.save(mm={} if key == HIDDEN_KEY else {"k": per_token(2, dtype=first)})
    outs = engine.take(step, "B")
    rows = (outs.hidden_states or {})["B"] if key == HIDDEN_KEY else outs.mm_outputs["k"]["B"]
    assert rows.dtype == first
    assert column(rows) == [0, 1, 2, 3, 14, 15]


# ----------------------------------------------------------------------------------------------------------- E12


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])
@pytest.mark.parametrize("recycled", [True, False], ids=["recycled block", "fresh block"])
@pytest.mark.parametrize("emits", [True, False], ids=["B emits k", "B does not"])
def test_E12_holes_are_zeros_whatever_ran_before(deferred: bool, recycled: bool, emits: bool) -> None:
    """Every page and an older tenant's rows say 99; B hits positions without rows of k: zeros or nothing, never 99."""
    policy = ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()), token_keys=frozenset({"k"}))
    engine = Engine(policy=policy, staging_depth=2, staging_capacity_tokens=16)
    for _ in range(2 * engine.config.staging_depth):  # every page, every row of it
        blocks = [0, 2, 3, 4] if recycled else [2, 3, 4, 5]
        nines: dict[str, Any] = {"hidden": torch.full((16, 2), 99.0), "mm": {"k": torch.full((16, 1), 99.0)}}
        step = engine.step(new=[("X", blocks, 0, 16)], finished=["X"], **nines)
        engine.cache.discard_step(step)
    engine.take(engine.step(new=[("A", [0], 0, 4)], finished=["X"]), "A")  # no k
    step = engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"], mm={"k": per_token(1)} if emits else {})
    outs = engine.take(step, "B")
    assert column((outs.hidden_states or {})["B"]) == list(range(6))
    if emits:
        assert column(outs.mm_outputs["k"]["B"]) == [0, 0, 0, 0, 4, 5]
    else:
        assert "k" not in outs.mm_outputs


@pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])
@pytest.mark.parametrize("holes", [(0,), (3,), (1, 2), (0, 1, 2)], ids=str)
def test_E12_some_holes_inside_a_span(holes: tuple[int, ...], deferred: bool) -> None:
    """Blocks 0..3 hit, some of them without rows of k: zeros exactly there, the cached rows everywhere else."""
    policy = ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()), token_keys=frozenset({"k"}))
    engine = Engine(policy=policy)
    engine.take(engine.step(new=[("X", [0, 1, 2, 3], 0, 16)], base={"X": 900}, mm={"k": per_token(2)}), "X")
    for i in range(4):
        mm = {} if i in holes else {"k": per_token(2)}
        entry: dict[str, Any] = {"cached": [("A", 4)]} if i else {"new": [("A", [0, 1, 2, 3], 0, 4)]}
        engine.take(engine.step(**entry, finished=[] if i else ["X"], mm=mm), "A")
    outs = engine.take(engine.step(new=[("B", [0, 1, 2, 3, 4], 16, 1)], mm={"k": per_token(2)}), "B")
    assert column(outs.mm_outputs["k"]["B"]) == [0 if p // 4 in holes and p < 16 else p for p in range(17)]
    occupancy = engine.cache.inspect().occupancy["k"]
    assert [p for p in range(4) if occupancy[4 * p] is Occupancy.ABSENT] == list(holes)
