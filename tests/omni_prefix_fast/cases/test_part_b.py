"""Part B: hits on rows of the same step, and when a read is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_prefix_fast import (
    ModelCachePolicy,
    OmniPrefixCacheRowError,
    OmniPrefixCacheWriteError,
    PrefixBlockPool,
    StageCacheOutputs,
)
from tests.omni_prefix_fast.cases.instruments import Background, Gate, NoCopyUnderStateLock, Watch, wait_for
from tests.omni_prefix_fast.harness import Engine, column, per_token

DEFERRED = pytest.mark.parametrize("deferred", [True, False], ids=["deferred", "immediate"])


def policy(deferred: bool) -> ModelCachePolicy:
    """Key k, per token, deferred or not."""
    return ModelCachePolicy(deferred_keys=frozenset({"k"} if deferred else ()), token_keys=frozenset({"k"}))


K: dict[str, Any] = {"k": per_token(1)}


def both(outs: StageCacheOutputs, req_id: str) -> list[int]:
    """Values of the hidden rows of a request, which have to be those of k too."""
    assert outs.hidden_states is not None
    rows = column(outs.hidden_states[req_id])
    assert column(outs.mm_outputs["k"][req_id]) == rows
    return rows


def hold_pool_writes(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Every write to the pool stops at the gate."""
    held, write = Gate(), PrefixBlockPool.write

    def stopping(pool: PrefixBlockPool, *args: Any) -> None:
        held.stop()
        write(pool, *args)

    monkeypatch.setattr(PrefixBlockPool, "write", stopping)
    return held


def fail_pool_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write to the pool fails from now on."""

    def failing(_pool: PrefixBlockPool, *_args: Any) -> None:
        raise OSError("the pool is gone")

    monkeypatch.setattr(PrefixBlockPool, "write", failing)


# ----------------------------------------------------------------------------------------------------------- E14


@DEFERRED
@pytest.mark.parametrize("order", [("A", "B"), ("B", "A")], ids="".join)
@pytest.mark.parametrize("recycled", [True, False], ids=["recycled blocks", "fresh blocks"])
@pytest.mark.parametrize("asked", [("B", "A"), ("B",)], ids="".join)
def test_E14_a_same_step_hit_reads_the_rows_of_that_step(
    order: tuple[str, ...], recycled: bool, asked: tuple[str, ...], deferred: bool
) -> None:
    """A computes 0..7 and B hits them in the same step: B gets them, whoever had those blocks before."""
    engine = Engine(policy=policy(deferred))
    if recycled:
        engine.take(engine.step(new=[("old", [0, 1], 0, 8)], base={"old": 900}, mm=K), "old")
    new = [("A", [0, 1], 0, 8), ("B", [0, 1, 2], 8, 3)]
    step = engine.step(new=new, finished=["old"] if recycled else [], order=order, base={"A": 100, "B": 100}, mm=K)
    outs = engine.take(step, *asked)
    assert {r: both(outs, r) for r in asked} == {
        r: {"A": list(range(100, 108)), "B": list(range(100, 111))}[r] for r in asked
    }


@DEFERRED
def test_E14_old_and_new_rows_mixed_in_one_span(deferred: bool) -> None:
    """B's span covers a block of long ago, one that A rewrites in this step, and one deferred and still open."""
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("P", [0], 0, 4), ("old", [1], 0, 4)], base={"old": 900}, mm=K), "P")
    engine.take(engine.step(new=[("Q", [2], 0, 4)], finished=["old"], base={"Q": 8}, mm=K), "Q")
    new = [("A", [0, 1], 4, 4), ("B", [0, 1, 2, 3], 12, 1)]
    outs = engine.take(engine.step(new=new, mm=K), "B")
    assert both(outs, "B") == list(range(13))


def test_E14_the_reader_waits_for_the_copy_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A's pool write is held back: B's materialize waits for it, bounded, and then has A's rows; A's own does not."""
    watch = Watch()
    engine = Engine(runtime=watch)
    engine.take(engine.step(new=[("old", [0, 1], 0, 8)], base={"old": 900}), "old")
    engine.start(new=[("A", [0, 1], 0, 8), ("B", [0, 1, 2], 8, 1)], finished=["old"])
    held = hold_pool_writes(monkeypatch)
    save = Background(engine.save)
    wait_for(held.reached)
    (step,) = engine.cache.inspect().unconsumed
    reader = Background(lambda: engine.take(step, "A", "B"))
    wait_for(watch.blocked("write 1 done"))
    assert reader.running
    held.opened.set()
    outs = reader.result()
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == list(range(9))
    assert save.result() == step


@pytest.mark.eager_only("the write fails inside the call that makes it")
@DEFERRED
def test_E14_if_the_writer_fails_the_reader_raises(monkeypatch: pytest.MonkeyPatch, deferred: bool) -> None:
    """The pool write of the step fails: whoever hit its rows gets the error, never zeros and never the older rows."""
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("old", [0, 1], 0, 8)], base={"old": 900}, mm=K), "old")
    engine.start(new=[("A", [0, 1], 0, 8), ("B", [0, 1, 2], 8, 1)], finished=["old"])
    fail_pool_writes(monkeypatch)
    with pytest.raises(OmniPrefixCacheWriteError, match="the pool is gone"):
        engine.save(mm=K)
    with pytest.raises(OmniPrefixCacheWriteError, match="the pool is gone"):
        engine.take(engine.cache.statistics().steps_saved - 1, "B")


@pytest.mark.eager_only("the write fails inside the call that makes it")
def test_E14_a_reader_that_waits_raises_when_the_writer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """B waits for A's write on another thread, and the write fails: B raises at once instead of waiting on."""
    watch = Watch()
    engine = Engine(runtime=watch)
    engine.start(new=[("A", [0, 1], 0, 8), ("B", [0, 1, 2], 8, 1)])
    held = Gate()

    def failing(_pool: PrefixBlockPool, *_args: Any) -> None:
        held.stop()
        raise OSError("the pool is gone")

    monkeypatch.setattr(PrefixBlockPool, "write", failing)
    save = Background(engine.save)
    wait_for(held.reached)
    (step,) = engine.cache.inspect().unconsumed
    reader = Background(lambda: engine.take(step, "B"))
    wait_for(watch.blocked("write 0 done"))
    held.opened.set()
    with pytest.raises(OmniPrefixCacheWriteError, match="the pool is gone"):
        reader.result()
    with pytest.raises(OmniPrefixCacheWriteError, match="the pool is gone"):
        save.result()


def test_E14_a_hit_without_rows_is_an_error_not_zeros() -> None:
    """Hidden rows that neither an earlier step nor this one computed are fatal for the request that is owed them."""
    engine = Engine()
    step = engine.step(new=[("A", [0], 0, 4), ("B", [0, 1, 2], 8, 1)])
    with pytest.raises(OmniPrefixCacheRowError, match=r"'B' hit positions 0\.\.7, but 4 of them"):
        engine.take(step, "B")


# ----------------------------------------------------------------------------------------------------------- E15


@DEFERRED
@pytest.mark.parametrize("late", [0, 1, 2])
def test_E15_a_writer_that_commits_before_the_fetch_is_read_all_the_same(late: int, deferred: bool) -> None:
    """B is planned on new tenant N's rows in transit; they are committed by the fetch: 700..703, nothing stays held."""
    engine = Engine(policy=policy(deferred), staging_depth=4)
    engine.take(engine.step(new=[("old", [0], 0, 4)], base={"old": 1}, mm=K), "old")
    step = engine.step(new=[("N", [0], 0, 4), ("B", [0, 1], 4, 1)], finished=["old"], base={"N": 700, "B": 700}, mm=K)
    later = [engine.step(new=[(f"x{i}", [2], 0, 4)], finished=["N", f"x{i - 1}"], mm=K) for i in range(late)]
    assert both(engine.take(step, "N", "B"), "B") == [700, 701, 702, 703, 704]
    for other in later:
        engine.cache.discard_step(other)
    engine.cache.new_step_starts(engine.schedule(finished=["N", "B", "x0", "x1"]))
    state = engine.settled()
    assert not any(state.pins)
    assert not any(state.pages)
    assert (state.charged, state.chunks, state.tasks) == (0, (), {})


# ----------------------------------------------------------------------------------------------------------- E16


@DEFERRED
@pytest.mark.parametrize("emits", [True, False], ids=["tenant emits k", "tenant does not"])
@pytest.mark.parametrize("reader", ["finished", "live"])
@pytest.mark.parametrize("tenants", [1, 2, 3])
@pytest.mark.parametrize("fetched", [True, False], ids=["tenant materialized", "tenant pending"])
def test_E16_a_late_read_hands_over_what_it_was_planned_on(
    tenants: int, reader: str, emits: bool, fetched: bool, deferred: bool
) -> None:
    """The blocks change hands once, twice, three times before the read is fetched: still 0..3, never 99."""
    engine = Engine(policy=policy(deferred), staging_depth=5)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=K), "A")
    planned = engine.step(new=[("R", [0, 1], 4, 2)], mm=K)
    gone = ["A", "R"] if reader == "finished" else ["A"]
    for i in range(tenants):
        tenant = f"B{i}"
        step = engine.step(new=[(tenant, [0], 0, 4)], finished=gone, base={tenant: 99 + i}, mm=K if emits else {})
        gone = [tenant]
        if fetched:
            engine.take(step, tenant)
    assert both(engine.take(planned, "R"), "R") == list(range(6))


@DEFERRED
def test_E16_a_read_planned_on_a_write_still_open_survives_its_slot(deferred: bool) -> None:
    """R is planned on A's rows in transit; then A itself comes back and rewrites the block: R has the old ones."""
    engine = Engine(policy=policy(deferred))
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=K), "A")
    planned = engine.step(new=[("R", [0, 1], 4, 2)], mm=K)
    engine.take(engine.step(resumed=[("A", [0], 0, 4)], base={"A": 99}, mm=K), "A")
    assert both(engine.take(planned, "R"), "R") == list(range(6))
    outs = engine.take(engine.step(new=[("S", [0, 2], 4, 1)], finished=["A", "R"], base={"S": 99}, mm=K), "S")
    assert both(outs, "S") == list(range(99, 104))


@pytest.mark.parametrize("emits", [True, False], ids=["tenant emits k", "tenant does not"])
@pytest.mark.parametrize("first", ["A", "T"], ids=["A finishes first", "the tenant first"])
@pytest.mark.parametrize("resumed", [True, False], ids=["A came back elsewhere", "A stays preempted"])
def test_E16_an_old_write_never_lands_on_a_newer_tenant(resumed: bool, first: str, emits: bool) -> None:
    """A is preempted with rows of block 0 not written yet, and T gets the block: a hit reads T's, whoever ends first.

    Where T emits no k there are no rows of k: zeros, neither A's nor those of the tenant before.
    """
    engine = Engine(policy=policy(True))
    engine.take(engine.step(new=[("old", [0], 0, 4)], base={"old": 700}, mm=K), "old")
    engine.take(engine.step(new=[("A", [0], 0, 4)], finished=["old"], mm=K), "A")
    engine.take(engine.step(new=[("T", [0], 0, 4)], base={"T": 900}, mm=K if emits else {}), "T")
    if resumed:
        engine.take(engine.step(resumed=[("A", [2], 0, 4)], mm=K), "A")
    for gone in ("A", "T") if first == "A" else ("T", "A"):
        engine.cache.new_step_starts(engine.schedule(finished=[gone]))
    outs = engine.take(engine.step(new=[("B", [0, 1], 4, 1)], base={"B": 900}, mm=K), "B")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == list(range(900, 905))
    assert column(outs.mm_outputs["k"]["B"]) == ([900, 901, 902, 903, 904] if emits else [0, 0, 0, 0, 904])
    if resumed:
        assert both(engine.take(engine.step(new=[("C", [2, 3], 4, 1)], mm=K), "C"), "C") == list(range(5))


# ----------------------------------------------------------------------------------------------------------- E17


def pending_reads(engine: Engine, readers: int, blocks: list[int]) -> list[int]:
    """Steps saved and not consumed, each with a request that hit all of `blocks`."""
    size = engine.config.block_size
    engine.take(engine.step(new=[("A", blocks, 0, size * len(blocks))], mm=K), "A")
    return [engine.step(new=[(f"r{i}", [*blocks, 10 + i], size * len(blocks), 1)], mm=K) for i in range(readers)]


@pytest.mark.eager_only("the guard watches one thread")
@DEFERRED
def test_E17_nothing_is_copied_under_the_state_lock(deferred: bool) -> None:
    """Four pending reads of 64 slots and one save that takes all 64: not one row moves while the state lock is held."""
    watch = Watch()
    engine = Engine(num_blocks=16, block_size=16, runtime=watch, staging_depth=6, policy=policy(deferred))
    with NoCopyUnderStateLock(watch) as guard:
        steps = pending_reads(engine, 4, [0, 1, 2, 3])
        engine.start(new=[("B", [0, 1, 2, 3], 0, 64)], finished=["A"], base={"B": 900})
        before = guard.moved.copy()
        last = engine.save(mm=K)
        assert (guard.moved - before).total() > 0
        for i, step in enumerate(steps):
            assert both(engine.take(step, f"r{i}"), f"r{i}") == list(range(65))
        assert both(engine.take(last, "B"), "B") == list(range(900, 964))
        engine.cache.new_step_starts(engine.schedule(finished=["B", "r0", "r1", "r2", "r3"]))


@pytest.mark.eager_only("otherwise the prefetch thread has the rows out before the claim")
@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_E17_rescue_costs_what_the_claim_touches(monkeypatch: pytest.MonkeyPatch, overlap: int) -> None:
    """Of four pending reads on blocks of their own, a save that takes `overlap` of the blocks completes just those."""
    engine = Engine(num_blocks=16, staging_depth=6)
    blocks = [0, 1, 2, 3]
    engine.take(engine.step(new=[(f"a{b}", [b], 0, 4) for b in blocks]), "a0")
    steps = [engine.step(new=[(f"r{b}", [b, 10 + b], 4, 1)]) for b in blocks]
    gathered: list[int] = []
    gather = PrefixBlockPool.gather

    def counting(pool: PrefixBlockPool, key: str, slots: Any, *args: Any) -> None:
        gathered.append(len(slots))
        gather(pool, key, slots, *args)

    monkeypatch.setattr(PrefixBlockPool, "gather", counting)
    taken = [*blocks[:overlap], 5]
    gone = [f"a{b}" for b in blocks]
    last = engine.step(new=[("B", taken, 0, 4 * len(taken))], finished=gone, base={"B": 90})
    assert gathered == [4] * overlap
    assert engine.cache.statistics().reads_preserved == overlap
    for b, step in zip(blocks, steps, strict=True):
        assert engine.hidden(step, f"r{b}") == [0, 1, 2, 3, 4]
    engine.cache.discard_step(last)


@pytest.mark.eager_only("otherwise the prefetch thread has the rows out before the claim")
def test_E17_others_materialize_while_rows_are_being_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a save copies a pending read's rows out, another thread can materialize an older step, and does."""
    engine = Engine(num_blocks=16, staging_depth=6)
    engine.take(engine.step(new=[("A", [0, 1], 0, 8)]), "A")
    plain = engine.step(new=[("P", [5], 0, 2)])
    pending = engine.step(new=[("R", [0, 1, 6], 8, 1)])
    held, gather = Gate(), PrefixBlockPool.gather

    def stopping(pool: PrefixBlockPool, *args: Any) -> None:
        held.stop()
        gather(pool, *args)

    monkeypatch.setattr(PrefixBlockPool, "gather", stopping)
    save = Background(lambda: engine.step(new=[("B", [0, 1], 0, 8)], finished=["A"], base={"B": 900}))
    wait_for(held.reached)
    assert Background(lambda: engine.hidden(plain, "P")).result() == [0, 1]
    assert save.running
    held.opened.set()
    assert engine.hidden(save.result(), "B") == list(range(900, 908))
    assert engine.hidden(pending, "R") == list(range(9))


# ----------------------------------------------------------------------------------------------------------- E19


@DEFERRED
@pytest.mark.parametrize("zero_step", [True, False], ids=["with a zero-token step", "without"])
def test_E19_steps_keep_what_was_theirs_when_consumed_out_of_order(zero_step: bool, deferred: bool) -> None:
    """Step 1 is consumed after step 2, and after a step that finished A and computed nothing: each has its own rows."""
    engine = Engine(policy=policy(deferred))
    first = engine.step(new=[("A", [0, 1], 0, 4)], mm={"k": per_token(1), "tag": ["first"]})
    second = engine.step(cached=[("A", 4)], mm={"k": per_token(1), "tag": ["second"]})
    if zero_step:
        engine.cache.new_step_starts(engine.schedule(finished=["A"]))
    outs = engine.take(second, "A")
    assert both(outs, "A") == [4, 5, 6, 7]
    assert (outs.mm_outputs["tag"]["A"], outs.spans["A"]) == (["second"], (4, 8))
    outs = engine.take(first, "A")
    assert both(outs, "A") == [0, 1, 2, 3]
    assert (outs.mm_outputs["tag"]["A"], outs.spans["A"]) == (["first"], (0, 4))


def test_E19_a_saved_step_of_zero_tokens_takes_nothing_from_its_neighbours() -> None:
    """Step 2 has no tokens and is saved and consumed before step 1: it hands over nothing, step 1 all of its rows."""
    engine = Engine()
    first = engine.step(new=[("A", [0], 0, 4)])
    empty = engine.step(finished=["A"])
    assert engine.take(empty).hidden_states == {}
    assert engine.hidden(first, "A") == [0, 1, 2, 3]


# ----------------------------------------------------------------------------------------------------------- E20


@DEFERRED
@pytest.mark.parametrize("padded", [None, 16], ids=["unpadded", "padded"])
@pytest.mark.parametrize("consumed", ["before", "after"], ids=["hit after the handover", "hit before it"])
def test_E20_buffers_may_be_overwritten_as_soon_as_save_returns(
    padded: int | None, consumed: str, deferred: bool
) -> None:
    """Hidden states, k, lists, dictionaries and arrays are filled with 99 after the save: nobody ever sees it."""
    engine = Engine(policy=policy(deferred).model_copy(update={"request_list_keys": frozenset({"each"})}))
    engine.start(new=[("A", [0], 0, 4), ("Z", [3], 0, 2)])
    hidden = engine.rows(2, padded=padded)
    k = engine.rows(1, padded=padded)
    each = [torch.tensor([5.0]), torch.tensor([6.0])]
    nested: dict[str, Any] = {"ref": torch.tensor([[7.0]]), "lengths": torch.arange(6).numpy(), "list": [8]}
    step = engine.save(hidden=hidden, mm={"k": k, "each": each, "nested": nested}, padded=padded)
    for tensor in (hidden, k, *each, nested["ref"]):
        tensor.fill_(99)
    nested["lengths"][:] = 99
    nested["list"][0] = 99
    if consumed == "before":
        outs = engine.take(step, "A")
        step = engine.step(new=[("B", [0, 1], 4, 1)], mm=K)
        assert both(engine.take(step, "B"), "B") == list(range(5))
    else:
        hit = engine.step(new=[("B", [0, 1], 4, 1)], finished=["A"], mm=K)
        outs = engine.take(step, "A")
        assert both(engine.take(hit, "B"), "B") == list(range(5))
    assert both(outs, "A") == [0, 1, 2, 3]
    assert outs.mm_outputs["each"]["A"].tolist() == [5.0]
    got = outs.mm_outputs["nested"]["A"]
    assert (got["ref"].tolist(), list(got["lengths"]), got["list"]) == ([[7.0]], list(range(6)), [8])


@DEFERRED
def test_E20_what_was_handed_over_may_be_overwritten(deferred: bool) -> None:
    """The consumer writes into its rows: neither its neighbours of the step nor a later hit sees that."""
    engine = Engine(policy=policy(deferred))
    nested = {"ref": torch.tensor([7.0])}
    step = engine.step(new=[("A", [0], 0, 4), ("Z", [3], 0, 2)], mm={**K, "nested": nested})
    outs = engine.take(step, "A", "Z")
    assert outs.hidden_states is not None
    for tensor in (outs.hidden_states["A"], outs.mm_outputs["k"]["A"], outs.mm_outputs["nested"]["A"]["ref"]):
        tensor.fill_(77)
    assert both(outs, "Z") == [0, 1]
    assert outs.mm_outputs["nested"]["Z"]["ref"].tolist() == [7.0]
    for i in range(2):
        outs = engine.take(engine.step(new=[(f"B{i}", [0, 1 + i], 4, 1)], mm=K), f"B{i}")
        assert both(outs, f"B{i}") == list(range(5))
        assert outs.hidden_states is not None
        outs.hidden_states[f"B{i}"].fill_(77)


@DEFERRED
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_E20_a_page_used_again_never_shows_a_later_step(depth: int, deferred: bool) -> None:
    """With `depth` pages and as many steps unconsumed, eight steps in turn each hand over their own rows."""
    engine = Engine(policy=policy(deferred), staging_depth=depth)
    waiting: list[tuple[int, int]] = []
    for i in range(8):
        entry: dict[str, Any] = {"cached": [("A", 2, [i])]} if i else {"new": [("A", [0], 0, 2)]}
        waiting.append((i, engine.step(**entry, mm=K)))
        if len(waiting) == depth:
            number, step = waiting.pop(0)
            assert both(engine.take(step, "A"), "A") == [2 * number, 2 * number + 1]
    for number, step in waiting:
        assert both(engine.take(step, "A"), "A") == [2 * number, 2 * number + 1]
