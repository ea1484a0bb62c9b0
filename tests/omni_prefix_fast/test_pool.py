"""The pool: what fits under a key, and gathers against a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_prefix_fast import OmniPrefixCacheContractError, PrefixBlockPool, PrefixCacheConfig
from omni_prefix_fast.pool import ROW_DTYPES, RowSpec, indexable

SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.float32, torch.float64]
FEATURES = [(), (1,), (3,), (2, 3), (2, 1, 2)]
BY_NAME = sorted(ROW_DTYPES, key=str)


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """By hand: which types hold every value of which."""
    table = {
        **{t: set(SIGNED[: SIGNED.index(t) + 1]) | ({torch.uint8} if t != torch.int8 else set()) for t in SIGNED},
        torch.float16: {torch.float16},
        torch.bfloat16: {torch.bfloat16},
        torch.float32: {torch.float16, torch.bfloat16, torch.float32},
        torch.float64: {torch.float16, torch.bfloat16, torch.float32, torch.float64},
        torch.complex128: {torch.complex64, torch.complex128},
    }
    return narrow in table.get(wide, {wide})


COMMON = [*SIGNED, torch.uint8, *FLOATS, torch.bfloat16, torch.bool, torch.complex64, torch.complex128]


@pytest.mark.parametrize("wide", COMMON, ids=str)
@pytest.mark.parametrize("narrow", COMMON, ids=str)
def test_acceptance_of_types(wide: torch.dtype, narrow: torch.dtype) -> None:
    """A key takes rows of its own type, and of one whose every value its type holds; never another kind of number."""
    assert RowSpec(wide, (3,)).accepts(RowSpec(narrow, (3,))) == holds(wide, narrow)


@pytest.mark.parametrize("dtype", BY_NAME, ids=str)
def test_every_type_accepts_itself_only_at_the_same_feature(dtype: torch.dtype) -> None:
    """The feature shape never changes, whatever the type."""
    for feature in FEATURES:
        assert RowSpec(dtype, feature).accepts(RowSpec(dtype, feature))
    assert not RowSpec(dtype, (3,)).accepts(RowSpec(dtype, (4,)))
    assert not RowSpec(dtype, (3,)).accepts(RowSpec(dtype, (3, 1)))
    assert not RowSpec(dtype, ()).accepts(RowSpec(dtype, (1,)))


def make_pool(num_blocks: int = 4, block_size: int = 4) -> PrefixBlockPool:
    """An empty pool."""
    return PrefixBlockPool(PrefixCacheConfig(num_blocks=num_blocks, block_size=block_size))


@pytest.mark.parametrize("dtype", BY_NAME, ids=str)
@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_rows_come_back_bit_for_bit(dtype: torch.dtype, feature: tuple[int, ...]) -> None:
    """Any bits of any type and feature rank survive a write and a gather, by block and row by row."""
    pool = make_pool()
    pool.open("k", RowSpec(dtype, feature))
    shape = (8, *feature)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(nbytes, dtype=torch.int64).remainder(251).to(torch.uint8)
    rows = (raw % 2).bool().reshape(shape) if dtype == torch.bool else raw.view(dtype).reshape(shape)
    pool.write("k", np.arange(4, 12), rows)
    for slots in (np.arange(4, 12), np.array([11, 4, 5])):
        out = torch.empty((len(slots), *feature), dtype=dtype)
        pool.gather("k", slots, out)
        assert torch.equal(bits(out), bits(rows)[slots - 4])


def bits(rows: torch.Tensor) -> torch.Tensor:
    """The rows' bytes, one row each."""
    return rows.contiguous().reshape(rows.shape[0], -1).view(torch.uint8)


@given(st.data())
def test_gather_against_a_loop(data: st.DataObject) -> None:
    """Whatever the slots (whole blocks, parts of them, any order, repeated), a gather is one row after another."""
    block_size, num_blocks = data.draw(st.sampled_from([1, 2, 4])), 5
    pool = make_pool(num_blocks, block_size)
    pool.open("k", RowSpec(torch.float32, (2,)))
    num_slots = num_blocks * block_size
    content = torch.randn(num_slots, 2)
    order = np.array(data.draw(st.permutations(range(num_slots))))
    pool.write("k", order, content[order])
    whole = st.lists(st.integers(0, num_blocks - 1), max_size=6).map(
        lambda blocks: [b * block_size + i for b in blocks for i in range(block_size)]
    )
    slots = np.array(data.draw(whole | st.lists(st.integers(0, num_slots - 1), max_size=12)), dtype=np.int64)
    out = torch.full((len(slots), 2), -1.0)
    pool.gather("k", slots, out)
    for row, slot in zip(out, slots.tolist(), strict=True):
        assert torch.equal(row, content[slot])


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), min_size=1, max_size=8))
def test_known_blocks_are_gathered_in_order(runs: list[tuple[int, int]]) -> None:
    """Blocks that the caller knows, in long runs of neighbours, short ones and repeated: row after row."""
    blocks = np.array([b for first, length in runs for b in range(first, min(first + length, 12))], dtype=np.int64)
    pool = make_pool(12, 2)
    pool.open("k", RowSpec(torch.int32, (3,)))
    pool.write("k", np.arange(24), torch.arange(72, dtype=torch.int32).reshape(24, 3))
    slots = (blocks[:, None] * 2 + np.arange(2)).reshape(-1)
    out = torch.full((len(slots), 3), -1, dtype=torch.int32)
    pool.gather("k", slots, out, None, blocks)
    assert out[:, 0].tolist() == [3 * slot for slot in slots.tolist()]


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(9, 3), True),
        (torch.zeros(2, 3, dtype=torch.float16), False),
        (torch.zeros(2, 4), False),
        (torch.zeros(2), False),
    ],
    ids=str,
)
def test_rows_of_exactly_the_kind_of_a_key(rows: torch.Tensor, taken: bool) -> None:
    """Only the type and feature of an open key need no look; a narrower type, though accepted, does."""
    pool = make_pool()
    assert not pool.takes("k", rows)
    pool.open("k", RowSpec(torch.float32, (3,)))
    assert pool.takes("k", rows) == taken


def test_write_touches_its_slots_only() -> None:
    """Rows of other slots and of other keys stay."""
    pool = make_pool()
    for key in ("a", "b"):
        pool.open(key, RowSpec(torch.int32, (1,)))
    pool.write("a", np.array([5, 2]), torch.tensor([[50], [20]], dtype=torch.int32))
    flat = pool.storage("a").reshape(16).tolist()
    assert {slot: value for slot, value in enumerate(flat) if value} == {5: 50, 2: 20}
    assert not pool.storage("b").any()


def test_new_key_is_zero_and_opening_twice_keeps_rows() -> None:
    """A key is zeroed when it is opened, once."""
    pool = make_pool()
    spec = RowSpec(torch.float32, (3,))
    pool.open("k", spec)
    assert pool.storage("k").shape == (4, 4, 3)
    assert not pool.storage("k").any()
    pool.write("k", np.array([1]), torch.ones(1, 3))
    pool.open("k", RowSpec(torch.float16, (3,)))
    assert pool.spec("k") == spec
    assert pool.storage("k").sum() == 3
    assert pool.keys() == ("k",)
    assert pool.nbytes() == {"k": 16 * 3 * 4}


@pytest.mark.parametrize(
    "spec",
    [
        RowSpec(torch.float32, (4,)),
        RowSpec(torch.float64, (3,)),
        RowSpec(torch.int32, (3,)),
        RowSpec(torch.float32, ()),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_are_refused_by_name(spec: RowSpec) -> None:
    """Another width or a type that would lose values is refused, naming the key, both specs and what to do."""
    pool = make_pool()
    pool.open("codes", RowSpec(torch.float32, (3,)))
    with pytest.raises(
        OmniPrefixCacheContractError, match=r"'codes'.*float32 \(3,\).*another name.*request_keys"
    ) as told:
        pool.check("codes", spec)
    assert f"{spec.dtype} {spec.feature}" in str(told.value)
    with pytest.raises(OmniPrefixCacheContractError, match="'codes'"):
        pool.open("codes", spec)
    assert pool.spec("codes") == RowSpec(torch.float32, (3,))


@pytest.mark.parametrize("dtype", [torch.quint8, torch.bits8, torch.complex32], ids=str)
def test_type_that_cannot_be_kept(dtype: torch.dtype) -> None:
    """Quantised and raw types are refused before anything is allocated, naming types that can be kept."""
    pool = make_pool()
    with pytest.raises(OmniPrefixCacheContractError, match=f"'k'.*{dtype}.*convert.*float32"):
        pool.open("k", RowSpec(dtype, (3,)))
    assert pool.keys() == ()


def test_row_bytes() -> None:
    """A row's bytes are its elements'; a rank-0 feature is one element, an empty one none."""
    assert RowSpec(torch.float16, (3, 2)).nbytes == 12
    assert RowSpec(torch.int64, ()).nbytes == 8
    assert RowSpec(torch.int64, (0,)).nbytes == 0
    assert RowSpec.of(torch.zeros(5, 2, 3)) == RowSpec(torch.float32, (2, 3))


def test_indexable_is_the_same_memory() -> None:
    """Types that torch cannot index are seen as integers in place; others are left alone."""
    rows = torch.zeros(2, 3, dtype=torch.uint16)
    indexable(rows)[1] = 7
    assert (rows[1].view(torch.int16) == 7).all()
    plain = torch.zeros(2, 3)
    assert indexable(plain) is plain
