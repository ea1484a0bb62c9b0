"""Block tables followed on the host, and slots read from them."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from omni_prefix_fast.errors import OmniPrefixCacheContractError
from omni_prefix_fast.vllm.views import HostBlockTables, ScheduledBatchView


def new(req_id: str, computed: int, blocks: list[int]) -> SimpleNamespace:
    """A request as the scheduler announces it."""
    return SimpleNamespace(req_id=req_id, num_computed_tokens=computed, block_ids=(blocks,))


def output(
    *started: Any,
    cached: dict[str, tuple[int, list[int] | None]] | None = None,
    resumed: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> SimpleNamespace:
    """A scheduler output: `cached` maps a running request to its computed tokens and new blocks."""
    running = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=list(started),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running),
            num_computed_tokens=[computed for computed, _ in running.values()],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks in running.values()],
            resumed_req_ids=set(resumed),
        ),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


def test_slots_follow_the_block_table() -> None:
    """Position p of a request lies at `table[p // block] * block + p % block`, request after request."""
    tables = HostBlockTables()
    tables.observe(output(new("a", 0, [5, 2]), new("b", 4, [7, 1])))
    assert tables.slots(["b", "a"], [2, 6], 4).tolist() == [4, 5, 20, 21, 22, 23, 8, 9]


def test_a_running_request_gets_blocks_appended_and_moves_on() -> None:
    """New blocks go behind the old ones; without new blocks only the position moves."""
    tables = HostBlockTables()
    tables.observe(output(new("a", 0, [3])))
    tables.observe(output(cached={"a": (4, [6])}))
    assert tables.blocks("a").tolist() == [3, 6]
    assert tables.slots(["a"], [1], 4).tolist() == [24]
    tables.observe(output(cached={"a": (5, None)}))
    assert tables.slots(["a"], [1], 4).tolist() == [25]


def test_a_resumed_request_gets_a_new_table() -> None:
    """Through the cached requests its blocks replace the old ones, and so they do when it comes as a new one."""
    tables = HostBlockTables()
    tables.observe(output(new("a", 0, [3, 4])))
    tables.observe(output(cached={"a": (4, [8, 9])}, resumed=("a",)))
    assert tables.blocks("a").tolist() == [8, 9]
    tables.observe(output(preempted=("a",)))
    assert "a" not in tables
    tables.observe(output(new("a", 0, [1])))
    assert tables.blocks("a").tolist() == [1]


def test_an_id_used_again_in_the_step_that_finishes_it() -> None:
    """Finished ids are dropped before new ones are taken in."""
    tables = HostBlockTables()
    tables.observe(output(new("a", 0, [3])))
    tables.observe(output(new("a", 0, [4]), finished=("a",)))
    assert tables.blocks("a").tolist() == [4]


def test_more_requests_and_blocks_than_there_was_room_for() -> None:
    """The tables grow; nothing that was there changes, and what finishes leaves nothing behind."""
    rng = random.Random(3)
    tables = HostBlockTables(rows=1, blocks=1)
    want = {f"r{i}": [rng.randrange(1000) for _ in range(rng.randrange(1, 60))] for i in range(50)}
    for req_id, blocks in want.items():
        tables.observe(output(new(req_id, 0, blocks[:1])))
        tables.observe(output(cached={req_id: (1, blocks[1:])}))
    assert {r: tables.blocks(r).tolist() for r in want} == want
    tables.observe(output(finished=tuple(want)))
    assert len(tables) == 0


def test_what_makes_no_sense_is_refused() -> None:
    """Blocks for an unknown request, slots of one, and positions beyond the blocks are errors that name the request."""
    tables = HostBlockTables()
    with pytest.raises(OmniPrefixCacheContractError, match="never announced"):
        tables.observe(output(cached={"a": (1, [2])}))
    with pytest.raises(OmniPrefixCacheContractError, match="'a' has no block table"):
        tables.slots(["a"], [1], 4)
    tables.observe(output(new("a", 3, [2])))
    with pytest.raises(OmniPrefixCacheContractError, match="'a' computes 2 tokens from 3 on, which takes 2 blocks"):
        tables.slots(["a"], [2], 4)


def test_optional_fields_may_be_missing() -> None:
    """A scheduler output of an older engine, or a test's, need not have every field."""
    tables = HostBlockTables()
    tables.observe(SimpleNamespace())
    assert len(tables) == 0


def test_the_view_answers_for_the_shown_batch() -> None:
    """Order comes from the batch that was shown, slots from the tables."""
    tables = HostBlockTables()
    tables.observe(output(new("a", 0, [5]), new("b", 0, [7])))
    view = ScheduledBatchView(tables, 4)
    view.show(["b", "a"])
    assert view.batch_req_ids() == ["b", "a"]
    assert view.step_slots_cpu(["b", "a"], {"a": 1, "b": 2}).tolist() == [28, 29, 20]
