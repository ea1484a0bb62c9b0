"""`conformance.engine.runner`: the batch as the worker keeps it."""

import pytest

from conformance.engine import CachedRequests, NewRequest, RunnerBatch, SchedulerOutput


def _sched(
    new: tuple[NewRequest, ...] = (),
    cached: CachedRequests | None = None,
    counts: dict[str, int] | None = None,
    finished: set[str] | None = None,
) -> SchedulerOutput:
    counts = counts or {}
    return SchedulerOutput(
        list(new), cached or CachedRequests(), counts, sum(counts.values()), finished or set(), set()
    )


def _new(req_id: str, block_ids: list[int], computed: int = 0) -> NewRequest:
    return NewRequest(req_id, [1], (block_ids,), computed)


def _known(req_id: str, computed: int, block_ids: list[int] | None = None, resumed: bool = False) -> CachedRequests:
    return CachedRequests(
        [req_id], {req_id} if resumed else set(), [(block_ids,) if block_ids is not None else None], [computed]
    )


def test_slots_follow_the_block_table() -> None:
    """Position p of a request lies in slot table[p // size] * size + p % size, request after request."""
    batch = RunnerBatch(4)
    batch.update(_sched((_new("a", [5, 2], 3), _new("b", [7], 0)), counts={"a": 3, "b": 2}))
    assert batch.batch_req_ids() == ["a", "b"]
    assert batch.step_slots_cpu(["b", "a"], {"a": 3, "b": 2}).tolist() == [28, 29, 23, 8, 9]


def test_newcomers_take_the_places_of_those_who_left() -> None:
    """Rows come in batch order, which is neither that of arrival nor that of the schedule."""
    batch = RunnerBatch(4)
    batch.update(_sched((_new("a", [1]), _new("b", [2]), _new("c", [3])), counts={"a": 1, "b": 1, "c": 1}))
    batch.update(_sched((_new("d", [4]),), CachedRequests(["b", "c"], set(), [None, None], [1, 1]),
                        {"b": 1, "c": 1, "d": 1}, {"a"}))  # fmt: skip
    assert batch.batch_req_ids() == ["d", "b", "c"]


def test_gaps_are_closed_from_the_end() -> None:
    """The last request moves to the first free place."""
    batch = RunnerBatch(4)
    batch.update(_sched((_new("a", [1]), _new("b", [2]), _new("c", [3])), counts={"a": 1, "b": 1, "c": 1}))
    batch.update(_sched((), CachedRequests(["b", "c"], set(), [None, None], [1, 1]), {"b": 1, "c": 1}, {"a"}))
    assert batch.batch_req_ids() == ["c", "b"]


def test_whoever_is_not_scheduled_leaves_the_batch_but_keeps_its_blocks() -> None:
    """A request that sat out a step comes back with the table that it had."""
    batch = RunnerBatch(4)
    batch.update(_sched((_new("a", [6]),), counts={"a": 2}))
    batch.update(_sched())
    assert batch.batch_req_ids() == []
    batch.update(_sched((), _known("a", 2), {"a": 1}))
    assert batch.slots("a", 2, 3) == [26]


def test_new_blocks_extend_the_table_and_a_resume_replaces_it() -> None:
    """The same field has both meanings; the resumed ids tell which."""
    batch = RunnerBatch(4)
    batch.update(_sched((_new("a", [1]),), counts={"a": 4}))
    batch.update(_sched((), _known("a", 4, [2]), {"a": 1}))
    assert batch.block_table("a") == [1, 2]
    batch.update(_sched((), _known("a", 0, [9, 8], resumed=True), {"a": 5}))
    assert batch.block_table("a") == [9, 8]
    assert batch.num_computed("a") == 0


def test_a_resume_without_a_table_is_refused() -> None:
    """It names the request."""
    batch = RunnerBatch(4)
    batch.update(_sched((_new("a", [1]),), counts={"a": 4}))
    with pytest.raises(ValueError, match="'a'"):
        batch.update(_sched((), _known("a", 0, None, resumed=True), {"a": 4}))
