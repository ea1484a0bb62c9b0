"""Small programs with one race each, and their correct twins: `PLANTED[name]` is (faulty, correct).

Each takes the run's runtime, starts its threads on it, and raises where its own check fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from conformance.interleave import SerialRuntime
from conformance.interleave.explore import Program
from omni_prefix_fast.runtime import Deadline

LIMIT_S = 5.0


def both(runtime: SerialRuntime, *bodies: Callable[[], None], here: Callable[[], None] | None = None) -> None:
    """Run bodies on threads of their own, and one on the thread that calls, until all have ended."""
    threads = [runtime.spawn(f"t{i}", body) for i, body in enumerate(bodies)]
    if here is not None:
        here()
    for thread in threads:
        thread.join()


def counting(*, locked: bool) -> Program:
    """Two threads add one each: read, then write."""

    def program(runtime: SerialRuntime) -> None:
        lock, total = runtime.lock("total"), [0]

        def add() -> None:
            if locked:
                lock.acquire()
            seen = total[0]
            runtime.point("between read and write")
            total[0] = seen + 1
            if locked:
                lock.release()

        both(runtime, add, add)
        assert total == [2]

    return program


def waking(*, under_lock: bool) -> Program:
    """A waiter looks at a flag, then waits to be notified; the flag is set and told between the two."""

    def program(runtime: SerialRuntime) -> None:
        changed, ready = runtime.condition("changed"), [False]

        def wait() -> None:
            if under_lock:
                with changed:
                    while not ready[0]:
                        changed.wait()
            elif not ready[0]:
                with changed:
                    changed.wait()

        def tell() -> None:
            with changed:
                ready[0] = True
                changed.notify_all()

        both(runtime, wait, tell)

    return program


def once(*, atomically: bool) -> Program:
    """Two threads do what must be done once: look at an event, act, set it."""

    def program(runtime: SerialRuntime) -> None:
        done, lock, acts = runtime.event("done"), runtime.lock("doing"), [0]

        def act() -> None:
            if atomically:
                lock.acquire()
            if not done.is_set():
                acts[0] += 1
                done.set()
            if atomically:
                lock.release()

        both(runtime, act, act)
        assert acts == [1]

    return program


def two_locks(*, same_order: bool) -> Program:
    """Two threads take two locks."""

    def program(runtime: SerialRuntime) -> None:
        a, b = runtime.lock("a"), runtime.lock("b")

        def forth() -> None:
            with a, b:
                pass

        def back() -> None:
            with b, a:
                pass

        both(runtime, forth, forth if same_order else back)

    return program


def joining(*, joined: bool) -> Program:
    """A result is read without waiting for the thread that makes it."""

    def program(runtime: SerialRuntime) -> None:
        result: list[int] = []
        thread = runtime.spawn("maker", lambda: result.append(1))
        if joined:
            thread.join()
        assert result == [1]

    return program


def lending(*, held: bool) -> Program:
    """A page is read by one thread and given back by another, which lets a third use it anew."""

    def program(runtime: SerialRuntime) -> None:
        freed = runtime.condition("pages")
        holders, page, seen = {"writer", "reader"}, ["rows"], [""]

        def release(who: str) -> None:
            with freed:
                holders.discard(who)
                freed.notify_all()

        def write() -> None:
            release("writer")

        def read() -> None:
            if not held:
                release("reader")
            runtime.point("about to read the page")
            seen[0] = page[0]
            if held:
                release("reader")

        def claim() -> None:
            with freed:
                while holders:
                    freed.wait(LIMIT_S)
                page[0] = "somebody else's"

        both(runtime, write, read, here=claim)
        assert seen == ["rows"]

    return program


def taking(*, checked_again: bool) -> Program:
    """Two consumers are woken for one item."""

    def program(runtime: SerialRuntime) -> None:
        filled, items = runtime.condition("queue"), deque[int]()
        taken: list[int] = []

        def consume() -> None:
            with filled:
                if checked_again:
                    while not items:
                        filled.wait()
                elif not items:
                    filled.wait()
                taken.append(items.popleft())

        def fill() -> None:
            for item in range(2):
                with filled:
                    items.append(item)
                    filled.notify_all()

        both(runtime, consume, consume, here=fill)
        assert sorted(taken) == [0, 1]

    return program


def starting(*, published_first: bool) -> Program:
    """A thread is started before what it uses is there."""

    def program(runtime: SerialRuntime) -> None:
        box: dict[str, int] = {}
        if published_first:
            box["setting"] = 1
        thread = runtime.spawn("worker", lambda: box.update(seen=box["setting"]))
        if not published_first:
            box["setting"] = 1
        thread.join()
        assert box["seen"] == 1

    return program


def recording(*, record_first: bool) -> Program:
    """A failure is told, and waiters are woken; in which order?"""

    def program(runtime: SerialRuntime) -> None:
        done, failure = runtime.event("done"), list[str]()

        def fail() -> None:
            if record_first:
                failure.append("disk full")
            done.set()
            if not record_first:
                failure.append("disk full")

        def wait() -> None:
            assert done.wait(LIMIT_S)
            assert failure == ["disk full"]

        both(runtime, fail, wait)

    return program


def trying(*, given_back: bool) -> Program:
    """A lock that is tried for, and kept where nothing was to be done: the other one's wait for it times out."""

    def program(runtime: SerialRuntime) -> None:
        lock, got = runtime.lock("tried"), [False]

        def attempt() -> None:
            if lock.acquire(blocking=False) and given_back:
                lock.release()

        def wait() -> None:
            got[0] = lock.acquire(timeout=LIMIT_S)

        thread = runtime.spawn("attempt", attempt)
        both(runtime, wait)
        thread.join()
        assert got[0]

    return program


def bounding(*, one_deadline: bool) -> Program:
    """Two waits of one call share a limit: together they must not take longer than it."""

    def program(runtime: SerialRuntime) -> None:
        first, second = runtime.event("first"), runtime.event("second")

        def wait() -> None:
            deadline = Deadline(runtime, LIMIT_S)
            first.wait(deadline.remaining())
            second.wait(deadline.remaining() if one_deadline else LIMIT_S)
            assert runtime.monotonic() <= LIMIT_S

        both(runtime, wait)

    return program


PLANTED: Mapping[str, tuple[Program, Program]] = {
    "lock: read, modify, write": (counting(locked=False), counting(locked=True)),
    "lock: order": (two_locks(same_order=False), two_locks(same_order=True)),
    "lock: tried and kept": (trying(given_back=False), trying(given_back=True)),
    "condition: wake-up lost": (waking(under_lock=False), waking(under_lock=True)),
    "condition: not checked again": (taking(checked_again=False), taking(checked_again=True)),
    "condition: page used after its release": (lending(held=False), lending(held=True)),
    "event: check, then act": (once(atomically=False), once(atomically=True)),
    "event: set before the record": (recording(record_first=False), recording(record_first=True)),
    "thread: not joined": (joining(joined=False), joining(joined=True)),
    "thread: started too early": (starting(published_first=False), starting(published_first=True)),
    "clock: limits that add up": (bounding(one_deadline=False), bounding(one_deadline=True)),
}
