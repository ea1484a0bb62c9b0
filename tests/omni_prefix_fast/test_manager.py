"""The public contract, call by call: step ids, pages, failure, shutdown, set-up, counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from omni_prefix_fast import (
    ModelCachePolicy,
    OmniPrefixCacheClosedError,
    OmniPrefixCacheConfigError,
    OmniPrefixCacheContractError,
    OmniPrefixCacheManager,
    OmniPrefixCacheRowError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheWriteError,
    PrefixCacheConfig,
)
from omni_prefix_fast.types import Holder
from tests.omni_prefix_fast.harness import (
    Engine,
    FaultyDevice,
    ManualRuntime,
    Part,
    View,
    column,
    per_token,
)

DEFER = ModelCachePolicy(deferred_keys=frozenset({"d"}))
DEADLINE_S = 20.0


def test_steps_are_materialized_in_any_order() -> None:
    """Each step is its own snapshot: later steps, finishes and other orders of consumption change nothing."""
    engine = Engine()
    steps = [
        engine.step(new=[("A", [0, 1], 0, 3)]),
        engine.step(cached=[("A", 2)], new=[("B", [2], 0, 2)], base={"B": 30}),
        engine.step(cached=[("B", 1)], finished=["A"]),
    ]
    assert steps == sorted(set(steps))
    assert engine.hidden(steps[2], "B") == [32]
    assert engine.hidden(steps[0], "A") == [0, 1, 2]
    assert engine.hidden(steps[1], "A") == [3, 4]


def test_order_of_asking_changes_nothing() -> None:
    """Rows follow the request, not its place in the question; a doubled id counts once."""
    for asked in (["d", "h", "n"], ["n", "h", "d"], ["h", "h", "d", "n"]):
        engine = Engine()
        engine.take(engine.step(new=[("P", [0, 1], 0, 8)]), "P")
        engine.take(engine.step(new=[("d", [4], 0, 3)], base={"d": 40}), "d")
        step = engine.step(
            cached=[("d", 1)], new=[("h", [0, 1, 2], 8, 2), ("n", [3], 0, 3)], base={"n": 60}, order=["d", "h", "n"]
        )
        outs = engine.take(step, *asked)
        assert outs.hidden_states is not None
        rows = {r: column(t) for r, t in outs.hidden_states.items()}
        assert rows == {"d": [43], "h": list(range(10)), "n": [60, 61, 62]}


@pytest.mark.parametrize("deferred", [False, True])
def test_materialize_from_another_thread(deferred: bool) -> None:
    """Any thread may hand over, hits and late ones included."""
    engine = Engine(policy=DEFER if deferred else None)
    with ThreadPoolExecutor(1) as builder:
        step = engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)})
        assert builder.submit(engine.mm, step, "d", "A").result(DEADLINE_S) == [0, 1, 2, 3]
        late = engine.step(new=[("B", [0, 1], 4, 1)], mm={"d": per_token(1)})
        engine.cache.discard_step(engine.step(new=[("C", [0], 0, 4)], finished=["A", "B"], base={"C": 9}))
        assert builder.submit(engine.mm, late, "d", "B").result(DEADLINE_S) == [0, 1, 2, 3, 4]


def test_page_is_reused_only_after_it_was_let_go() -> None:
    """With two pages and every step one behind, no step ever shows a later step's rows."""
    engine = Engine(staging_depth=2)
    steps = [engine.step(new=[("A", [0, 1, 2], 0, 1)])]
    for position in range(1, 10):
        steps.append(engine.step(cached=[("A", 1)]))
        assert engine.hidden(steps[-2], "A") == [position - 1]


@pytest.mark.eager_only("under a manual clock there is one thread")
def test_depth_bounds_unconsumed_steps() -> None:
    """The step that finds no page times out, naming who was not consumed; after one is consumed it is saved again."""
    runtime = ManualRuntime()
    engine = Engine(staging_depth=2, staging_claim_timeout_s=5.0, runtime=runtime)
    first, second = engine.step(new=[("A", [0, 1], 0, 4)]), engine.step(cached=[("A", 1)])
    engine.start(cached=[("A", 1)])
    before = engine.settled()
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=rf"\[{first}, {second}\].*staging_depth \(now 2\)"):
        engine.save()
    assert runtime.now == 5.0
    assert engine.cache.inspect() == before
    engine.cache.discard_step(first)
    assert engine.hidden(engine.save(), "A") == [5]
    assert engine.hidden(second, "A") == [4]


def test_capacity_bounds_a_step() -> None:
    """A step of exactly the capacity fits; one more token is refused by the setting's name."""
    engine = Engine(staging_capacity_tokens=4)
    engine.take(engine.step(new=[("A", [0], 0, 4)]), "A")
    engine.start(new=[("B", [1, 2], 0, 5)])
    with pytest.raises(OmniPrefixCacheContractError, match=r"5 tokens.*holds 4.*staging_capacity_tokens"):
        engine.save()


def test_started_step_that_is_never_saved_gives_its_slots_up(caplog: pytest.LogCaptureFixture) -> None:
    """The KV was written, the rows were not: a later hit there fails instead of finding the former tenant's."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0, 1], 0, 8)], mm={"d": per_token(1)}), "A")
    engine.start(new=[("B", [0], 0, 4)], finished=["A"])
    engine.start(new=[("C", [0, 2], 4, 1), ("D", [1, 3], 4, 1)], finished=["B"])
    assert "never saved" in caplog.text
    step = engine.save()
    with pytest.raises(OmniPrefixCacheRowError, match="'C'"):
        engine.take(step, "C")
    assert engine.cache.statistics().steps_abandoned == 1
    assert engine.hidden(engine.step(new=[("E", [1, 3], 4, 1)]), "E") == [4, 5, 6, 7, 4]


def test_late_read_survives_a_step_that_is_never_saved() -> None:
    """Slots that are given up are claimed like any others: a planned read on them is completed first."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4)]), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)])
    engine.start(new=[("C", [0], 0, 4)], finished=["A", "B"])
    engine.start()
    assert engine.hidden(late, "B") == [0, 1, 2, 3, 4]


def test_refused_step_gives_its_slots_up() -> None:
    """A step refused at its start cannot be saved; what the engine computed in it all the same is never hit."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4)], base={"A": 700}), "A")
    output = engine.schedule(new=[("B", [0], 0, 4), ("C", [1, 2], 4, 1)], finished=["A"])
    output.scheduled_new_reqs[1].block_ids = None
    with pytest.raises(OmniPrefixCacheContractError, match=r"'C'.*no block_ids"):
        engine.cache.new_step_starts(output)
    engine.update(output, finished=["A"])
    with pytest.raises(OmniPrefixCacheContractError, match=r"cannot be saved.*'C'.*no block_ids"):
        engine.save()
    step = engine.step(new=[("D", [0, 3], 4, 1)], finished=["B", "C"])
    with pytest.raises(OmniPrefixCacheRowError, match="'D'"):
        engine.take(step, "D")
    assert engine.hidden(engine.step(new=[("E", [4], 0, 2)]), "E") == [0, 1]


def everything_is_released(engine: Engine) -> bool:
    """No page, pin, byte, chunk, step, read, task or request is left."""
    seen = engine.cache.inspect()
    left = (seen.tasks, seen.open_writes, seen.emitted, seen.charged, seen.chunks, seen.unconsumed, seen.reads)
    return not any(left) and not any(seen.pins) and not any(seen.pages)


def every_call(engine: Engine, step_id: int) -> list[Callable[[], object]]:
    """Each public call that works on rows."""
    return [
        lambda: engine.take(step_id, "B"),
        lambda: engine.cache.discard_step(step_id),
        lambda: engine.cache.new_step_starts(object()),
        engine.save,
        lambda: engine.cache.register_policy(DEFER),
    ]


def failing_write(engine: Engine) -> None:
    """Bring `engine` (deferred key d, a device whose first gather fails) to its failed write."""
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)}), "A")
    engine.step(new=[("B", [0, 1], 4, 1)], mm={"d": per_token(1)})
    engine.start(finished=["A"])


@pytest.mark.eager_only("the write fails inside the call that makes it")
def test_failed_write_is_loud_sticky_and_holds_nothing() -> None:
    """The call that drives the failing write raises, naming it; so does every later call; everything is let go."""
    engine = Engine(policy=DEFER, device=FaultyDevice(gather_to_host=1))
    words = r"write 1 \(deferred write 1 of request 'A'\) failed: OSError.*restart"
    with pytest.raises(OmniPrefixCacheWriteError, match=words) as told:
        failing_write(engine)
    assert isinstance(told.value.__cause__, OSError)
    assert everything_is_released(engine)
    for call in every_call(engine, 1):
        with pytest.raises(OmniPrefixCacheWriteError, match=words):
            call()
    assert engine.cache.statistics().steps_saved == 2
    assert engine.cache.footprint().device_bytes == 0
    engine.cache.shutdown()
    with pytest.raises(OmniPrefixCacheClosedError):
        engine.take(1, "B")


def test_failure_to_publish_is_sticky_and_holds_nothing() -> None:
    """A fault between the claim and the end of the publish leaves no half-updated table in use."""

    def sink(action: str, acted_on: Mapping[str, object]) -> None:
        if action == "append_rows" and acted_on["step"] == 1:
            raise MemoryError("sink")

    engine = Engine(policy=DEFER, trace=sink)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)}), "A")
    with pytest.raises(MemoryError, match="sink"):
        engine.step(new=[("B", [0, 1], 4, 1)], mm={"d": per_token(1)})
    assert everything_is_released(engine)
    with pytest.raises(OmniPrefixCacheWriteError, match="publishing step 1 failed: MemoryError"):
        engine.cache.new_step_starts(object())


def test_fault_after_the_write_was_registered_releases_its_page() -> None:
    """The page is held by the write as well as by the step: neither keeps it."""

    def sink(action: str, _: Mapping[str, object]) -> None:
        if action == "open_step":
            raise MemoryError("sink")

    engine = Engine(trace=sink)
    with pytest.raises(MemoryError, match="sink"):
        engine.step(new=[("A", [0], 0, 4)])
    assert everything_is_released(engine)


@pytest.mark.parametrize("operation", ["clone", "copy_to_host"])
@pytest.mark.parametrize("call", [1, 2])
def test_device_fault_before_the_publish_can_be_tried_again(operation: str, call: int) -> None:
    """Nothing was claimed yet: page and budget come back, and the same step saved again is right."""
    device = FaultyDevice(**{operation: call})
    engine = Engine(policy=ModelCachePolicy(deferred_keys=frozenset("de")), device=device)
    mm = {"d": per_token(1), "e": per_token(1)}
    engine.start(new=[("A", [0], 0, 4)])
    before = engine.settled()
    with pytest.raises(OSError, match=operation):
        engine.save(mm=mm)
    assert replace(engine.cache.inspect(), occupancy=before.occupancy) == before
    assert engine.mm(engine.save(mm=mm), "d", "A") == [0, 1, 2, 3]
    step = engine.step(new=[("B", [0, 1], 4, 1)], finished=["A"], mm=mm)
    assert engine.mm(step, "e", "B") == [0, 1, 2, 3, 4]


@pytest.mark.eager_only("counts copies of one thread")
def test_fault_while_a_read_is_completed_can_be_tried_again() -> None:
    """A claim that could not rescue a planned read is not made; the read stays planned."""
    device = FaultyDevice(copy_to_host=5)
    engine = Engine(policy=DEFER, device=device)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)}), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)], mm={"d": per_token(1)})
    engine.start(new=[("C", [0], 0, 4)], base={"C": 90})
    assert device.calls["copy_to_host"] == 4
    before = engine.settled()
    with pytest.raises(OSError, match="copy_to_host call 5"):
        engine.save()
    assert engine.cache.inspect() == before
    step = engine.save()
    assert engine.mm(late, "d", "B") == [0, 1, 2, 3, 4]
    assert engine.hidden(step, "C") == [90, 91, 92, 93]


@pytest.mark.eager_only("counts copies of one thread")
def test_fault_while_a_hit_is_handed_over_lets_go_of_it() -> None:
    """The step is consumed, the cache lives on."""
    engine = Engine(policy=DEFER, device=FaultyDevice(copy_to_host=5))
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)}), "A")
    step = engine.step(new=[("B", [0, 1], 4, 1)], mm={"d": per_token(1)})
    with pytest.raises(OSError, match="copy_to_host call 5"):
        engine.take(step, "B")
    seen = engine.cache.inspect()
    assert not any(seen.pins)
    assert not any(seen.pages)
    assert engine.mm(engine.step(new=[("C", [0, 2], 4, 1)]), "d", "C") == [0, 1, 2, 3]


def test_step_whose_slots_cannot_be_told_is_fatal() -> None:
    """A started step vanished and the batch does not know its requests: which rows are stale is unknown, so all are."""
    engine = Engine()
    engine.cache.new_step_starts(engine.schedule(new=[("A", [0], 0, 4)]))
    with pytest.raises(OmniPrefixCacheWriteError, match=r"step 0, which was never saved.*'A'.*not in the batch"):
        engine.cache.new_step_starts(object())
    assert everything_is_released(engine)


def test_shutdown_twice_and_use_after_it() -> None:
    """Everything is let go of, once; every later call says that the cache is closed."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)}), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)], mm={"d": per_token(1)})
    engine.start(new=[("C", [0, 1], 4, 1)])
    engine.cache.shutdown()
    engine.cache.shutdown()
    assert everything_is_released(engine)
    for call in every_call(engine, late):
        with pytest.raises(OmniPrefixCacheClosedError, match="shut down"):
            call()
    assert engine.cache.statistics().steps_saved == 2


def test_a_config_of_another_type_is_refused_by_name() -> None:
    """A dict is no config; `eager` takes True, False and None."""
    config, view = PrefixCacheConfig(num_blocks=2, block_size=4), View(4)
    for eager in (True, False, None):
        OmniPrefixCacheManager(config, view, eager).shutdown()
    with pytest.raises(OmniPrefixCacheConfigError, match=r"dict.*PrefixCacheConfig"):
        OmniPrefixCacheManager({"num_blocks": 2}, view)  # type: ignore[arg-type]


def test_policy_may_be_repeated_but_not_changed_after_the_first_save() -> None:
    """The same policy is fine at any time, another one only before any row was saved."""
    engine = Engine(policy=ModelCachePolicy())
    engine.cache.register_policy(DEFER)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1)}), "A")
    engine.cache.register_policy(ModelCachePolicy(deferred_keys=frozenset("d")))
    with pytest.raises(OmniPrefixCacheContractError, match="after the first save"):
        engine.cache.register_policy(ModelCachePolicy())


@pytest.mark.eager_only("otherwise the prefetch thread has unpinned the rows")
def test_discarded_step_is_cached_all_the_same() -> None:
    """Nobody wanted the step; its rows are hit later, and its page and pins are free at once."""
    engine = Engine()
    step = engine.step(new=[("A", [0], 0, 4)])
    assert engine.cache.inspect().pages[0] == (Holder("step", step),)
    engine.cache.discard_step(step)
    hit = engine.step(new=[("B", [0, 1], 4, 1)])
    assert any(engine.cache.inspect().pins)
    engine.cache.discard_step(hit)
    assert not any(engine.cache.inspect().pins)
    assert not any(engine.cache.inspect().pages)
    assert engine.cache.statistics().steps_discarded == 2
    assert engine.hidden(engine.step(new=[("C", [0, 2], 4, 1)]), "C") == [0, 1, 2, 3, 4]


def test_statistics_count_what_happened() -> None:
    """Requests, hits, tokens, rows and steps, over a start, a hit, a short prompt, a resume and a finish."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4), ("short", [7], 0, 2)]), "A")
    engine.take(engine.step(new=[("B", [0, 1], 4, 2)], resumed=[("A", [0], 2, 2)], finished=["short"]), "B", "A")
    totals = engine.cache.statistics()
    assert (totals.requests_started, totals.requests_hit, totals.requests_below_block) == (3, 1, 2)
    assert (totals.requests_resumed, totals.requests_finished) == (1, 1)
    assert (totals.tokens_asked, totals.tokens_hit) == (4 + 2 + 6, 4)
    assert totals.rows_hit == {"__hidden_states__": 4}
    assert (totals.rows_saved, totals.steps_saved, totals.steps_materialized) == (10, 2, 2)


def test_footprint_is_the_bytes_allocated() -> None:
    """Pools and pages by key, by their shapes."""
    engine = Engine(policy=DEFER, num_blocks=4, staging_depth=2, staging_capacity_tokens=16)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(3, dtype=torch.int64)}), "A")
    footprint = engine.cache.footprint()
    assert footprint.pool_bytes == {"__hidden_states__": 16 * 2 * 4, "d": 16 * 3 * 8}
    assert footprint.staging_bytes == {"__hidden_states__": 2 * 16 * 2 * 4, "d": 2 * 16 * 3 * 8}
    assert footprint.device_bytes == 4 * 3 * 8
    assert engine.parts == [Part("A", 0, 4)]
