"""The watched runtime tells waits that block, on which thread, with what in hand."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from conformance.device import Wait, WatchedRuntime
from conformance.device.watch import cycle, role

LIMIT_S = 20.0


def on_thread(name: str, call: Callable[[], object]) -> None:
    """Run a call on a thread of that name, to its end."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_roles_are_thread_names() -> None:
    """The main thread is the engine; the cache's own threads lose their prefix."""
    seen: list[str] = [role()]
    on_thread("builder", lambda: seen.append(role()))
    runtime = WatchedRuntime()
    runtime.spawn("committer", lambda: seen.append(role())).join(LIMIT_S)
    assert seen == ["engine", "builder", "committer"]


def test_only_waits_that_block_are_told() -> None:
    """An event that is set, a free lock and a thread that has ended are no waits."""
    runtime = WatchedRuntime()
    event = runtime.event("set")
    event.set()
    assert event.wait(LIMIT_S)
    assert event.is_set()
    with runtime.lock("free"), runtime.condition("free too"):
        pass
    thread = runtime.spawn("done", lambda: None)
    thread.join(LIMIT_S)
    before = len(runtime.waits)
    thread.join(LIMIT_S)
    assert len(runtime.waits) == before
    assert [w for w in runtime.waits if w.kind != "join"] == []


def test_each_kind_of_wait_is_told_with_what_is_held() -> None:
    """An event, a condition, a lock and a thread, with names, limits and the locks in hand."""
    told: list[Wait] = []
    runtime = WatchedRuntime(told.append)
    outer, event, condition = runtime.lock("outer"), runtime.event("event"), runtime.condition("condition")
    with outer:
        assert not event.wait(0.001)
        with condition:
            assert not condition.wait(0.001)
        assert runtime.held == ("outer",)

        def ask() -> None:
            assert not outer.acquire(timeout=0.001)

        on_thread("builder", ask)
    assert told == [
        Wait("engine", "event", "event", ("outer",), 0.001),
        Wait("engine", "condition", "condition", ("outer",), 0.001),
        Wait("builder", "lock", "outer", (), 0.001),
    ]
    assert runtime.waits_of("builder", "lock") == told[2:]
    assert runtime.waits_of("engine", "lock") == []
    assert ("outer", "condition") in runtime.order
    assert {("engine", "outer"), ("engine", "condition")} <= runtime.taken


def test_a_notified_condition_is_taken_again() -> None:
    """After the wait the thread holds it, and gives it back at the end."""
    runtime = WatchedRuntime()
    condition = runtime.condition("c")
    ready = threading.Event()
    held: list[tuple[str, ...]] = []

    def wait() -> None:
        with condition:
            ready.set()
            assert condition.wait(LIMIT_S)
            held.append(runtime.held)
        held.append(runtime.held)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert ready.wait(LIMIT_S)
    with condition:
        condition.notify_all()
    thread.join(LIMIT_S)
    assert held == [("c",), ()]


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ([], []),
        ([("a", "b"), ("b", "c"), ("a", "c")], []),
        ([("a", "b"), ("b", "a")], ["a", "b"]),
        ([("x", "a"), ("a", "b"), ("b", "c"), ("c", "a")], ["a", "b", "c"]),
        ([("a", "a")], ["a"]),
    ],
)
def test_a_cycle_of_locks_is_found(order: list[tuple[str, str]], found: list[str]) -> None:
    """Two threads that take locks in a circle could block each other; a consistent order has none."""
    assert cycle(order) == found
