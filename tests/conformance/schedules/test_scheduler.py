"""The environment's scheduler: who is served, what `faithful` fixes, and what it leaves to chance."""

from __future__ import annotations

import random

import pytest

from conformance.schedules.blocks import Blocks
from conformance.schedules.scheduler import Chunk, Limits, Request, Scheduler


def _scheduler(num_blocks: int = 8, *, faithful: bool = True, max_tokens: int = 8, max_chunk: int = 8) -> Scheduler:
    blocks = Blocks(num_blocks, 2, None)
    return Scheduler(blocks, Limits(max_tokens, 4, max_chunk, 2, faithful=faithful), random.Random(0))


def _request(req: str, tokens: int, length: int | None = None, chunks: tuple[Chunk, ...] = ()) -> Request:
    return Request(req, (0, *range(10, 10 + tokens)), length or tokens, chunks)


def test_a_later_request_of_a_step_hits_what_an_earlier_one_computes() -> None:
    """A block is published when it is scheduled."""
    scheduler = _scheduler()
    scheduler.add(_request("a", 4, 8))
    scheduler.add(_request("b", 5))
    first, second = scheduler.schedule()
    assert (first.start, second.start) == (0, 4)
    assert second.blocks[:2] == first.blocks


def test_whoever_came_last_is_preempted_and_first_to_come_back() -> None:
    """It starts over, and in the step that preempted nobody is admitted."""
    scheduler = _scheduler(num_blocks=4)
    scheduler.add(_request("a", 4, 8))
    scheduler.add(Request("b", (1, 1, 2, 3, 4), 8))
    scheduler.forward_done(scheduler.schedule())
    scheduler.add(Request("c", (2, 1), 1))
    placed = scheduler.schedule()
    assert [part.request.req for part in placed] == ["a"]
    assert [request.req for request in scheduler.requests] == ["a", "b", "c"]
    assert (scheduler.requests[1].status, scheduler.requests[1].computed) == ("preempted", 0)


@pytest.mark.parametrize(("faithful", "served"), [(True, 0), (False, 1)])
def test_only_vllm_waits_until_all_tokens_of_a_request_fit(faithful: bool, served: int) -> None:
    """The environment is harder: it admits as soon as the first chunk fits."""
    scheduler = _scheduler(num_blocks=2, faithful=faithful, max_chunk=2)
    scheduler.add(_request("a", 5))
    assert len(scheduler.schedule()) == served


def test_a_streaming_request_keeps_its_blocks_and_goes_on_before_those_who_wait() -> None:
    """Its next chunk is computed behind what it holds."""
    scheduler = _scheduler(max_tokens=3)
    scheduler.add(_request("a", 3, chunks=(Chunk((1, 2), 0),)))
    scheduler.add(_request("b", 3))
    scheduler.forward_done(scheduler.schedule())
    placed = scheduler.schedule()
    assert [(part.request.req, part.kind, part.start, part.count) for part in placed] == [
        ("a", "continued", 3, 2),
        ("b", "new", 2, 1),
    ]


def test_a_request_that_was_aborted_while_computed_is_left_alone() -> None:
    """Its part of the step ends nothing a second time."""
    scheduler = _scheduler()
    request = _request("a", 3)
    scheduler.add(request)
    placed = scheduler.schedule()
    scheduler.remove(request)
    assert scheduler.forward_done(placed) == []
    assert len(scheduler.blocks.free_order) == 8
