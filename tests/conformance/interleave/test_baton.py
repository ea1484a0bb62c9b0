"""A run always ends: with what is wrong told, and with no thread left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from conformance.interleave import DeadlockError, EndlessError, LeftBehindError, Replay, SerialRuntime

Program = Callable[[SerialRuntime], None]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10.0)
        assert not thread.is_alive(), f"{thread.name} was left"


def _run(program: Program, switches: list[tuple[int, str]] | None = None, limit: int = 5_000) -> SerialRuntime:
    runtime = SerialRuntime(Replay(switches or []), limit=limit)
    runtime.run(lambda: program(runtime))
    return runtime


def _crossed(runtime: SerialRuntime) -> None:
    a, b, met = runtime.lock("pages"), runtime.lock("tables"), [runtime.event("one"), runtime.event("two")]

    def take(first: int) -> None:
        locks = (a, b) if first == 0 else (b, a)
        with locks[0]:
            met[first].set()
            met[1 - first].wait()
            with locks[1]:
                raise AssertionError("cannot be")

    threads = [runtime.spawn(name, lambda n=n: take(n)) for n, name in enumerate(("saver", "builder"))]  # type: ignore[misc]
    for thread in threads:
        thread.join()


def test_a_deadlock_tells_who_holds_what_and_who_waits_for_what() -> None:
    """Each thread's locks, what it waits for, who holds that, and the line where it stands."""
    with pytest.raises(DeadlockError) as told:
        _run(_crossed)
    text = str(told.value)
    assert "thread 'saver' waits for lock 'tables', which 'builder' holds; holds pages" in text
    assert "thread 'builder' waits for lock 'pages', which 'saver' holds; holds tables" in text
    assert "thread 'engine' waits for the end of thread 'saver'" in text
    assert "test_baton.py" in text
    assert "take: with locks[1]:" in text


def test_a_thread_that_idles_with_a_limit_does_not_hide_a_deadlock() -> None:
    """A committer that looks up every now and then keeps the clock moving; nobody is woken all the same."""

    def program(runtime: SerialRuntime) -> None:
        work, never = runtime.condition("work"), runtime.event("never set")

        def idle() -> None:
            with work:
                while True:
                    work.wait(30.0)

        runtime.spawn("committer", idle)
        never.wait()

    with pytest.raises(DeadlockError, match="'engine' waits for event 'never set' to be set"):
        _run(program)


def test_a_lock_taken_twice_is_told_at_once() -> None:
    """It is not waited for."""

    def program(runtime: SerialRuntime) -> None:
        lock = runtime.lock("state")
        with lock, lock:
            raise AssertionError("cannot be")

    with pytest.raises(DeadlockError, match="'engine' takes lock 'state' twice"):
        _run(program)


def test_a_lock_that_died_with_its_thread_is_told() -> None:
    """A thread that ends with a lock in its hands is named by whoever waits for the lock."""

    def program(runtime: SerialRuntime) -> None:
        lock = runtime.lock("kept")

        def keep() -> None:
            lock.acquire()

        runtime.spawn("careless", keep).join()
        lock.acquire()

    with pytest.raises(DeadlockError, match="'careless' has ended; holds kept"):
        _run(program)


def test_a_thread_that_never_ends_is_told() -> None:
    """The program is over, a thread of it is not."""

    def program(runtime: SerialRuntime) -> None:
        never = runtime.event("closed")

        def idle() -> None:
            never.wait()

        runtime.spawn("committer", idle)

    with pytest.raises(LeftBehindError, match="'committer' never ends"):
        _run(program)


def test_a_thread_that_spins_is_told() -> None:
    """A loop over an event that nobody sets has more points than a run may have."""

    def program(runtime: SerialRuntime) -> None:
        flag = runtime.event("flag")
        while not flag.is_set():
            pass

    with pytest.raises(EndlessError, match="more than 5000 points"):
        _run(program)


def test_two_threads_that_wake_each_other_for_ever_are_told() -> None:
    """No thread spins, the clock stands, and yet nothing comes of it."""

    def program(runtime: SerialRuntime) -> None:
        turn = runtime.condition("turn")

        def swing() -> None:
            with turn:
                while True:
                    turn.notify_all()
                    turn.wait()

        runtime.spawn("a", swing)
        runtime.spawn("b", swing)

    with pytest.raises(EndlessError, match="does somebody spin"):
        _run(program)


def test_an_error_of_the_program_ends_every_thread() -> None:
    """It is raised as it is; threads that wait, and one that holds a lock, are unwound through their own handlers."""
    undone: list[str] = []

    def program(runtime: SerialRuntime) -> None:
        never, lock = runtime.event("never"), runtime.lock("state")

        def wait() -> None:
            try:
                with lock:
                    never.wait()
            finally:
                undone.append("waiter")

        runtime.spawn("waiter", wait)
        runtime.event("").wait(1.0)
        raise ValueError("the program's own")

    with pytest.raises(ValueError, match="the program's own"):
        _run(program)
    assert undone == ["waiter"]


def test_code_that_catches_everything_is_unwound_too() -> None:
    """A handler that goes on at the next primitive ends there."""

    def program(runtime: SerialRuntime) -> None:
        never, lock = runtime.event("never"), runtime.lock("state")

        def stubborn() -> None:
            try:
                never.wait()
            except BaseException:  # noqa: BLE001 - as the committer does
                with lock:
                    never.set()

        runtime.spawn("stubborn", stubborn)
        runtime.event("").wait(1.0)
        raise ValueError("over")

    with pytest.raises(ValueError, match="over"):
        _run(program)


@pytest.mark.parametrize("waiting", [False, True], ids=["running", "waiting"])
def test_an_interrupt_ends_every_thread(*, waiting: bool) -> None:
    """`KeyboardInterrupt` in the main thread, while it runs or while another thread does."""

    def program(runtime: SerialRuntime) -> None:
        never = runtime.event("never")

        def work() -> None:
            if waiting:
                # As the kernel delivers Ctrl-C: to the main thread, which is parked meanwhile.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while True:
                runtime.point()

        runtime.spawn("worker", work)
        if waiting:
            never.wait()
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        _run(program, limit=1 << 40)


def test_a_switch_to_a_thread_that_cannot_go_on_is_passed_over() -> None:
    """So a part of an interleaving is an interleaving."""

    def program(runtime: SerialRuntime) -> None:
        never = runtime.event("go")

        def wait() -> None:
            never.wait()

        thread = runtime.spawn("waiter", wait)
        for _ in range(3):
            runtime.point()
        never.set()
        thread.join()

    nonsense = [(n, name) for n, name in enumerate(["nobody", "waiter", "nobody", "engine"] * 3)]
    runtime = _run(program, nonsense)
    assert set(runtime.switches) < set(nonsense)
    assert _run(program, runtime.switches).switches == runtime.switches
