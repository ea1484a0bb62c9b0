"""An engine thread and a builder thread, one held at a chosen action while the other goes on.

The trace sink stops a thread at an action; nobody sleeps, and every wait has a deadline.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_prefix_fast import OmniPrefixCacheStagingTimeoutError
from omni_prefix_fast.runtime import Thread, ThreadRuntime
from tests.omni_prefix_fast.harness import Engine, Gate

DEADLINE_S = 20.0


@pytest.mark.eager_only("otherwise the prefetch thread may have gathered before")
@pytest.mark.parametrize("tenants", [1, 2])
def test_claim_between_take_and_gather_leaves_the_planned_rows_alone(tenants: int) -> None:
    """A builder has taken its step and not gathered yet; the engine gives the hit's block to a new tenant meanwhile."""
    gate = Gate("take_step")
    engine = Engine(trace=gate)
    engine.cache.discard_step(engine.step(new=[("A", [0], 0, 4)]))
    hit = engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"], base={"B": 500})
    gate.armed = True
    with ThreadPoolExecutor(1) as pool:
        builder = pool.submit(lambda: engine.hidden(hit, "B"))
        assert gate.reached.wait(DEADLINE_S)
        claimed = engine.step(new=[("C", [0], 0, 4)], finished=["B"], base={"C": 99})
        if tenants == 2:
            engine.cache.discard_step(engine.step(new=[("D", [0], 0, 4)], finished=["C"], base={"D": 77}))
        gate.opened.set()
        assert builder.result(DEADLINE_S) == [0, 1, 2, 3, 504, 505]
    assert engine.hidden(claimed, "C") == [99, 100, 101, 102]
    assert engine.cache.statistics().reads_preserved == 1


def test_consumer_frees_the_page_that_a_save_waits_for() -> None:
    """A save waits for a staging page; a step materialized by another thread in the meantime lets it go on."""
    gate = Gate("take_step")
    engine = Engine(staging_depth=1, staging_claim_timeout_s=DEADLINE_S, trace=gate)
    first = engine.step(new=[("A", [0], 0, 4)])
    gate.armed = True
    with ThreadPoolExecutor(2) as pool:
        builder = pool.submit(lambda: engine.hidden(first, "A"))
        assert gate.reached.wait(DEADLINE_S)
        save = pool.submit(lambda: [engine.step(cached=[("A", 1, [1])])])
        gate.opened.set()
        assert builder.result(DEADLINE_S) == [0, 1, 2, 3]
        (second,) = save.result(DEADLINE_S)
    assert engine.hidden(second, "A") == [4]


@pytest.mark.eager_only("otherwise the prefetch thread may have gathered before")
def test_stuck_gather_is_named() -> None:
    """A builder stuck inside its gather holds the read; a claim of its rows times out, naming request and setting."""
    gate = Gate("take_step")
    engine = Engine(staging_claim_timeout_s=0.1, trace=gate)
    engine.cache.discard_step(engine.step(new=[("A", [0], 0, 4)]))
    engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"], base={"B": 500})
    (read,) = engine.cache._machine.planned  # noqa: SLF001 - the only way to hold a read's lock
    assert read.lock.acquire(timeout=DEADLINE_S)
    try:
        engine.start(new=[("C", [0], 0, 4)], finished=["B"], base={"C": 99})
        with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"'B' hit in step 1.*staging_claim_timeout_s"):
            engine.save()
    finally:
        read.lock.release()
    assert engine.hidden(engine.save(), "C") == [99, 100, 101, 102]


class CountingRuntime(ThreadRuntime):
    """Keeps the threads that were started."""

    def __init__(self) -> None:
        self.threads: list[Thread] = []

    def spawn(self, name: str, target: Callable[[], None]) -> Thread:
        thread = super().spawn(name, target)
        self.threads.append(thread)
        return thread


@pytest.mark.eager_only("it says itself that it has threads")
def test_a_cache_dropped_without_a_shutdown_is_freed_and_its_threads_end() -> None:
    """Neither the committer nor the prefetch thread holds anything of it while it waits for work."""
    runtime = CountingRuntime()
    engine = Engine(eager=False, runtime=runtime, staging_claim_timeout_s=0.5)
    engine.cache.discard_step(engine.step(new=[("A", [0, 1], 0, 8)]))
    engine.cache.discard_step(engine.step(new=[("B", [0, 1, 2], 8, 1)]))
    engine.cache.drain(DEADLINE_S)
    cache = weakref.ref(engine.cache)
    Engine.made.clear()
    del engine
    for thread in runtime.threads:
        gc.collect()
        thread.join(DEADLINE_S)
    gc.collect()
    assert cache() is None
    assert [thread.is_alive() for thread in runtime.threads] == [False, False]
