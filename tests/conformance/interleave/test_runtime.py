"""The serial runtime keeps what the primitives promise, and its clock moves only when everybody waits."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from conformance.interleave import CrashError, Replay, SerialRuntime, Uniform
from omni_prefix_fast.runtime import Deadline

LIMIT_S = 3.0


def _run(program: Callable[[SerialRuntime], None], seed: int | None = None) -> SerialRuntime:
    runtime = SerialRuntime(Replay(()) if seed is None else Uniform(seed), limit=10_000)
    runtime.run(lambda: program(runtime))
    return runtime


def test_waits_end_at_their_limits() -> None:
    """A lock, a condition, an event and a join that nobody ends give up when the virtual clock says so."""

    def program(runtime: SerialRuntime) -> None:
        lock, condition, never = runtime.lock("held"), runtime.condition("quiet"), runtime.event("never")

        def hold() -> None:
            never.wait(100.0)

        thread = runtime.spawn("holder", hold)
        with lock:
            started = runtime.monotonic()
            other = runtime.spawn("asks", lambda: results.append(lock.acquire(timeout=LIMIT_S)))
            other.join()
        assert results == [False]
        assert runtime.monotonic() == started + LIMIT_S
        with condition:
            assert not condition.wait(LIMIT_S)
        assert not never.wait(LIMIT_S)
        thread.join(LIMIT_S)
        assert thread.is_alive()
        assert runtime.monotonic() == started + 4 * LIMIT_S

    results: list[bool] = []
    assert _run(program).monotonic() == 100.0


def test_the_clock_stands_while_somebody_can_go_on() -> None:
    """However much a thread does, a wait with a limit does not end meanwhile."""

    def program(runtime: SerialRuntime) -> None:
        done = runtime.event("done")

        def work() -> None:
            for _ in range(1000):
                runtime.point()
            done.set()

        runtime.spawn("worker", work)
        assert done.wait(0.001)
        assert runtime.monotonic() == 0.0

    for seed in range(5):
        _run(program, seed)


@pytest.mark.parametrize("seed", range(20))
def test_a_lock_is_held_by_one(seed: int) -> None:
    """Three threads that may change at every point are never in the critical section together."""

    def program(runtime: SerialRuntime) -> None:
        lock, inside, most = runtime.lock("section"), [0], [0]

        def enter() -> None:
            for _ in range(3):
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    runtime.point("inside")
                    inside[0] -= 1

        threads = [runtime.spawn("enter", enter) for _ in range(3)]
        for thread in threads:
            thread.join()
        assert most == [1]

    _run(program, seed)


@pytest.mark.parametrize("seed", range(20))
def test_a_notification_wakes_every_waiter(seed: int) -> None:
    """Waiters have the lock again when they go on, and each was told."""

    def program(runtime: SerialRuntime) -> None:
        told, woken = runtime.condition("told"), list[bool]()

        def wait() -> None:
            with told:
                woken.append(told.wait(LIMIT_S))

        threads = [runtime.spawn("waiter", wait) for _ in range(3)]
        with told:
            assert not told.wait(LIMIT_S / 2)  # the clock moves once all of them wait
            told.notify_all()
        for thread in threads:
            thread.join()
        assert woken == [True] * 3

    _run(program, seed)


def test_wrong_use_is_an_error() -> None:
    """A lock released by who does not hold it, a wait or a notification without the lock."""
    runtime = SerialRuntime(Replay(()))
    with pytest.raises(RuntimeError, match="'a', which it does not hold"):
        runtime.lock("a").release()
    with pytest.raises(RuntimeError, match="waits on 'b' without"):
        runtime.condition("b").wait()
    with pytest.raises(RuntimeError, match="notifies 'b' without"):
        runtime.condition("b").notify_all()


def test_threads_of_one_name_are_told_apart() -> None:
    """The second one gets a number: an interleaving names threads."""

    def program(runtime: SerialRuntime) -> None:
        names: list[str] = []
        for _ in range(2):
            runtime.spawn("worker", lambda: names.append(runtime.thread)).join()
        assert names == ["worker", "worker #2"]
        assert runtime.thread == "engine"

    _run(program)


def test_a_quiet_lock_is_no_point() -> None:
    """It still excludes, and it costs no point."""

    def program(runtime: SerialRuntime) -> None:
        for name in ("quiet", "told"):
            lock, before = runtime.lock(name), runtime.points
            with lock:
                assert not lock.acquire(blocking=False)
            assert (runtime.points > before) == (name == "told")

    runtime = SerialRuntime(Replay(()), quiet=("quiet",))
    runtime.run(lambda: program(runtime))


def test_several_waits_share_a_deadline() -> None:
    """A `Deadline` counts virtual seconds."""

    def program(runtime: SerialRuntime) -> None:
        deadline = Deadline(runtime, LIMIT_S)
        assert not runtime.event("never").wait(LIMIT_S / 3)
        assert deadline.remaining() == pytest.approx(LIMIT_S * 2 / 3)

    _run(program)


def test_lines_can_be_points() -> None:
    """With lines traced, a race without any primitive between its two lines is found."""

    def program(runtime: SerialRuntime) -> None:
        if traced:
            runtime.trace_lines([__name__])
        total = [0]

        def add() -> None:
            seen = total[0]
            total[0] = seen + 1

        try:
            for thread in [runtime.spawn("add", add) for _ in range(2)]:
                thread.join()
        finally:
            sys.settrace(None)
        found.add(total[0])

    for traced in (False, True):
        found: set[int] = set()
        for seed in range(50):
            _run(program, seed)
        assert found == ({1, 2} if traced else {2})


def test_a_crash_is_told_with_its_cause() -> None:
    """What nobody caught in a thread ends the run."""

    def program(runtime: SerialRuntime) -> None:

        def work() -> None:
            raise ZeroDivisionError("planted")

        runtime.spawn("worker", work).join()

    with pytest.raises(CrashError, match="'worker' raised ZeroDivisionError") as crash:
        _run(program)
    assert isinstance(crash.value.__cause__, ZeroDivisionError)
