"""`conformance.engine.scheduler`: vLLM's order of things, one rule a test."""

import pytest

from conformance.engine import BlockManager, Request, RequestStatus, Scheduler


def _scheduler(num_blocks: int = 16, block_size: int = 2, **settings: int) -> Scheduler:
    values = {"max_num_seqs": 8, "token_budget": 16} | settings
    return Scheduler(BlockManager(num_blocks, block_size), **values)  # type: ignore[arg-type]


def _add(scheduler: Scheduler, req_id: str, tokens: list[int], max_tokens: int = 4) -> Request:
    request = Request(req_id, list(tokens), len(tokens), max_tokens, scheduler.blocks.block_size)
    scheduler.add_request(request)
    return request


def _sample(scheduler: Scheduler, *req_ids: str) -> None:
    for req_id in req_ids:
        scheduler.requests[req_id].append_token(0)


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    """What does not fit in a step's budget is computed in the next."""
    scheduler = _scheduler(token_budget=4)
    _add(scheduler, "a", [1] * 10)
    counts = [scheduler.schedule().num_scheduled_tokens["a"] for _ in range(3)]
    assert counts == [4, 4, 2]


def test_running_requests_come_before_waiting_ones() -> None:
    """A running decode takes its token first; a new prompt gets the rest of the budget."""
    scheduler = _scheduler(token_budget=5)
    _add(scheduler, "a", [1, 2, 3])
    scheduler.schedule()
    _sample(scheduler, "a")
    _add(scheduler, "b", [5] * 9)
    sched = scheduler.schedule()
    assert sched.num_scheduled_tokens == {"a": 1, "b": 4}
    assert sched.scheduled_cached_reqs.req_ids == ["a"]
    assert [new.req_id for new in sched.scheduled_new_reqs] == ["b"]
    assert sched.total_num_scheduled_tokens == 5


def test_the_chunk_limit_holds_only_in_company() -> None:
    """A long prefill is limited if others wait, and takes the whole budget alone."""
    scheduler = _scheduler(chunk_limit=3)
    _add(scheduler, "a", [1] * 8)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 8}
    scheduler = _scheduler(chunk_limit=3)
    _add(scheduler, "a", [1] * 8)
    _add(scheduler, "b", [2] * 8)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 3, "b": 3}


def test_a_request_hits_blocks_that_another_computes_in_the_same_step() -> None:
    """Digests are published at schedule, so the second of two identical prompts hits the first's blocks at once."""
    scheduler = _scheduler()
    _add(scheduler, "a", [1, 2, 3, 4, 5])
    _add(scheduler, "b", [1, 2, 3, 4, 6])
    first, second = scheduler.schedule().scheduled_new_reqs
    assert first.num_computed_tokens == 0
    assert second.num_computed_tokens == 4
    assert second.block_ids[0][:2] == first.block_ids[0][:2]
    assert scheduler.stats.same_step_hits == 1


def test_a_same_step_hit_on_a_recycled_block_is_counted_apart() -> None:
    """The block of a same-step hit may have had an older tenant."""
    scheduler = _scheduler(num_blocks=5)
    _add(scheduler, "old", [9, 9, 9, 9], max_tokens=1)
    scheduler.schedule()
    scheduler.finish("old")
    _add(scheduler, "x", [8, 8, 8])
    _add(scheduler, "y", [8, 8, 7])
    scheduler.schedule()
    assert scheduler.stats.same_step_hits == 1
    assert scheduler.stats.recycled_same_step_hits == 0
    scheduler.finish("x")
    scheduler.finish("y")
    _add(scheduler, "p", [1, 2, 3])
    _add(scheduler, "q", [1, 2, 4])
    scheduler.schedule()
    assert scheduler.stats.recycled_same_step_hits == 1


def test_no_room_preempts_the_last_running_request() -> None:
    """It starts over at 0, waits in front, and nobody is admitted in that step."""
    scheduler = _scheduler(num_blocks=5)
    _add(scheduler, "a", [1, 2, 3, 4])
    last = _add(scheduler, "b", [5, 6, 7, 8])
    scheduler.schedule()
    _sample(scheduler, "a", "b")
    _add(scheduler, "c", [9])
    sched = scheduler.schedule()
    assert sched.preempted_req_ids == {"b"}
    assert sched.num_scheduled_tokens == {"a": 1}
    assert sched.scheduled_new_reqs == []
    assert last.num_computed == 0
    assert last.status is RequestStatus.PREEMPTED
    assert [request.req_id for request in scheduler.waiting] == ["b", "c"]


def test_a_request_without_room_may_preempt_itself() -> None:
    """If the last running request is the one that needs the block, it goes."""
    scheduler = _scheduler(num_blocks=5)
    _add(scheduler, "a", [1, 2, 3])
    _add(scheduler, "b", [5, 6, 7, 8])
    scheduler.schedule()
    _sample(scheduler, "a", "b")
    assert scheduler.schedule().preempted_req_ids == {"b"}


def test_a_resumed_request_is_matched_again() -> None:
    """Its table is replaced, and its hit may cover all that it had computed and more."""
    scheduler = _scheduler(num_blocks=5)
    _add(scheduler, "a", [1, 2, 3, 4])
    _add(scheduler, "b", [5, 6, 7, 8])
    scheduler.schedule()
    _sample(scheduler, "a", "b")
    scheduler.schedule()
    scheduler.finish("a")
    sched = scheduler.schedule()
    cached = sched.scheduled_cached_reqs
    assert cached.resumed_req_ids == {"b"}
    # Its second block was evicted for the request that went on; its first was not.
    assert cached.num_computed_tokens == [2]
    assert len(cached.new_block_ids[0][0]) == 3  # type: ignore[index]
    assert sched.num_scheduled_tokens == {"b": 3}
    assert scheduler.stats.resumed_hits == 1


def test_resumed_requests_can_come_as_new_ones() -> None:
    """The V2 model runner is told of a resumed request as of a new one."""
    blocks = BlockManager(5, 2)
    scheduler = Scheduler(blocks, max_num_seqs=8, token_budget=16, resumed_as_new=True)
    _add(scheduler, "a", [1, 2, 3, 4])
    _add(scheduler, "b", [5, 6, 7, 8])
    scheduler.schedule()
    _sample(scheduler, "a", "b")
    scheduler.schedule()
    scheduler.finish("a")
    sched = scheduler.schedule()
    assert [new.req_id for new in sched.scheduled_new_reqs] == ["b"]
    assert sched.scheduled_cached_reqs.resumed_req_ids == set()


def test_admission_needs_room_for_the_whole_request() -> None:
    """A first chunk that would fit is not enough."""
    scheduler = _scheduler(num_blocks=5, token_budget=4)
    _add(scheduler, "a", [1, 2, 3])
    _add(scheduler, "b", [5] * 6, max_tokens=1)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 3}


def test_finished_requests_are_reported_once_in_the_next_step() -> None:
    """By then their blocks may have a new tenant."""
    scheduler = _scheduler(num_blocks=4)
    _add(scheduler, "a", [1, 2, 3], max_tokens=1)
    assert scheduler.schedule().finished_req_ids == set()
    scheduler.finish("a")
    _add(scheduler, "b", [4, 5, 6, 7], max_tokens=1)
    sched = scheduler.schedule()
    assert sched.finished_req_ids == {"a"}
    assert set(sched.scheduled_new_reqs[0].block_ids[0]) & {1, 2}
    assert scheduler.schedule().finished_req_ids == set()


@pytest.mark.parametrize("scheduled_before", [False, True])
def test_an_abort_is_a_finish_at_any_moment(scheduled_before: bool) -> None:
    """A waiting request is aborted as well as a running one, and is reported all the same."""
    scheduler = _scheduler()
    request = _add(scheduler, "a", [1, 2, 3])
    if scheduled_before:
        scheduler.schedule()
    scheduler.finish("a", RequestStatus.ABORTED)
    assert (request.status, request.is_live) == (RequestStatus.ABORTED, False)
    sched = scheduler.schedule()
    assert sched.finished_req_ids == {"a"}
    assert sched.total_num_scheduled_tokens == 0
    assert scheduler.stats.aborts == 1


def test_no_more_than_the_allowed_requests_run() -> None:
    """The limit holds for running requests; others wait."""
    scheduler = _scheduler(max_num_seqs=2)
    for name in "abc":
        _add(scheduler, name, [1])
    assert list(scheduler.schedule().num_scheduled_tokens) == ["a", "b"]


def test_a_request_that_can_never_fit_is_refused() -> None:
    """Else it would wait, or be preempted, for ever."""
    scheduler = _scheduler(num_blocks=4)
    with pytest.raises(ValueError, match="never finish"):
        _add(scheduler, "a", [1] * 4, max_tokens=3)


def test_an_id_in_use_is_refused() -> None:
    """Ids of live requests are unique."""
    scheduler = _scheduler()
    _add(scheduler, "a", [1])
    with pytest.raises(ValueError, match="in use"):
        _add(scheduler, "a", [1])


def test_reporting_a_finish_is_still_work() -> None:
    """There is work until the last finished request has been reported."""
    scheduler = _scheduler()
    _add(scheduler, "a", [1])
    scheduler.finish("a", RequestStatus.ABORTED)
    had_work = scheduler.has_work
    scheduler.schedule()
    assert (had_work, scheduler.has_work) == (True, False)
