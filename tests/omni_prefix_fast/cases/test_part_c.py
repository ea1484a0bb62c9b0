"""Part C, as far as the span rule covers it: preemption, resume, and an id that comes back.

Rows may be handed over twice after a preemption; `spans` says which positions they are. A consumer that keeps the rows
it has not seen yet ends with each of them once: `Consumer` is that consumer.
"""

from __future__ import annotations

import pytest

from omni_prefix_fast import ModelCachePolicy, OmniPrefixCacheContractError, OmniPrefixCacheRowError, StageCacheOutputs
from omni_prefix_fast.types import Occupancy
from tests.omni_prefix_fast.harness import Engine, column, per_token

DEFERRED = pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])


def policy(deferred: bool) -> ModelCachePolicy:
    """Key k, per token, deferred or not."""
    return ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()), token_keys=frozenset({"k"}))


K = {"k": per_token(1)}


class Consumer:
    """Puts one request's rows together by their positions. A repeated row has to equal the first."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.repeated: list[int] = []

    def take(self, outs: StageCacheOutputs, req_id: str) -> None:
        assert outs.hidden_states is not None
        rows = column(outs.hidden_states[req_id])
        assert column(outs.mm_outputs["k"][req_id]) == rows
        start, end = outs.spans[req_id]
        assert outs.mm_spans["k"][req_id] == (start, end)
        assert len(rows) == end - start
        assert start <= len(self.rows), f"rows {len(self.rows)}..{start - 1} were never handed over"
        known = len(self.rows) - start
        assert rows[:known] == self.rows[start:end]
        self.repeated += range(start, min(len(self.rows), end))
        self.rows += rows[known:]


# ----------------------------------------------------------------------------------------------------------- E21


@DEFERRED
@pytest.mark.parametrize("hit", [0, 4, 8])
@pytest.mark.parametrize("model_runner", ["V1", "V2"])
def test_E21_positions_tell_replayed_rows(hit: int, model_runner: str, deferred: bool) -> None:
    """A is preempted after 0..7 and resumes with a hit: by their positions 0..9 arrive once, and the new slots hold it.

    V1 brings it back among the cached requests, V2 among the new ones.
    """
    engine = Engine(policy=policy(deferred))
    consumer = Consumer()
    consumer.take(engine.take(engine.step(new=[("A", [0, 1], 0, 8)], mm=K), "A"), "A")
    engine.take(engine.step(new=[("other", [7], 0, 1)], mm=K), "other")  # A waits, preempted
    table = [*[0, 1][: hit // 4], *[4, 5, 6][hit // 4 :]]
    admission = ("A", table, hit, 6 - hit if hit < 6 else 1)
    step = engine.step(
        resumed=[admission] if model_runner == "V1" else [], new=[admission] if model_runner == "V2" else [], mm=K
    )
    consumer.take(engine.take(step, "A"), "A")
    consumer.take(engine.take(engine.step(cached=[("A", 10 - engine.position["A"])], mm=K), "A"), "A")
    assert consumer.rows == list(range(10))
    assert consumer.repeated == list(range(hit, 8))
    reader = engine.step(new=[("B", [*table, 3], 10, 1)], finished=["A"], mm=K)
    outs = engine.take(reader, "B")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == column(outs.mm_outputs["k"]["B"]) == list(range(11))


# ----------------------------------------------------------------------------------------------------------- E23


@pytest.mark.parametrize("table", [None, ([0],), ([],), ([0, 99],), ([0, -1],)], ids=str)
@pytest.mark.parametrize("also_new", [True, False], ids=["with a new request", "alone"])
def test_E23_a_resume_without_usable_blocks_is_refused_and_harms_nobody(
    table: tuple[list[int]] | None, also_new: bool
) -> None:
    """The error names request and step. The next step works, for others and for A come back right.

    The engine ran the refused step all the same, without a save: a hit on what that computed raises.
    """
    engine = Engine()
    engine.take(engine.step(new=[("B", [0, 1], 0, 8)]), "B")
    engine.take(engine.step(new=[("A", [2, 3], 0, 4), ("C", [4], 0, 2)], base={"C": 40}), "A")
    before = engine.settled()
    output = engine.schedule(
        resumed=[("A", [0, 1, 5], 8, 1)], new=[("N", [0, 6], 4, 1)] if also_new else [], finished=["B"]
    )
    output.scheduled_cached_reqs.new_block_ids = [table]
    with pytest.raises(OmniPrefixCacheContractError, match=r"step 2: .*request 'A'"):
        engine.cache.new_step_starts(output)
    after = engine.settled()
    tables = ("version", "owner", "occupancy", "pins", "pages", "unconsumed", "reads")
    assert all(getattr(after, table) == getattr(before, table) for table in tables)
    engine.update(output, finished=["B"])
    engine.position["C"] = 2
    step = engine.step(resumed=[("A", [0, 1, 5], 8, 1)], new=[("D", [0, 7], 4, 1)], cached=[("C", 1)], finished=["N"])
    outs = engine.take(step, "A", "C", "D")
    assert outs.hidden_states is not None
    assert {r: column(v) for r, v in outs.hidden_states.items()} == {"A": [4, 5, 6, 7, 8], "C": [42], "D": [*range(5)]}
    if also_new:
        step = engine.step(new=[("E", [0, 6], 5, 1)])
        with pytest.raises(OmniPrefixCacheRowError, match="'E'"):
            engine.take(step, "E")


def test_E23_a_refused_step_that_the_engine_drops_leaves_the_manager_usable() -> None:
    """The engine did not take the refused step into its batch: nothing was computed, nothing is given up."""
    engine = Engine()
    engine.take(engine.step(new=[("B", [0, 1], 0, 8)]), "B")
    output = engine.schedule(resumed=[("A", [0, 1, 5], 8, 1)], finished=["B"])
    output.scheduled_cached_reqs.new_block_ids = [None]
    with pytest.raises(OmniPrefixCacheContractError, match=r"step 1: .*request 'A'"):
        engine.cache.new_step_starts(output)
    assert engine.hidden(engine.step(new=[("D", [0, 1, 7], 8, 1)]), "D") == [*range(9)]


# ----------------------------------------------------------------------------------------------------------- E24


@DEFERRED
@pytest.mark.parametrize("budget", [1, 3, 4, 5])
@pytest.mark.parametrize("preempted_at", [4, 8])
def test_E24_chunked_prefill_with_a_preemption_delivers_each_row_once(
    budget: int, preempted_at: int, deferred: bool
) -> None:
    """A prompt of 10 in chunks, preempted on the way and computed again in other blocks: by position, 0..9 once."""
    engine = Engine(policy=policy(deferred))
    consumer = Consumer()

    def run(upto: int) -> None:
        while (at := engine.position["A"]) < upto:
            consumer.take(engine.take(engine.step(cached=[("A", min(budget, upto - at))], mm=K), "A"), "A")

    consumer.take(engine.take(engine.step(new=[("A", [0, 1, 2], 0, budget)], mm=K), "A"), "A")
    run(preempted_at)
    engine.take(engine.step(new=[("thief", [0, 1], 0, 8)], base={"thief": 900}, mm=K), "thief")
    step = engine.step(resumed=[("A", [3, 4, 5], 0, budget)], mm=K)
    consumer.take(engine.take(step, "A"), "A")
    run(10)
    assert consumer.rows == list(range(10))


# ----------------------------------------------------------------------------------------------------------- E25


@DEFERRED
@pytest.mark.parametrize("sent", [True, False], ids=["old output sent", "old output dropped"])
def test_E25_an_id_used_again_with_another_prompt_starts_afresh(sent: bool, deferred: bool) -> None:
    """A finishes and its id comes back at once with a hit on P's rows: 300..309, nothing cut off; A's own rows landed.

    Going back to the old content then hits the old rows.
    """
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("P", [2, 3], 0, 8)], base={"P": 300}, mm=K), "P")
    old = engine.step(new=[("A", [0, 1], 0, 8)], mm=K)
    if sent:
        engine.take(old, "A")
    replaced = engine.step(new=[("A", [2, 3, 4], 8, 2)], finished=["A"], base={"A": 300}, mm=K)
    if not sent:
        engine.cache.discard_step(old)
    outs = engine.take(replaced, "A")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["A"]) == column(outs.mm_outputs["k"]["A"]) == list(range(300, 310))
    assert outs.spans["A"] == (0, 10)
    back = engine.step(new=[("A", [0, 1, 5], 8, 2)], finished=["A"], base={"A": 0}, mm=K)
    outs = engine.take(back, "A")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["A"]) == column(outs.mm_outputs["k"]["A"]) == list(range(10))


# ----------------------------------------------------------------------------------------------------------- E26


@DEFERRED
@pytest.mark.parametrize("chunks", [[8, 4], [1, 1, 10], [4, 4, 4], [5, 7]], ids=str)
@pytest.mark.parametrize("late", [True, False], ids=["consumed at the end", "consumed at once"])
def test_E26_a_continuation_delivers_its_own_rows_only(chunks: list[int], late: bool, deferred: bool) -> None:
    """The next chunk re-enters as new with all computed so far: its rows only. After its finish, a hit is whole."""
    engine = Engine(policy=policy(deferred))
    consumer, at = Consumer(), 0
    waiting: list[int] = []
    for count in chunks:
        step = engine.step(new=[("A", [0, 1, 2], at, count)], mm=K)
        at += count
        if late:
            waiting.append(step)
        else:
            consumer.take(engine.take(step, "A"), "A")
    for step in waiting:
        consumer.take(engine.take(step, "A"), "A")
    assert consumer.rows == list(range(12))
    assert consumer.repeated == []
    again = Consumer()
    again.take(engine.take(engine.step(new=[("A", [0, 1, 3], 8, 4)], finished=["A"], mm=K), "A"), "A")
    assert again.rows == list(range(12))


# ----------------------------------------------------------------------------------------------------------- E47


@DEFERRED
@pytest.mark.parametrize("consumed", ["before the notice", "after the notice"])
def test_E47_the_last_steps_rows_are_there_after_the_finish(consumed: str, deferred: bool) -> None:
    """A's finish notice arrives before its last step is consumed: the consumer and a later hit have the last rows."""
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("A", [0, 1], 0, 4)], mm=K), "A")
    last = engine.step(cached=[("A", 4)], mm=K)
    if consumed == "before the notice":
        outs = engine.take(last, "A")
        engine.cache.new_step_starts(engine.schedule(finished=["A"]))
    else:
        engine.cache.new_step_starts(engine.schedule(finished=["A"]))
        outs = engine.take(last, "A")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["A"]) == column(outs.mm_outputs["k"]["A"]) == [4, 5, 6, 7]
    state = engine.settled()
    assert all(state.occupancy[key][:8] == (Occupancy.COMMITTED,) * 8 for key in state.occupancy)
    outs = engine.take(engine.step(new=[("B", [0, 1, 2], 8, 1)], mm=K), "B")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == column(outs.mm_outputs["k"]["B"]) == list(range(9))


@pytest.mark.parametrize("longer_first", [True, False])
def test_E47_a_shorter_preemption_never_replaces_what_a_longer_one_left(longer_first: bool) -> None:
    """A is preempted at 8 and, come back, at 4 (or the other way round): rows of all 8 positions can still be hit."""
    engine = Engine(num_blocks=8, policy=policy(True))
    engine.take(engine.step(new=[("A", [0, 1], 0, 8 if longer_first else 4)], mm=K), "A")
    engine.take(engine.step(resumed=[("A", [2, 3], 0, 4 if longer_first else 8)], mm=K), "A")
    table = [0, 1, 4] if longer_first else [2, 3, 4]
    outs = engine.take(engine.step(new=[("B", table, 8, 1)], finished=["A"], mm=K), "B")
    assert column(outs.mm_outputs["k"]["B"]) == list(range(9))


@pytest.mark.parametrize(("blocks", "hit"), [([0], 8), ([], 8), ([0], 5), ([0, 1], 9), ([0, 1], 4096)], ids=str)
def test_E47_positions_beyond_the_owned_slots_are_refused_not_read(blocks: list[int], hit: int) -> None:
    """A hit longer than the block table is refused by name before anything is read or changed."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0, 1, 2], 0, 12)]), "A")
    output = engine.schedule(new=[("B", [0, 1, 3], 8, 1)])
    output.scheduled_new_reqs[0].block_ids = (blocks,)
    output.scheduled_new_reqs[0].num_computed_tokens = hit
    before = engine.settled()
    with pytest.raises(OmniPrefixCacheContractError, match=r"request 'B'.*block_ids have to cover the hit"):
        engine.cache.new_step_starts(output)
    assert engine.settled() == before
    if hit == 8:  # the batch has the blocks that the schedule forgot to tell: the engine goes on
        engine.update(output)
        assert engine.hidden(engine.step(new=[("C", [0, 1, 4], 8, 1)], finished=["A", "B"]), "C") == list(range(9))
