"""The runtime's primitives: every wait is bounded."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from conformance.interleave import SerialRuntime, exhaustive
from omni_prefix_fast.runtime import Deadline, Event, Latch, Runtime, ThreadRuntime
from tests.omni_prefix_fast.harness import ManualRuntime

BRIEF_S = 0.01
DEADLINE_S = 20.0


@pytest.mark.parametrize("runtime", [ThreadRuntime(), ManualRuntime()], ids=["threads", "manual"])
def test_every_wait_ends(runtime: Runtime) -> None:
    """An event nobody sets, a lock nobody releases and a condition nobody notifies all give up at their limit."""
    assert not runtime.event("never").wait(BRIEF_S)
    lock = runtime.lock("held")
    with lock:
        assert not lock.acquire(timeout=BRIEF_S)
        assert not lock.acquire(blocking=False)
    assert lock.acquire(timeout=BRIEF_S)
    condition = runtime.condition("quiet")
    with condition:
        assert not condition.wait(BRIEF_S)


@pytest.mark.parametrize("runtime", [ThreadRuntime(), ManualRuntime()], ids=["threads", "manual"])
def test_event_stays_set(runtime: Runtime) -> None:
    """A set event never makes anybody wait again; nor does a latch."""
    for event in (runtime.event("done"), Latch(runtime, "done")):
        assert not event.is_set()
        assert not event.wait(BRIEF_S)
        event.set()
        assert event.is_set()
        assert event.wait(0)


@pytest.mark.parametrize("latch", [False, True], ids=["event", "latch"])
def test_one_set_wakes_every_waiter(latch: bool) -> None:
    """Any number of threads wait for one event, set by two threads at once; all of them go on."""
    runtime = ThreadRuntime()
    for _ in range(50):
        event = Latch(runtime, "done") if latch else runtime.event("done")
        with ThreadPoolExecutor(6) as pool:
            waiters = [pool.submit(event.wait, DEADLINE_S) for _ in range(4)]
            setters = [pool.submit(event.set) for _ in range(2)]
            assert all(setter.result(DEADLINE_S) is None for setter in setters)
            assert all(waiter.result(DEADLINE_S) for waiter in waiters)


def test_a_latch_set_while_somebody_starts_to_wait_is_seen() -> None:
    """It is set between the look at the flag and the wait: the wait ends at once, without time passing."""
    runtime = ManualRuntime()
    latch = Latch(runtime, "done")
    make = runtime.event

    def made_too_late(name: str) -> Event:
        latch.set()
        return make(name)

    runtime.event = made_too_late  # type: ignore[method-assign, assignment]
    assert latch.wait(5.0)
    assert runtime.waited == []


def test_a_latch_is_never_missed_whatever_line_the_other_thread_is_at() -> None:
    """Every line of waiter and setter is a point, and every interleaving of up to three preemptions is tried."""

    def program(runtime: SerialRuntime) -> None:
        latch = Latch(runtime, "done")
        runtime.trace_lines([Latch.__module__])
        try:
            setter = runtime.spawn("setter", latch.set)
            assert latch.wait(5.0)
            setter.join()
        finally:
            sys.settrace(None)
        assert runtime.monotonic() == 0.0, "the waiter was not woken"

    explored = exhaustive(program, preemptions=3)
    assert explored.error is None, str(explored)
    assert explored.runs > 50


def test_clock_does_not_go_back() -> None:
    """Time only rises."""
    runtime = ThreadRuntime()
    readings = [runtime.monotonic() for _ in range(100)]
    assert readings == sorted(readings)


def test_deadline_is_shared_by_all_waits() -> None:
    """Several waits of one call together take no longer than its deadline; what is left never falls below zero."""
    runtime = ManualRuntime()
    deadline = Deadline(runtime, 5.0)
    left = []
    for _ in range(4):
        left.append(deadline.remaining())
        runtime.now += 2.0
    assert left == [5.0, 3.0, 1.0, 0.0]
    assert deadline.seconds == 5.0
