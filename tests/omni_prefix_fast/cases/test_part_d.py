"""Part D: abort, failure and finish."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from omni_prefix_fast import (
    HIDDEN_KEY,
    ModelCachePolicy,
    OmniPrefixCacheContractError,
    OmniPrefixCacheRowError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheWriteError,
    PrefixBlockPool,
)
from omni_prefix_fast.types import Holder, Occupancy
from tests.omni_prefix_fast.cases.instruments import (
    Background,
    FailingDevice,
    Gate,
    Watch,
    container_sizes,
    wait_for,
)
from tests.omni_prefix_fast.harness import Engine, column, per_token

C: dict[str, Any] = {"c": per_token(1)}
DEFER_C = ModelCachePolicy(deferred_keys=frozenset({"c"}))


# ----------------------------------------------------------------------------------------------------------- E28


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("pending", [True, False], ids=["output pending", "output sent"])
def test_E28_rows_of_an_aborted_request_can_still_be_hit(steps: int, pending: bool) -> None:
    """A's deferred rows, of one step or several, are not in the pool when A is aborted and B hits them: B has them."""
    engine = Engine(policy=DEFER_C)
    count = 4 // steps
    waiting = [engine.step(new=[("A", [0], 0, count)], mm=C)]
    for _ in range(steps - 1):
        if not pending:
            engine.take(waiting.pop(), "A")
        waiting.append(engine.step(cached=[("A", count)], mm=C))
        if len(waiting) == 3:
            engine.take(waiting.pop(0), "A")
    if not pending:
        engine.take(waiting.pop(), "A")
    assert engine.cache.inspect().occupancy["c"][:4] == (Occupancy.IN_TRANSIT,) * 4
    step = engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"], mm=C)
    outs = engine.take(step, "B")
    assert column(outs.mm_outputs["c"]["B"]) == column((outs.hidden_states or {})["B"]) == list(range(6))
    assert {r for per in outs.mm_outputs.values() for r in per} == {"B"}  # nothing of A goes on
    with pytest.raises(OmniPrefixCacheContractError, match="exactly once"):
        engine.take(step, "A")
    for old in waiting:
        engine.cache.discard_step(old)
    state = engine.cache.inspect()
    assert "A" not in state.emitted
    assert "A" not in state.open_writes


@pytest.mark.parametrize("together", [True, False], ids=["in the same step", "a step later"])
def test_E28_an_abort_in_the_step_that_hashed_the_rows(together: bool) -> None:
    """B hits A's rows in the very step that computes them, or in the one that aborts A, and outlives A."""
    engine = Engine(policy=DEFER_C)
    new = [("A", [0], 0, 4)]
    if together:
        step = engine.step(new=[*new, ("B", [0, 1], 4, 2)], mm=C)
        engine.cache.new_step_starts(engine.schedule(finished=["A"]))
    else:
        engine.cache.discard_step(engine.step(new=new, mm=C))
        step = engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"], mm=C)
    outs = engine.take(step, "B")
    assert column(outs.mm_outputs["c"]["B"]) == list(range(6))


# ----------------------------------------------------------------------------------------------------------- E29


@pytest.mark.eager_only("a thread has containers of its own once it runs")
def test_E29_ids_never_seen_or_never_run_leave_nothing_behind() -> None:
    """Unknown finished ids, and requests started with zero tokens and aborted, change no container of the cache."""
    engine = Engine()
    a = engine.step(new=[("A", [0], 0, 4)])
    engine.cache.new_step_starts(engine.schedule())
    engine.cache.drain()
    sizes = container_sizes(engine.cache, leave_out=[engine.view])
    for i in range(5):
        engine.cache.new_step_starts(engine.schedule(finished=[f"never{i}", f"nor{i}"]))
        engine.cache.new_step_starts(engine.schedule(new=[(f"idle{i}", [], 0, 0)]))
        engine.cache.new_step_starts(engine.schedule(finished=[f"idle{i}"]))
        engine.cache.new_step_starts(engine.schedule(new=[(f"hit{i}", [0], 4, 0)], finished=[f"before{i}"]))
        engine.cache.new_step_starts(engine.schedule(finished=[f"hit{i}"]))
    engine.cache.new_step_starts(engine.schedule())
    assert set(engine.settled().emitted) == {"A"}
    assert container_sizes(engine.cache, leave_out=[engine.view]) == sizes
    assert engine.hidden(a, "A") == [0, 1, 2, 3]
    engine.position["A"] = 4
    assert engine.hidden(engine.step(cached=[("A", 1, [1])], finished=["never"]), "A") == [4]
    assert engine.hidden(engine.step(new=[("B", [0, 2], 4, 1)], finished=["A", "idle0"]), "B") == list(range(5))


@pytest.mark.parametrize("hit", [0, 4])
def test_E29_an_abort_of_a_request_that_others_run_beside(hit: int) -> None:
    """An id that is admitted with zero tokens beside a running request and aborted: the running one is unaffected."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4)]), "A")
    step = engine.step(new=[("idle", [0, 3], hit, 0)], cached=[("A", 2, [1])])
    with pytest.raises(OmniPrefixCacheContractError, match="'idle'"):
        engine.take(step, "A", "idle")
    assert engine.hidden(step, "A") == [4, 5]
    assert engine.hidden(engine.step(cached=[("A", 2)], finished=["idle"]), "A") == [6, 7]
    state = engine.cache.inspect()
    assert set(state.emitted) == {"A"}
    assert not any(state.pins)


# ----------------------------------------------------------------------------------------------------------- E31


def fail_the_pool(monkeypatch: pytest.MonkeyPatch, *, on: int) -> None:
    """The pool's write number `on` from now fails, and none before or after."""
    calls, write = [0], PrefixBlockPool.write

    def failing(pool: PrefixBlockPool, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == on:
            raise OSError("the pool is gone")
        write(pool, *args)

    monkeypatch.setattr(PrefixBlockPool, "write", failing)


def assert_refuses_everything(engine: Engine, step: int, match: str) -> None:
    """Every entry raises the failure; what tells about the cache still works; nothing is held any more."""
    entries: list[Callable[[], object]] = [
        lambda: engine.cache.register_policy(ModelCachePolicy()),
        lambda: engine.cache.new_step_starts(SimpleNamespace()),
        engine.save,
        lambda: engine.take(step),
        lambda: engine.cache.discard_step(step),
    ]
    for entry in entries * 2:
        with pytest.raises(OmniPrefixCacheWriteError, match=match):
            entry()
    state = engine.cache.inspect()
    assert (state.charged, state.chunks, state.unconsumed, state.tasks) == (0, (), (), {})
    assert not any(state.pages)
    assert not state.open_writes
    assert not state.emitted
    engine.cache.statistics()
    assert engine.cache.footprint().device_bytes == 0
    engine.cache.shutdown()


@pytest.mark.eager_only("the write fails inside the call that makes it")
@pytest.mark.parametrize("how", ["copy", "pool write"])
@pytest.mark.parametrize("which", [1, 2, 3])
def test_E31_a_failed_deferred_write_is_loud_and_sticky(monkeypatch: pytest.MonkeyPatch, how: str, which: int) -> None:
    """Three requests finish in a step; the write of one fails: those before it stay valid, everything later raises."""
    engine = Engine(policy=DEFER_C, device=FailingDevice("gather_to_host", on=which) if how == "copy" else None)
    step = engine.step(new=[("a", [0], 0, 4), ("b", [1], 0, 4), ("c", [2], 0, 4)], mm=C)
    assert engine.cache.inspect().charged == 12 * 4
    if how == "pool write":
        fail_the_pool(monkeypatch, on=which)
    with pytest.raises(OmniPrefixCacheWriteError, match=r"deferred write 1 of request '[abc]'.* is gone"):
        engine.start(new=[("B", [0, 3], 4, 1)], finished=["a", "b", "c"])
    occupancy = engine.cache.inspect().occupancy
    assert occupancy["c"].count(Occupancy.COMMITTED) == 4 * (which - 1)
    assert occupancy[HIDDEN_KEY].count(Occupancy.COMMITTED) == 12
    assert_refuses_everything(engine, step, "is gone")


@pytest.mark.eager_only("the write fails inside the call that makes it")
@pytest.mark.parametrize("which", [1, 2, 3])
def test_E31_a_failed_immediate_write_is_loud_and_sticky(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """The pool write of a step's first, second or third key fails: the save raises, and so does every later call."""
    engine = Engine()
    earlier = engine.step(new=[("A", [3], 0, 4)])
    fail_the_pool(monkeypatch, on=which)
    new = [("a", [0], 0, 4), ("b", [1], 0, 4), ("c", [2], 0, 4)]
    with pytest.raises(OmniPrefixCacheWriteError, match=r"write 1 \(step 1\).*the pool is gone"):
        engine.step(new=new, mm={"k": per_token(1), "l": per_token(1)})
    occupancy = engine.cache.inspect().occupancy[HIDDEN_KEY]
    assert [slot for slot in range(32) if occupancy[slot] is Occupancy.COMMITTED] == [12, 13, 14, 15]
    assert_refuses_everything(engine, earlier, "the pool is gone")


@pytest.mark.eager_only("counts copies of one thread")
@pytest.mark.parametrize(("method", "which"), [("copy_to_host", 6), ("copy_to_host", 8), ("clone", 3), ("clone", 4)])
@pytest.mark.parametrize("again", [True, False], ids=["saved again", "given up"])
def test_E31_a_copy_that_fails_in_save_leaves_no_trace(method: str, which: int, again: bool) -> None:
    """The save raises what the device raised. Tables, pages and bytes are as before; nothing is told as saved.

    The same step may be saved again. If it is given up, hits on its rows raise and never see the former tenant's.
    """
    defer = ModelCachePolicy(deferred_keys=frozenset({"c", "d"}))
    mm = {"c": per_token(1), "d": per_token(3)}
    engine = Engine(policy=defer, device=FailingDevice(method, on=which))
    engine.take(engine.step(new=[("old", [0, 1], 0, 8)], base={"old": 900}, mm=mm), "old")
    engine.start(new=[("A", [0], 0, 4), ("B", [2], 0, 4)], finished=["old"])
    before, footprint = engine.cache.inspect(), engine.cache.footprint()
    with pytest.raises(OSError, match="the device is gone"):
        engine.save(mm=mm)
    assert engine.cache.inspect() == before
    assert engine.cache.footprint() == footprint
    if again:
        step = engine.save(mm=mm)
        assert column((engine.take(step, "A").hidden_states or {})["A"]) == [0, 1, 2, 3]
    else:
        with pytest.raises(OmniPrefixCacheContractError):
            engine.take(1, "A")
    step = engine.step(new=[("R", [0, 3], 4, 1), ("S", [1, 4], 4, 1)], finished=["A"], base={"S": 904}, mm=mm)
    if again:
        outs = engine.take(step, "R", "S")
        assert column((outs.hidden_states or {})["R"]) == column(outs.mm_outputs["d"]["R"]) == list(range(5))
        return
    with pytest.raises(OmniPrefixCacheRowError, match="'R'"):
        engine.take(step, "R")
    step = engine.step(new=[("T", [1, 5], 4, 1)], base={"T": 900}, mm=mm)
    outs = engine.take(step, "T")  # rows of the former tenant that the lost step did not touch
    assert column((outs.hidden_states or {})["T"]) == column(outs.mm_outputs["c"]["T"]) == [904, 905, 906, 907, 904]


@pytest.mark.eager_only("otherwise the prefetch thread has fetched the read before the budget needs it")
@pytest.mark.parametrize("first", [["c"], ["c", "d"]], ids="".join)
@pytest.mark.parametrize("then", [["c"], ["c", "d"]], ids="".join)
def test_E31_a_step_saved_again_may_emit_other_keys(first: list[str], then: list[str]) -> None:
    """The first try gathers B's hit, forced by the budget, and fails; the second emits other keys: every row right."""
    defer = ModelCachePolicy(deferred_keys=frozenset({"c", "d"}))
    mm = {"c": per_token(1), "d": per_token(1)}
    engine = Engine(device=FailingDevice("clone", on=3), policy=defer, gpu_staging_bytes=32)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm=mm), "A")
    engine.start(new=[("B", [0, 1], 4, 2)])
    with pytest.raises(OSError, match="the device is gone"):
        engine.save(mm={key: mm[key] for key in first})
    assert engine.cache.statistics().reads_preserved == 1
    outs = engine.take(engine.save(mm={key: mm[key] for key in then}), "B")
    assert column((outs.hidden_states or {})["B"]) == list(range(6))
    assert {k: column(v["B"]) for k, v in outs.mm_outputs.items()} == {
        key: list(range(6 if key in then else 4)) for key in "cd"
    }


# ----------------------------------------------------------------------------------------------------------- E32


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_E32_a_save_without_a_free_page_gives_up_in_time_and_names_the_steps(depth: int) -> None:
    """`depth` steps saved and unconsumed: the next save raises in time, naming them, and can be repeated."""
    engine = Engine(staging_depth=depth, staging_claim_timeout_s=0.02)
    steps = [engine.step(new=[(f"r{i}", [i], 0, 4)]) for i in range(depth)]
    engine.start(new=[("late", [6], 0, 4)])
    before = engine.settled()
    names = ", ".join(map(str, steps))
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=rf"never consumed: \[{names}\].*staging_depth"):
        engine.save()
    assert engine.settled() == before
    assert engine.hidden(steps[0], "r0") == [0, 1, 2, 3]
    assert engine.hidden(engine.save(), "late") == [0, 1, 2, 3]


@pytest.mark.parametrize("call", ["materialize", "discard_step"])
@pytest.mark.parametrize("which", [0, 1])
def test_E32_a_save_waits_until_a_step_is_consumed_on_another_thread(call: str, which: int) -> None:
    """With both pages taken the third save waits; consuming either step from another thread lets it go on."""
    watch = Watch()
    engine = Engine(staging_depth=2, runtime=watch)
    steps = [engine.step(new=[(f"r{i}", [i], 0, 4)]) for i in range(2)]
    engine.start(new=[("late", [6], 0, 4)], base={"late": 10})
    save = Background(engine.save)
    wait_for(watch.blocked("staging pages"))
    assert save.running
    if call == "materialize":
        assert engine.hidden(steps[which], f"r{which}") == [0, 1, 2, 3]
    else:
        engine.cache.discard_step(steps[which])
    assert engine.hidden(save.result(), "late") == [10, 11, 12, 13]
    assert engine.hidden(steps[1 - which], f"r{1 - which}") == [0, 1, 2, 3]


@pytest.mark.eager_only("otherwise it depends on the pace of the committer which write hangs")
def test_E32_a_write_that_never_ends_is_named_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The committer hangs in a pool write: whoever hit its rows gives up in time, told the task and its state.

    A request of that step that hit nothing has its rows in the page and is not held up.
    """
    engine = Engine(staging_claim_timeout_s=0.02)
    other = engine.step(new=[("P", [5], 0, 2)])
    engine.start(new=[("A", [0, 1], 0, 8), ("B", [0, 1, 2], 8, 1)])
    hang, write = Gate(), PrefixBlockPool.write

    def hanging(pool: PrefixBlockPool, *args: Any) -> None:
        hang.stop()
        write(pool, *args)

    monkeypatch.setattr(PrefixBlockPool, "write", hanging)
    save = Background(engine.save)
    wait_for(hang.reached)
    assert engine.hidden(other, "P") == [0, 1]
    step = engine.cache.inspect().unconsumed[-1]
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"write 1 \(step 1\) is still HOST_READY after 0.02"):
        engine.take(step, "B")
    assert Holder("write", 1) in [holder for page in engine.cache.inspect().pages for holder in page]
    hang.opened.set()
    assert save.result() == step
    assert not any(engine.cache.inspect().pages)


def test_E32_a_save_waits_for_a_page_that_only_a_write_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumed step's page stays taken while a write views it, and is free once that write has landed."""
    engine = Engine(staging_depth=1)
    engine.start(new=[("A", [0], 0, 4)])
    held, write = Gate(), PrefixBlockPool.write

    def holding(pool: PrefixBlockPool, *args: Any) -> None:
        held.stop()
        write(pool, *args)

    monkeypatch.setattr(PrefixBlockPool, "write", holding)
    save = Background(engine.save)
    wait_for(held.reached)
    (step,) = engine.cache.inspect().unconsumed
    assert engine.hidden(step, "A") == [0, 1, 2, 3]
    assert engine.cache.inspect().pages == ((Holder("write", 0),),)
    held.opened.set()
    save.result()
    assert engine.hidden(engine.step(new=[("B", [0, 1], 4, 1)], finished=["A"]), "B") == list(range(5))
