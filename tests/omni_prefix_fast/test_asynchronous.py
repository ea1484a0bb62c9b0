"""The asynchronous mode: who may wait for what, and what is handed over when copies land late, fail, or never land.

The device is simulated: a test says when each piece of a copy lands, or lands it at the very moment at which somebody
begins to wait. Nobody sleeps; every wait has a limit. The tables of threads and locks are the ones of the seed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from conformance.device import Fault, SimulatedDevice, SimulatedDeviceError, Wait, WatchedRuntime
from conformance.device.watch import STATE_LOCK, cycle, role
from omni_prefix_fast import (
    ModelCachePolicy,
    OmniPrefixCacheClosedError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheWriteError,
    StageCacheOutputs,
)
from omni_prefix_fast.pool import PrefixBlockPool
from omni_prefix_fast.runtime import Event
from tests.omni_prefix_fast import harness  # not `Engine` itself: every test here says its mode
from tests.omni_prefix_fast.harness import ManualRuntime, column, per_token
from tests.omni_prefix_fast.test_against_oracle import Due, Fuzz

LIMIT_S = 20.0
DEFER = ModelCachePolicy(deferred_keys=frozenset("d"))
D = {"d": per_token(1)}


@dataclass
class Scene:
    """An asynchronous engine, its device, and what happened on which thread."""

    directed: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.actions: list[tuple[str, str]] = []
        """(thread, action) of the trace, in order."""
        self.calls: set[tuple[str, str]] = set()
        """(thread, operation) of the device."""
        self.wrong: list[str] = []
        """What was done under the state lock and must not be."""
        self.waits: list[Wait] = []
        self.on_wait: Callable[[Wait], None] = lambda _: None
        self._seen: dict[tuple[str, str], threading.Event] = {}
        self._gates: dict[str, Gate] = {}
        self.runtime = WatchedRuntime(self._waiting)
        self.device = SimulatedDevice(directed=self.directed, on_call=self._called, patience_s=LIMIT_S)
        settings = {"policy": DEFER, "num_blocks": 16, "staging_depth": 4, **self.settings}
        self.engine = harness.Engine(
            eager=False,
            runtime=self.runtime,
            device=self.device,
            trace=self._traced,
            allocate=self._allocate,
            **settings,
        )
        self.cache = self.engine.cache

    def _waiting(self, wait: Wait) -> None:
        # Table locks are held for moments and have no limit: a collision on one is no wait for anything.
        if not (wait.kind == "lock" and wait.limit_s is None):
            self.waits.append(wait)
            self.on_wait(wait)

    def _called(self, operation: str) -> None:
        self.calls.add((role(), operation))
        self.forbid_state_lock(operation)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.forbid_state_lock("allocate")
        return torch.full(tuple(shape), 77, dtype=torch.int64).to(dtype)

    def _traced(self, action: str, _: Mapping[str, object]) -> None:
        self.actions.append((role(), action))
        self.happened(role(), action).set()
        gate = self._gates.pop(action, None)
        if gate is not None:
            gate.stop()

    def forbid_state_lock(self, what: str) -> None:
        """Note it if the calling thread holds the state lock."""
        if STATE_LOCK in self.runtime.held:
            self.wrong.append(f"{role()}: {what} under the state lock")

    def happened(self, thread: str, action: str) -> threading.Event:
        """Set once `thread` has reached `action`."""
        return self._seen.setdefault((thread, action), threading.Event())

    def stop_at(self, action: str) -> Gate:
        """Stop the next thread that reaches `action`."""
        gate = self._gates[action] = Gate()
        return gate

    def engine_waits(self) -> list[tuple[str, str]]:
        """What the engine thread waited for, in order."""
        return [(w.kind, w.name) for w in self.waits if w.thread == "engine"]

    def land_when(self, thread: str) -> None:
        """Land everything at the moment at which `thread` begins to wait, and from then on at once."""

        def land(wait: Wait) -> None:
            if wait.thread == thread:
                self.device.directed = False
                self.device.land_all()

        self.on_wait = land

    def builder(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call on the output builder's thread."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
                future.set_exception(error)

        threading.Thread(target=run, name="builder", daemon=True).start()
        return future

    def waits_for(self, thread: str, count: int = 1) -> threading.Event:
        """Set once `thread` has begun to wait `count` times from now."""
        begun = threading.Event()
        left = [count]
        before = self.on_wait

        def told(wait: Wait) -> None:
            before(wait)
            if wait.thread == thread:
                left[0] -= 1
                if left[0] <= 0:
                    begun.set()

        self.on_wait = told
        return begun


class Gate:
    """Holds one thread until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def stop(self) -> None:
        self.reached.set()
        assert self.opened.wait(LIMIT_S)


def until(event: Event) -> None:
    """It has to happen."""
    assert event.wait(LIMIT_S), "it never happened"


def all_of(outs: StageCacheOutputs, req_id: str) -> list[int]:
    """Rows of a request, the same under hidden states and d."""
    assert outs.hidden_states is not None
    rows = column(outs.hidden_states[req_id])
    assert column(outs.mm_outputs["d"][req_id]) == rows
    return rows


def taken(engine: harness.Engine, step: int, req_id: str) -> list[int]:
    """Materialize a step for one request: the values of its rows."""
    return all_of(engine.take(step, req_id), req_id)


# ------------------------------------------------------------------------------------------ threads and locks

MAY_WAIT_FOR = {
    "engine": {
        ("event", "write"),
        ("condition", "staging pages"),
        ("lock", "hit read"),
        ("condition", "prefetch queue"),
    },
    "builder": {("event", "write"), ("lock", "hit read")},
    "committer": {("condition", "committer queue")},
    "prefetch": {("condition", "prefetch queue"), ("event", "write"), ("lock", "hit read")},
}
"""The seed's table of threads. The engine waits for the prefetch queue in `drain` only. Waits of the device stand in
`MAY_CALL`."""

MAY_CALL = {
    "engine": {"launch", "clone", "rows_to_host", "copy_to_host"},
    "builder": {"rows_to_host", "copy_to_host"},
    "committer": {"wait", "gather_to_host", "copy_to_host"},
    "prefetch": {"rows_to_host", "copy_to_host"},
}
"""Only the committer waits for transfers and flushes deferred rows; the engine copies rows only to rescue them."""


def kind_of(wait: Wait) -> tuple[str, str]:
    """A wait without the number or request in its name."""
    return wait.kind, " ".join(wait.name.split()[: 1 if wait.name.startswith("write") else 2])


def busy_run(scene: Scene, steps: int) -> None:
    """Decoding, hits, same-step hits, recycled blocks, finishes, budget pressure; materialized by a builder."""
    engine = scene.engine
    due: list[Future[Any]] = []
    gone: list[str] = []
    for i in range(steps):
        first, second = 4 * (i % 3), 4 * (i % 3) + 1
        a, b, c = f"a{i}", f"b{i}", f"c{i}"
        step = engine.step(new=[(a, [first], 0, 4)], finished=gone, base={a: 10 * i}, mm=D)
        hits = [(b, [first, second], 4, 1), (c, [first, second + 1], 4, 1)]
        late = engine.step(new=hits, cached=[(a, 1, [15 - i % 3])], base={b: 10 * i, c: 10 * i}, mm=D)
        gone = [a, b, c]
        due = [future for future in due if not future.done() or future.result(0) is None]
        for future in due:
            future.result(LIMIT_S)
        right = {
            step: {a: [10 * i + p for p in range(4)]},
            late: {r: [10 * i + p for p in range(5)] for r in (b, c)},
        }

        def check(right: dict[int, dict[str, list[int]]] = right) -> None:
            for step_id, of_step in right.items():
                outs = scene.cache.materialize(step_id, list(of_step))
                assert {r: all_of(outs, r) for r in of_step} == of_step

        due.append(scene.builder(check))
    for future in due:
        future.result(LIMIT_S)
    scene.cache.drain()


@pytest.mark.parametrize("budget", [10**6, 60, 24])
def test_each_thread_waits_only_for_what_the_table_allows(budget: int) -> None:
    """A busy run: no thread blocks on anything else, none without a limit, none while it holds the state lock."""
    scene = Scene(directed=False, settings={"gpu_staging_bytes": budget})
    busy_run(scene, 25)
    scene.cache.shutdown()
    waits = [w for w in scene.waits if w.kind != "join"]
    assert [w for w in waits if kind_of(w) not in MAY_WAIT_FOR[w.thread]] == []
    assert [w for w in scene.waits if w.limit_s is None] == []
    assert [w for w in scene.waits if STATE_LOCK in w.held] == []
    assert {w.thread for w in scene.waits if w.kind == "join"} <= {"engine"}


@pytest.mark.parametrize("budget", [10**6, 24])
def test_each_thread_uses_the_device_only_for_what_is_its_own(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers are waited for, and deferred rows flushed, by the committer alone; it alone writes the pool."""
    writers: set[str] = set()
    write = PrefixBlockPool.write

    def watched(pool: PrefixBlockPool, *args: Any) -> None:
        writers.add(role())
        write(pool, *args)

    monkeypatch.setattr(PrefixBlockPool, "write", watched)
    scene = Scene(directed=False, settings={"gpu_staging_bytes": budget})
    busy_run(scene, 25)
    assert writers == {"committer"}
    assert {(t, op) for t, op in scene.calls if op not in MAY_CALL[t]} == set()
    assert {("committer", "wait"), ("committer", "gather_to_host"), ("engine", "launch")} <= scene.calls


def test_the_locks_cover_tables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the state lock no row is copied, no memory allocated, no device asked to do anything."""
    scene = Scene(directed=False)
    for name in ("write", "gather", "open"):
        inner = getattr(PrefixBlockPool, name)

        def watched(*args: Any, inner: Callable[..., Any] = inner, name: str = name, **named: Any) -> Any:
            scene.forbid_state_lock(f"pool {name}")
            return inner(*args, **named)

        monkeypatch.setattr(PrefixBlockPool, name, watched)
    busy_run(scene, 25)
    assert scene.wrong == []


def test_the_committer_never_takes_the_state_lock() -> None:
    """Not for a write, not for a failure."""
    scene = Scene(directed=False)
    busy_run(scene, 10)
    scene.device.fail("wait")
    held = scene.stop_at("claim_copy")
    scene.engine.step(new=[("last", [0], 0, 4)], mm=D)
    held.opened.set()
    with pytest.raises(OmniPrefixCacheWriteError):
        scene.cache.drain()
    assert {name for thread, name in scene.runtime.taken if thread == "committer"} <= {
        *("committer queue", "staging pages", "counters"),
    }


def test_locks_are_taken_in_one_order() -> None:
    """A read's lock, then the state lock, then the committer's or the pages': no two threads can block each other."""
    scene = Scene(directed=False, settings={"gpu_staging_bytes": 40})
    busy_run(scene, 25)
    order = {(" ".join(a.split()[:2]), " ".join(b.split()[:2])) for a, b in scene.runtime.order}
    assert cycle(order) == []
    assert ("hit read", STATE_LOCK) in order
    assert {held for held, asked in order if asked == STATE_LOCK} == {"hit read"}


# ------------------------------------------------------------------------------------------ the engine thread


def test_the_engine_waits_for_nothing_in_a_steady_run() -> None:
    """Forty steps of decoding, hits and finishes while a builder hands over: not one wait on the engine thread."""
    # Blocks are not used again: a claim of rows that somebody is about to gather does wait for them.
    scene = Scene(directed=False, settings={"staging_depth": 80, "num_blocks": 64})
    engine = scene.engine
    steps: list[tuple[int, str, int]] = []
    for i in range(20):
        a, b, gone = f"a{i}", f"b{i}", [f"a{i - 1}", f"b{i - 1}"]
        block = 3 * i
        steps.append((engine.step(new=[(a, [block, block + 1], 0, 5)], finished=gone, base={a: i}, mm=D), a, i))
        step = engine.step(cached=[(a, 1)], new=[(b, [block, block + 2], 4, 1)], base={b: i}, mm=D)
        steps.append((step, b, i))
    handed = scene.builder(lambda: [all_of(engine.take(step, r), r) for step, r, _ in steps])
    for _ in range(2):
        scene.engine.step(cached=[("a19", 1)], mm=D)
    assert handed.result(LIMIT_S) == [[i + p for p in range(5)] for _, _, i in steps]
    assert scene.engine_waits() == []


def test_steps_are_started_and_saved_while_nothing_has_landed() -> None:
    """Three steps of a request and its finish return with every copy in flight."""
    scene = Scene()
    scene.engine.step(new=[("A", [0, 1], 0, 4)], mm=D)
    scene.engine.step(cached=[("A", 1)], mm=D)
    scene.engine.step(cached=[("A", 1)], mm=D)
    scene.engine.start(finished=["A"])
    assert scene.device.totals.launches == 3
    assert scene.device.pending > 0
    assert scene.engine_waits() == []
    scene.land_when("engine")
    scene.cache.drain()


def test_discarding_waits_for_no_gather() -> None:
    """The prefetch thread is in the middle of the hit's rows: the step is discarded at once, and nothing stays held."""
    scene = Scene(directed=False)
    scene.engine.take(scene.engine.step(new=[("A", [0], 0, 4)], mm=D), "A")
    held = scene.device.hold("rows_to_host")
    step = scene.engine.step(new=[("B", [0, 1], 4, 1)], mm=D)
    until(held.reached)
    scene.waits.clear()
    scene.cache.discard_step(step)
    assert scene.engine_waits() == []
    assert not any(scene.cache.inspect().pins)
    held.release()
    assert scene.engine.settled().charged == 5 * 4


@dataclass(frozen=True)
class Forced:
    """Something that cannot go on before a copy has landed: how it comes about, and what the engine waits for then."""

    name: str
    prepare: Callable[[Scene], Any]
    then: Callable[[Scene, Any], Any]
    waits: list[tuple[str, str]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _save_and_discard(scene: Scene) -> None:
    scene.cache.discard_step(scene.engine.step(new=[("A", [0], 0, 4)], mm=D))


def _save_and_finish(scene: Scene) -> None:
    _save_and_discard(scene)
    scene.engine.start(finished=["A"])


def _plan_on_transit(scene: Scene) -> int:
    scene.cache.discard_step(scene.engine.step(new=[("A", [0], 0, 4)], mm=D))
    begun = scene.waits_for("prefetch")
    step = scene.engine.step(new=[("B", [0, 1], 4, 1)], mm=D)
    until(begun)  # it waits for A's write, and holds the read
    return step


FORCED = [
    Forced(
        "page",
        _save_and_discard,
        lambda scene, _: scene.engine.step(cached=[("A", 1, [1])], mm=D),
        [("condition", "staging pages")],
        {"staging_depth": 1},
    ),
    Forced(
        "budget",
        _save_and_discard,
        lambda scene, _: scene.engine.step(cached=[("A", 4, [1])], mm=D),
        [("event", "write 1 done")],  # after the immediate write of its first step
        {"gpu_staging_bytes": 16},
    ),
    Forced(
        "budget, write sealed by a finish",
        _save_and_finish,
        lambda scene, _: scene.engine.step(new=[("B", [1], 0, 4)], mm=D),
        [("event", "write 1 done")],
        {"gpu_staging_bytes": 16},
    ),
    Forced(
        "claim of a planned row",
        _plan_on_transit,
        lambda scene, _: scene.engine.step(new=[("C", [0], 0, 4)], finished=["A"], mm=D),
        [("lock", "hit read of 'B', step 1")],
    ),
    Forced(
        "hit on a row in transit, materialized by the engine",
        _plan_on_transit,
        lambda scene, step: scene.engine.take(step, "B"),
        [("lock", "hit read of 'B', step 1"), ("event", "write 2 host ready")],
    ),
    Forced(
        "own rows, materialized by the engine",
        lambda scene: scene.engine.step(new=[("A", [0], 0, 4)], mm=D),
        lambda scene, step: scene.engine.take(step, "A"),
        [("event", "write 0 host ready")],
    ),
    Forced(
        "drain",
        _save_and_discard,
        lambda scene, _: scene.cache.drain(),
        [("event", "write 0 done")],
    ),
]


@pytest.mark.parametrize("forced", FORCED, ids=str)
def test_the_engine_waits_for_exactly_what_it_needs(forced: Forced) -> None:
    """All is in flight, and lands at the moment at which the engine begins to wait: for the one thing named here."""
    scene = Scene(settings=dict(forced.settings))
    prepared = forced.prepare(scene)
    assert scene.engine_waits() == []
    scene.land_when("engine")
    forced.then(scene, prepared)
    assert scene.engine_waits()[:1] == forced.waits[:1]
    assert set(scene.engine_waits()) <= set(forced.waits)
    scene.cache.drain()


# ------------------------------------------------------------------------------------------ prefetch


def test_hits_are_gathered_while_the_forward_runs() -> None:
    """Between start and save the prefetch thread fetches the hit; handing it over gathers nothing more."""
    scene = Scene(directed=False)
    scene.engine.take(scene.engine.step(new=[("A", [0], 0, 4)], mm=D), "A")
    scene.engine.start(new=[("B", [0, 1], 4, 2)])
    until(scene.happened("prefetch", "fetch_read"))
    step = scene.engine.save(mm=D)
    assert all_of(scene.engine.take(step, "B"), "B") == [0, 1, 2, 3, 4, 5]
    assert [thread for thread, action in scene.actions if action == "fetch_read"] == ["prefetch"]


@pytest.mark.parametrize("moment", ["gathered before the save", "in the middle of it", "whenever it happens"])
def test_a_same_step_hit_on_a_recycled_block_is_gathered_anew(moment: str) -> None:
    """B hits the block that A computes in the same step; whatever was gathered of its former tenant is thrown away."""
    scene = Scene(directed=False)
    scene.engine.take(scene.engine.step(new=[("old", [0], 0, 4)], base={"old": 900}, mm=D), "old")
    scene.cache.drain()
    held = scene.device.hold("rows_to_host") if moment == "in the middle of it" else None
    scene.engine.start(new=[("A", [0], 0, 4), ("B", [0, 1], 4, 1)], base={"A": 10, "B": 10})
    if held is not None:
        until(held.reached)
    elif moment == "gathered before the save":
        until(scene.happened("prefetch", "fetch_read"))
    step = scene.engine.save(mm=D)
    if held is not None:
        held.release()
    assert all_of(scene.engine.take(step, "B"), "B") == [10, 11, 12, 13, 14]
    assert scene.cache.statistics().reads_same_step == 1
    scene.engine.step(new=[("late", [2], 0, 1)], finished=["old", "A", "B"], mm=D)
    assert not any(scene.engine.settled().pins)


def test_the_prefetch_thread_lives_on_when_the_device_raises() -> None:
    """What it could not gather is gathered by the one who needs it; the next hit is prefetched again."""
    scene = Scene(directed=False)
    scene.engine.take(scene.engine.step(new=[("A", [0], 0, 4)], mm=D), "A")
    scene.device.fail("rows_to_host")
    step = scene.engine.step(new=[("B", [0, 1], 4, 1)], mm=D)
    scene.cache.drain()
    assert ("prefetch", "fetch_read") not in scene.actions
    assert all_of(scene.engine.take(step, "B"), "B") == [0, 1, 2, 3, 4]
    step = scene.engine.step(new=[("C", [0, 2], 4, 1)], mm=D)
    until(scene.happened("prefetch", "fetch_read"))
    assert all_of(scene.engine.take(step, "C"), "C") == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------------------------ handing over


def test_materialize_waits_for_its_own_rows_on_the_host_and_not_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool write hangs: the rows are handed over all the same, as soon as they have landed."""
    gate, write = Gate(), PrefixBlockPool.write

    def hanging(pool: PrefixBlockPool, *args: Any) -> None:
        gate.stop()
        write(pool, *args)

    monkeypatch.setattr(PrefixBlockPool, "write", hanging)
    scene = Scene()
    step = scene.engine.step(new=[("A", [0], 0, 4)], mm=D)
    begun = scene.waits_for("builder")
    handed = scene.builder(lambda: all_of(scene.engine.take(step, "A"), "A"))
    until(begun)
    assert not handed.done()
    scene.device.land_all()
    assert handed.result(LIMIT_S) == [0, 1, 2, 3]
    assert [(w.kind, w.name) for w in scene.waits if w.thread == "builder"] == [("event", "write 0 host ready")]
    gate.opened.set()
    scene.cache.drain()


def test_rows_that_landed_piece_by_piece_are_whole() -> None:
    """The builder is woken by the last piece, not by an earlier one."""
    scene = Scene()
    step = scene.engine.step(new=[("A", [0, 1, 2, 3], 0, 16)], mm=D)
    begun = scene.waits_for("builder")
    handed = scene.builder(lambda: all_of(scene.engine.take(step, "A"), "A"))
    until(begun)
    while scene.device.pending > 1:
        scene.device.land_next(newest=True)
    assert not handed.done()
    scene.device.land_all()
    assert handed.result(LIMIT_S) == list(range(16))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
@pytest.mark.parametrize("newest", [True, False], ids=["newest lands first", "oldest lands first"])
def test_steps_are_handed_over_late_and_in_any_order(order: list[int], newest: bool) -> None:
    """Three steps in flight, landing and handed over in any order: each has its own rows and its hit's."""
    scene = Scene()
    engine = scene.engine
    steps = [
        (engine.step(new=[("A", [0], 0, 4)], mm=D), "A", [0, 1, 2, 3]),
        (engine.step(new=[("B", [0, 1], 4, 2)], mm=D), "B", [0, 1, 2, 3, 4, 5]),
        (engine.step(new=[("C", [0, 2], 4, 1)], base={"C": 50}, mm=D), "C", [0, 1, 2, 3, 54]),
    ]
    handed = [scene.builder(partial(taken, engine, *steps[at][:2])) for at in order]
    while scene.device.land_next(newest=newest):
        pass
    scene.device.directed = False
    assert [future.result(LIMIT_S) for future in handed] == [steps[at][2] for at in order]
    assert not any(scene.engine.settled().pins)


def test_a_discarded_step_in_flight_keeps_its_page_until_it_has_landed() -> None:
    """Nobody wants the step, but its copies still go to the page, and its rows to the pool."""
    scene = Scene()
    scene.cache.discard_step(scene.engine.step(new=[("A", [0], 0, 4)], mm=D))
    assert [len(holders) for holders in scene.cache.inspect().pages] == [1, 0, 0, 0]
    scene.device.land_all()
    assert not any(scene.engine.settled().pages)
    scene.device.directed = False
    step = scene.engine.step(new=[("B", [0, 1], 4, 1)], mm=D)
    assert all_of(scene.engine.take(step, "B"), "B") == [0, 1, 2, 3, 4]


def test_a_save_that_fails_has_started_no_copy() -> None:
    """A claim cannot rescue a planned row: the page goes back, nothing is on its way to it, the next try is right."""
    scene = Scene(directed=False)
    scene.engine.take(scene.engine.step(new=[("A", [0], 0, 4)], mm=D), "A")
    scene.device.fail("rows_to_host")  # the prefetch thread's
    late = scene.engine.step(new=[("B", [0, 1], 4, 1)], mm=D)
    scene.cache.drain()
    scene.device.fail("rows_to_host", error=OSError("the device is gone"))
    scene.engine.start(new=[("C", [0], 0, 4)], finished=["A"], base={"C": 50})
    before, launches = scene.engine.settled(), scene.device.totals.launches
    with pytest.raises(OSError, match="the device is gone"):
        scene.engine.save(mm=D)
    assert scene.device.totals.launches == launches
    assert scene.cache.inspect() == before
    step = scene.engine.save(mm=D)
    assert all_of(scene.engine.take(late, "B"), "B") == [0, 1, 2, 3, 4]
    assert all_of(scene.engine.take(step, "C"), "C") == [50, 51, 52, 53]


# ------------------------------------------------------------------------------------------ deferred rows


@pytest.mark.parametrize("how", ["finish", "abort", "budget"])
def test_deferred_rows_are_flushed_while_copies_are_in_flight(how: str) -> None:
    """The flush waits in the queue behind the step's copies; a hit in between has the rows from the device."""
    budget = 20 if how == "budget" else 10**6
    scene = Scene(settings={"gpu_staging_bytes": budget, "staging_depth": 8})
    engine = scene.engine
    first = engine.step(new=[("A", [0], 0, 4)], mm=D)
    if how == "abort":
        scene.cache.discard_step(first)
    step = engine.step(new=[("B", [0, 1], 4, 1)], finished=["A"] if how != "budget" else [], mm=D)
    assert scene.engine_waits() == []
    scene.land_when("engine")
    late = engine.step(new=[("C", [0, 2], 4, 4)], base={"C": 50}, mm=D)
    scene.device.directed = False
    scene.device.land_all()
    assert all_of(engine.take(step, "B"), "B") == [0, 1, 2, 3, 4]
    assert all_of(engine.take(late, "C"), "C") == [0, 1, 2, 3, 54, 55, 56, 57]
    assert (scene.cache.statistics().writes_forced > 0) == (how == "budget")
    engine.start(finished=["A", "B", "C"])
    seen = engine.settled()
    assert (seen.charged, seen.chunks, seen.open_writes, seen.tasks) == (0, (), {}, {})


def test_device_bytes_are_those_charged() -> None:
    """At rest, what lives on the device is what the budget was charged for; after the finishes, nothing."""
    scene = Scene(directed=False, settings={"staging_depth": 8})
    for i in range(5):
        scene.cache.discard_step(scene.engine.step(new=[(f"r{i}", [i], 0, 4)], mm=D))
        assert scene.engine.settled().charged == scene.device.live_bytes == 16 * (i + 1)
    scene.engine.start(finished=["r1", "r3"])
    assert scene.engine.settled().charged == scene.device.live_bytes == 16 * 3
    scene.engine.start(finished=["r0", "r2", "r4"])
    assert scene.engine.settled().charged == scene.device.live_bytes == 0


# ------------------------------------------------------------------------------------------ failures


def _break_copy(scene: Scene, _: pytest.MonkeyPatch) -> None:
    scene.device.fail("wait", error=OSError("the copy is lost"))


def _break_pool(_: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError("the pool is gone")

    monkeypatch.setattr(PrefixBlockPool, "write", failing)


BREAK = {"copy": _break_copy, "pool": _break_pool}


def everything_is_given_back(scene: Scene, step: int) -> None:
    """Every entry says what failed; no page, byte, pin, task or step is held; the device's memory is free."""
    entries: list[Callable[[], object]] = [
        lambda: scene.cache.new_step_starts(scene.engine.schedule()),
        lambda: scene.engine.save(mm=D),
        lambda: scene.cache.materialize(step, []),
        lambda: scene.cache.discard_step(step),
        scene.cache.drain,
        lambda: scene.cache.register_policy(DEFER),
    ]
    for entry in entries * 2:
        with pytest.raises(OmniPrefixCacheWriteError, match=r"write \d+ .*failed: OSError: the"):
            entry()
    seen = scene.cache.inspect()
    assert (seen.charged, seen.chunks, seen.open_writes, seen.tasks, seen.unconsumed) == (0, (), {}, {}, ())
    assert not any(seen.pins)
    assert not any(seen.pages)
    scene.device.directed = False
    scene.device.land_all()
    scene.cache.shutdown()
    gc.collect()
    assert scene.device.live_bytes == 0


@pytest.mark.parametrize("what", BREAK)
def test_a_builder_that_waits_is_told_the_failure(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder waits for its own rows, or for those that it hit, as the write fails: it raises, naming it."""
    scene = Scene()
    BREAK[what](scene, monkeypatch)
    held = scene.stop_at("claim_copy")
    step = scene.engine.step(new=[("A", [0], 0, 4), ("B", [0, 1], 4, 1)], mm=D)
    until(held.reached)
    begun = scene.waits_for("builder")
    handed = scene.builder(lambda: scene.engine.take(step, "A", "B"))
    until(begun)
    scene.device.directed = False
    held.opened.set()
    with pytest.raises(OmniPrefixCacheWriteError, match=r"write \d+ \(step 0\) failed: OSError: the"):
        handed.result(LIMIT_S)
    del handed  # its error keeps what stood on the builder's stack
    everything_is_given_back(scene, step)


@pytest.mark.parametrize("what", BREAK)
def test_a_save_that_waits_for_a_page_is_told_the_failure(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page will ever be free: the save does not wait for its deadline."""
    scene = Scene(settings={"staging_depth": 1})
    BREAK[what](scene, monkeypatch)
    held = scene.stop_at("claim_copy")
    step = scene.engine.step(new=[("A", [0], 0, 4)], mm=D)
    until(held.reached)
    scene.engine.start(cached=[("A", 1, [1])])

    def go_on(wait: Wait) -> None:
        if wait.thread == "engine":
            scene.device.directed = False
            held.opened.set()

    scene.on_wait = go_on
    with pytest.raises(OmniPrefixCacheWriteError, match=r"write \d+ \(step 0\) failed: OSError: the"):
        scene.engine.save(mm=D)
    assert scene.engine_waits() == [("condition", "staging pages")]
    everything_is_given_back(scene, step)


@pytest.mark.parametrize("what", BREAK)
def test_the_prefetch_thread_survives_a_failed_write(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the write that fails; the hit is left, the failure told to whoever asks for the step."""
    scene = Scene()
    BREAK[what](scene, monkeypatch)
    held = scene.stop_at("claim_copy")
    scene.cache.discard_step(scene.engine.step(new=[("A", [0], 0, 4)], mm=D))
    until(held.reached)
    begun = scene.waits_for("prefetch")
    step = scene.engine.step(new=[("B", [0, 1], 4, 1)], mm=D)
    until(begun)
    scene.device.directed = False
    held.opened.set()
    with pytest.raises(OmniPrefixCacheWriteError):
        scene.cache.drain()
    everything_is_given_back(scene, step)


def test_a_failed_flush_of_deferred_rows_is_loud() -> None:
    """The copy of a finished request's rows fails in the background: the next call says so, naming the request."""
    scene = Scene(directed=False)
    step = scene.engine.step(new=[("A", [0], 0, 4)], mm=D)
    scene.device.fail("gather_to_host", error=OSError("the flush is lost"))
    scene.engine.start(finished=["A"])
    with pytest.raises(OmniPrefixCacheWriteError, match=r"deferred write 1 of request 'A'.*the flush is lost"):
        scene.cache.drain()
    everything_is_given_back(scene, step)


def test_writes_behind_a_failure_fail_too_and_are_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps are queued, the first fails: the others' waiters raise the first one's failure, at once."""
    written: list[str] = []
    scene = Scene()
    scene.device.fail("wait", error=OSError("the copy is lost"))
    monkeypatch.setattr(PrefixBlockPool, "write", lambda _, key, *__: written.append(key))
    held = scene.stop_at("claim_copy")
    steps = [scene.engine.step(new=[(f"r{i}", [i], 0, 4)], mm=D) for i in range(3)]
    until(held.reached)
    begun = scene.waits_for("builder", 2)
    handed = [scene.builder(partial(scene.engine.take, steps[at], f"r{at}")) for at in (1, 2)]
    until(begun)
    held.opened.set()
    while handed:
        with pytest.raises(OmniPrefixCacheWriteError, match=r"write \d+ \(step 0\) failed"):
            handed.pop().result(LIMIT_S)
    assert written == []
    everything_is_given_back(scene, steps[0])


# ------------------------------------------------------------------------------------------ shutdown


def test_shutdown_with_copies_in_flight_lets_go_of_everything() -> None:
    """The write in progress ends, what is queued is dropped, waiters are told; a second shutdown changes nothing."""
    scene = Scene(settings={"staging_depth": 8})
    steps = [scene.engine.step(new=[(f"r{i}", [i], 0, 4)], mm=D) for i in range(3)]
    scene.engine.start(new=[("B", [2, 5], 4, 1)], finished=["r0"])
    begun = scene.waits_for("builder")
    handed = scene.builder(lambda: scene.engine.take(steps[2], "r2"))
    until(begun)
    assert scene.device.until_waited()
    scene.land_when("engine")
    scene.cache.shutdown()
    with pytest.raises(OmniPrefixCacheClosedError):
        handed.result(LIMIT_S)
    scene.cache.shutdown()
    with pytest.raises(OmniPrefixCacheClosedError):
        scene.engine.save(mm=D)
    seen = scene.cache.inspect()
    assert (seen.charged, seen.chunks, seen.open_writes, seen.tasks, seen.unconsumed) == (0, (), {}, {}, ())
    assert not any(seen.pins)
    assert not any(seen.pages)
    assert scene.device.live_bytes == 0
    assert all(w.limit_s is not None for w in scene.waits)


def test_shutdown_does_not_wait_for_a_copy_that_never_lands() -> None:
    """It gives up in time; when the copy lands after all, nothing comes of it."""
    scene = Scene(settings={"staging_claim_timeout_s": 0.05})
    scene.engine.step(new=[("A", [0], 0, 4)], mm=D)
    assert scene.device.until_waited()
    scene.cache.shutdown()
    assert ("join", "committer") in scene.engine_waits()
    assert not any(scene.cache.inspect().pages)
    ended = scene.happened("committer", "write_pool")
    scene.device.land_all()
    until(ended)
    scene.cache.shutdown()
    assert scene.device.live_bytes == 0


# ------------------------------------------------------------------------------------------ deadlines


class Idle:
    """A thread that is never given a turn."""

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None

    def is_alive(self) -> bool:
        return True


class StuckRuntime(ManualRuntime):
    """A clock that moves only when somebody waits, and threads of the cache's own that never run."""

    def spawn(self, name: str, target: Callable[[], None]) -> Idle:  # type: ignore[override]  # noqa: ARG002
        return Idle()


@pytest.mark.parametrize("timeout_s", [0.5, 30.0])
def test_nobody_waits_beyond_the_one_deadline(timeout_s: float) -> None:
    """The committer never runs: each call gives up after exactly the limit, naming the task, its state, the steps."""
    runtime = StuckRuntime()
    engine = harness.Engine(
        eager=False, runtime=runtime, device=SimulatedDevice(directed=True), policy=DEFER, staging_depth=2,
        staging_claim_timeout_s=timeout_s, gpu_staging_bytes=20,
    )  # fmt: skip

    def gives_up(call: Callable[[], object], words: str) -> None:
        before = runtime.now
        with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=words):
            call()
        assert runtime.now - before == pytest.approx(timeout_s)

    first = engine.step(new=[("A", [0], 0, 4)], mm=D)
    second = engine.step(new=[("B", [0, 1], 4, 1)], mm=D)
    engine.start(new=[("C", [2], 0, 4)])
    gives_up(lambda: engine.save(mm=D), rf"Step ids never consumed: \[{first}, {second}\]")
    gives_up(lambda: engine.take(second, "B"), r"write 0 \(step 0\) is still QUEUED after .*staging_claim_timeout_s")
    gives_up(lambda: engine.take(first, "A"), r"write 0 \(step 0\) is still QUEUED")
    gives_up(engine.cache.drain, r"write 0 \(step 0\) is still QUEUED")
    gives_up(lambda: engine.save(mm=D), r"no staging page became free.*writes in flight: 2")
    engine.cache.shutdown()


def test_drain_has_a_limit_of_its_own() -> None:
    """The caller's limit holds instead of the cache's."""
    runtime = StuckRuntime()
    engine = harness.Engine(eager=False, runtime=runtime, device=SimulatedDevice(directed=True))
    engine.step(new=[("A", [0], 0, 4)])
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"after 2 s"):
        engine.cache.drain(2.0)
    assert runtime.now == 2.0
    engine.cache.shutdown()


# ------------------------------------------------------------------------------------------ random schedules


class ConcurrentFuzz(Fuzz):
    """The random engine beside its naive cache, with some steps handed over by a builder while the engine goes on."""

    def __init__(self, seed: int, device: SimulatedDevice) -> None:
        super().__init__(seed, eager=False, device=device)
        self.device = device
        self.builder = ThreadPoolExecutor(1, thread_name_prefix="builder")
        self.handed: list[Future[None]] = []

    def consume(self, keep: int) -> None:
        if self.random.random() < 0.4:
            super().consume(keep)
        while len(self.due) > keep:
            due = self.due.pop(self.random.randrange(len(self.due)))
            asked = [r for r in due.spans if self.random.random() < 0.85]
            self.handed.append(self.builder.submit(self._hand_over, due, asked))
        self.handed = [future for future in self.handed if not future.done() or future.result() is not None]

    def _hand_over(self, due: Due, asked: list[str]) -> None:
        due.check(self.cache, asked)

    def finish(self) -> None:
        for future in self.handed:
            future.result(LIMIT_S)
        self.builder.shutdown()
        self.cache.drain()


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_on_a_late_device_against_the_naive_cache(seed: int) -> None:
    """Every row of every step is the naive cache's, whoever hands it over and whenever its copies land."""
    print(f"seed {seed}")
    device = SimulatedDevice(seed)
    fuzz = ConcurrentFuzz(2000 + seed, device)
    fuzz.run(120)
    fuzz.finish()
    assert fuzz.hits
    seen = fuzz.cache.inspect()
    assert not any(seen.pins)
    assert not any(seen.pages)
    assert (seen.charged, seen.chunks, seen.open_writes, seen.tasks, seen.emitted) == (0, (), {}, {}, {})
    assert device.live_bytes == 0
    fuzz.cache.shutdown()


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name)
def test_a_device_that_breaks_its_promise_is_seen(fault: Fault) -> None:
    """Without the freeze, without holding the frozen rows, or without waiting, rows come out wrong, and are noticed."""
    fuzz = Fuzz(2000, eager=False, device=SimulatedDevice(1, faults=[fault]))
    with pytest.raises(AssertionError):
        fuzz.run(120)
    fuzz.cache.shutdown()


def test_a_copy_that_nobody_lands_is_an_error_and_no_hang() -> None:
    """The simulated device gives up by itself, and the cache says which write it was."""
    engine = harness.Engine(eager=False, device=SimulatedDevice(directed=True, patience_s=0.05))
    step = engine.step(new=[("A", [0], 0, 4)])
    with pytest.raises(OmniPrefixCacheWriteError, match=r"write 0 \(step 0\) failed: SimulatedDeviceError") as raised:
        engine.take(step, "A")
    assert isinstance(raised.value.__cause__, SimulatedDeviceError)
