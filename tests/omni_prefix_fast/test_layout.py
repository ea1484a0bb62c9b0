"""Where the rows of a step belong: layouts and slots against a naive loop, and the tables that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_prefix_fast import FullAttentionGroupView, OmniPrefixCacheConfigError, OmniPrefixCacheContractError
from omni_prefix_fast.layout import StepLayout, check_block_layout, make_layout, table_slots

BLOCK_SIZE = 4
NUM_SLOTS = 64


@dataclass
class FixedView:
    """A batch whose slots are given."""

    order: Sequence[str]
    slots: Any

    def batch_req_ids(self) -> Sequence[str]:
        return self.order

    def step_slots_cpu(self, req_ids: Sequence[str], num_scheduled: Mapping[str, int]) -> torch.Tensor:  # noqa: ARG002
        slots: torch.Tensor = self.slots
        return slots


def lay_out(
    order: Sequence[str], counts: Mapping[str, int], starts: Mapping[str, int], slots: Any, block_size: int = BLOCK_SIZE
) -> StepLayout:
    """The layout of step 3."""
    view = FixedView(order, slots)
    return make_layout(3, view, counts, starts, block_size=block_size, num_slots=NUM_SLOTS)


def test_layout_of_a_mixed_step() -> None:
    """Requests stand in the batch's order, whatever the order of the schedule; idle ones are left out."""
    layout = lay_out(["B", "idle", "A"], {"A": 2, "B": 3}, {"A": 5, "B": 0}, torch.tensor([8, 9, 10, 17, 18]))
    assert layout.req_ids == ("B", "A")
    assert layout.index == {"B": 0, "A": 1}
    assert layout.counts == (3, 2)
    assert layout.offsets == (0, 3, 5)
    assert layout.starts == (0, 5)
    assert layout.ends == (3, 7)
    assert layout.num_tokens == 5
    assert layout.rows("A") == slice(3, 5)
    assert layout.slots.tolist() == [8, 9, 10, 17, 18]


def test_layout_of_nothing() -> None:
    """A step of zero tokens has a layout like any other."""
    layout = lay_out(["A"], {}, {}, torch.empty(0, dtype=torch.int64))
    assert (layout.req_ids, layout.offsets, layout.num_tokens) == ((), (0,), 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_slots_are_copied(dtype: torch.dtype) -> None:
    """The engine may overwrite its slot buffer as soon as the layout is made."""
    buffer = torch.tensor([0, 1], dtype=dtype)
    layout = lay_out(["A"], {"A": 2}, {"A": 0}, buffer)
    buffer.fill_(9)
    assert layout.slots.tolist() == [0, 1]
    assert layout.slots.dtype == np.int64


@pytest.mark.parametrize(
    ("order", "counts", "slots", "words"),
    [
        ([], {"A": 2}, [0, 1], r"requests \['A'\] are not in the batch"),
        (["A", "A"], {"A": 2}, [0, 1], "lists a request twice"),
        (["A"], {"A": 2}, [0], "returned 1 slots for 2"),
        (["A"], {"A": 2}, [0, 1, 2], "returned 3 slots for 2"),
        (["A"], {"A": 2}, [-4, -3], "-4.*outside 0..63.*num_blocks or block_size"),
        (["A"], {"A": 2}, [64, 65], "65.*outside 0..63"),
        (["A"], {"A": 2}, [1, 2], "do not stand where.*block_size.*num_computed_tokens"),
        (["A"], {"A": 2}, [0, 2], "do not stand where"),
    ],
)
def test_batch_that_does_not_fit_the_schedule(
    order: list[str], counts: dict[str, int], slots: list[int], words: str
) -> None:
    """A missing or doubled request, and slots of a wrong number, range or place in their block, are refused."""
    with pytest.raises(OmniPrefixCacheContractError, match=f"step 3: .*{words}"):
        lay_out(order, counts, dict.fromkeys(counts, 0), torch.tensor(slots))


@pytest.mark.parametrize(
    "slots",
    [
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.5, 1.5]),
        torch.tensor([False, True]),
        torch.empty(2, dtype=torch.int64, device="meta"),
        torch.tensor([0, 1]).to_sparse(),
        np.array([0.0, 1.0]),
        ["a", "b"],
        None,
    ],
    ids=str,
)
def test_slots_that_are_no_whole_numbers(slots: Any) -> None:
    """Slots are never rounded: anything but whole numbers is refused, naming the call that told them."""
    with pytest.raises(OmniPrefixCacheContractError, match="step 3: step_slots_cpu returned"):
        lay_out(["A"], {"A": 2}, {"A": 0}, slots)


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[list[str], dict[str, int], dict[str, int]]]:
    """Steps one after another: (batch, tokens to compute, positions), mostly of the same requests going on."""
    steps: list[tuple[list[str], dict[str, int], dict[str, int]]] = []
    batch, counts, starts = ["A"], {"A": 1}, {"A": 0}
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            starts = {r: starts[r] + counts[r] for r in starts}
        else:
            batch = draw(st.permutations(["A", "B", "C", "D"]))[: draw(st.integers(1, 4))]
            scheduled = draw(st.lists(st.sampled_from(batch), min_size=1, unique=True))
            counts = {r: draw(st.integers(1, 3)) for r in scheduled}
            starts = {r: draw(st.integers(0, 9)) for r in scheduled}
        steps.append((list(batch), dict(counts), dict(starts)))
    return steps


@given(schedules())
def test_what_the_last_step_knew_changes_nothing(steps: list[tuple[list[str], dict[str, int], dict[str, int]]]) -> None:
    """A layout made beside the last step's is the one made without it, slots and all."""
    before: StepLayout | None = None
    for batch, counts, starts in steps:
        order = [r for r in batch if r in counts]
        # Each request has 16 slots of its own, so that its rows stand where its positions say.
        slots = [16 * "ABCD".index(r) + (starts[r] + i) % 16 for r in order for i in range(counts[r])]
        view = FixedView(batch, torch.tensor(slots))
        alone = lay_out(batch, counts, starts, view.slots)
        before = make_layout(3, view, counts, starts, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, before=before)
        for name in ("req_ids", "index", "counts", "offsets", "starts", "ends"):
            assert getattr(before, name) == getattr(alone, name)
        assert before.slots.tolist() == alone.slots.tolist() == slots
        assert before.reached is not None
        assert tuple(before.reached.tolist()) == before.ends


@pytest.mark.parametrize("computed", [-4, -(2**70), 2**70])
def test_positions_that_are_none(computed: int) -> None:
    """No span begins before the first token, and none beyond what a position can be."""
    with pytest.raises(OmniPrefixCacheContractError, match=f"step 3: num_computed_tokens .*{computed}.* no positions"):
        lay_out(["A"], {"A": 4}, {"A": computed}, torch.arange(4))


@pytest.mark.parametrize("slots", [[5], [1], [8]])
def test_slots_of_a_step_that_goes_on_are_looked_at(slots: list[int]) -> None:
    """Whatever is taken over from the last step, this step's slots are refused where they do not fit."""
    before = lay_out(["A"], {"A": 1}, {"A": 1}, torch.tensor([1]))
    view = FixedView(["A"], torch.tensor(slots))
    with pytest.raises(OmniPrefixCacheContractError, match="do not stand where"):
        make_layout(4, view, {"A": 1}, {"A": 2}, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, before=before)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], list[tuple[int, int, int]], int]:
    """A block table, (row, start, count) of some requests, and a block size."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    width = draw(st.integers(1, 6))
    num_rows = draw(st.integers(1, 5))
    table = np.array(
        draw(
            st.lists(st.lists(st.integers(0, 99), min_size=width, max_size=width), min_size=num_rows, max_size=num_rows)
        ),
        dtype=np.int32,
    )
    requests = []
    for row in draw(st.permutations(range(num_rows))):
        start = draw(st.integers(0, width * block_size))
        requests.append((row, start, draw(st.integers(0, width * block_size - start))))
    return table, requests, block_size


@given(batches())
def test_slots_against_a_loop(batch: tuple[np.ndarray[Any, Any], list[tuple[int, int, int]], int]) -> None:
    """The array work finds the slots that a loop over requests and positions finds."""
    table, requests, block_size = batch
    rows, starts, counts = (list(values) for values in zip(*requests, strict=True))
    slots = table_slots(table, np.array(rows), np.array(starts), counts, block_size)
    naive = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, start, count in requests
        for position in range(start, start + count)
    ]
    assert slots.dtype == torch.int64
    assert slots.tolist() == naive


def test_no_requests_have_no_slots() -> None:
    """An empty batch is fine."""
    none = np.empty(0, dtype=np.int64)
    assert table_slots(np.zeros((2, 2), dtype=np.int32), none, none, [], 4).shape == (0,)


def test_position_beyond_the_table() -> None:
    """A token past the last block of the table is refused, not wrapped."""
    with pytest.raises(OmniPrefixCacheContractError, match="position 8 lies beyond the block table of 2 blocks of 4"):
        table_slots(np.zeros((1, 2), dtype=np.int32), np.array([0]), np.array([7]), [2], 4)


def input_batch(**table: Any) -> SimpleNamespace:
    """A stand-in for the V1 runner's batch with two requests."""
    blocks = torch.tensor([[0, 0, 0], [5, 6, 7], [2, 3, 4]], dtype=torch.int32)
    block_table = SimpleNamespace(block_table=SimpleNamespace(cpu=blocks), **table)
    return SimpleNamespace(
        req_ids=["A", "B"],
        req_id_to_index={"A": 1, "B": 2},
        num_computed_tokens_cpu=np.array([0, 3, 8], dtype=np.int32),
        block_table=[block_table],
    )


def test_view_reads_the_host_block_table() -> None:
    """Slots come from `table[request, position // block_size]`, from the first computed position on."""
    view = FullAttentionGroupView(input_batch(block_size=4), 4)
    assert view.batch_req_ids() == ["A", "B"]
    assert view.step_slots_cpu(["A", "B"], {"A": 2, "B": 1}).tolist() == [23, 24, 16]
    assert view.step_slots_cpu(["B", "A"], {"A": 2, "B": 1}).tolist() == [16, 23, 24]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"block_size": 16}, "blocks of 16 tokens.*--block-size"),
        ({"kv_cache_block_size": 8}, "blocks of 8 tokens.*--block-size"),
        ({"blocks_per_kv_block": 2}, "2 kernel blocks.*--block-size.*enable_prefix_caching"),
        ({"use_hybrid_blocks": True}, "kernel blocks.*enable_prefix_caching"),
        ({"dcp_world_size": 2}, "decode_context_parallel_size=2.*set it to 1"),
    ],
)
def test_table_that_cannot_be_mirrored(table: dict[str, Any], words: str) -> None:
    """Split blocks, striped tokens and other block sizes are refused at set-up, naming what to set."""
    with pytest.raises(OmniPrefixCacheConfigError, match=words):
        FullAttentionGroupView(input_batch(**table), 4)


def test_plain_tables_pass() -> None:
    """Fields that say one, nothing or the right size are fine."""
    check_block_layout(SimpleNamespace(), 4)
    check_block_layout(
        SimpleNamespace(
            blocks_per_kv_block=1, use_hybrid_blocks=False, dcp_world_size=1, block_size=4, kv_cache_block_size=None
        ),
        4,
    )
