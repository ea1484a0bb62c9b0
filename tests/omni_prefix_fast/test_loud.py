"""What cannot be right is an error, never rows: failures met half-way, steps that the cache could not take in."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from inspect import CO_GENERATOR
from types import FrameType

import pytest
import torch

from omni_prefix_fast import (
    HIDDEN_KEY,
    ModelCachePolicy,
    OmniPrefixCacheClosedError,
    OmniPrefixCacheConfigError,
    OmniPrefixCacheContractError,
    OmniPrefixCacheRowError,
    OmniPrefixCacheUnmatchError,
    OmniPrefixCacheWriteError,
)
from omni_prefix_fast.runtime import ThreadRuntime
from tests.omni_prefix_fast.harness import Engine, Gate, column

DEADLINE_S = 20.0
ANSWER_S = 30.0
"""How long a cache may take to answer behind an interrupt."""


@pytest.mark.eager_only("the hit has to be ungathered when the builder is stopped")
@pytest.mark.parametrize("end", ["shutdown", "failure"])
def test_builder_stopped_before_its_gather_gets_an_error_not_zeros(end: str) -> None:
    """The cache ends while a builder has taken its step and gathered nothing: it raises and hands over no zeros."""
    gate = Gate("take_step")
    engine = Engine(trace=gate)
    engine.cache.discard_step(engine.step(new=[("A", [0], 0, 4)], base={"A": 100}))
    hit = engine.step(new=[("B", [0, 1], 4, 2)], finished=["A"], base={"B": 100})
    gate.armed = True
    with ThreadPoolExecutor(1) as pool:
        builder = pool.submit(engine.hidden, hit, "B")
        assert gate.reached.wait(DEADLINE_S)
        if end == "shutdown":
            engine.cache.shutdown()
        else:
            engine.view.order.append("B")  # a batch that lists a request twice cannot be given up
            engine.start(new=[("C", [2], 0, 4)])
            engine.view.order = ["C", "C"]
            with pytest.raises(OmniPrefixCacheWriteError, match="giving up step 2"):
                engine.cache.new_step_starts(engine.schedule(new=[("D", [3], 0, 1)]))
        gate.opened.set()
        expected = OmniPrefixCacheClosedError if end == "shutdown" else OmniPrefixCacheWriteError
        with pytest.raises(expected):
            builder.result(DEADLINE_S)


@pytest.mark.parametrize("end", ["shutdown", "failure"])
def test_a_step_let_go_of_while_its_builder_comes_is_told_as_the_end_it_was(end: str) -> None:
    """The cache ends after `materialize` began and before it took its step: that end is raised, no wrong use."""
    engine = Engine()
    step = engine.step(new=[("A", [0], 0, 4)])

    def ending() -> Iterator[str]:
        if end == "shutdown":
            engine.cache.shutdown()
        else:
            engine.start(new=[("C", [2], 0, 4)])
            engine.view.order = ["C", "C"]  # a batch that lists a request twice cannot be given up
            with pytest.raises(OmniPrefixCacheWriteError):
                engine.cache.new_step_starts(engine.schedule(new=[("D", [3], 0, 1)]))
        yield "A"

    with pytest.raises(OmniPrefixCacheClosedError if end == "shutdown" else OmniPrefixCacheWriteError):
        engine.cache.materialize(step, ending())


@pytest.mark.eager_only("the sink looks at the cache while it is interrupted")
def test_an_interrupted_write_is_recorded_before_steps_are_let_go_of() -> None:
    """Whoever finds that its step is gone finds the failure, too: they never see the one without the other."""
    seen: list[int] = []

    def interrupt(action: str, acted_on: Mapping[str, object]) -> None:  # noqa: ARG001
        if action == "queue_task" and engine.started:
            raise KeyboardInterrupt
        if action == "fail_task":
            seen.append(len(engine.cache.inspect().unconsumed))

    class Started(Engine):
        started = False

    engine = Started(trace=interrupt)
    step = engine.step(new=[("A", [0], 0, 4)])
    engine.started = True
    with pytest.raises(KeyboardInterrupt):
        engine.step(new=[("B", [1], 0, 4)])
    assert seen == [2], "steps were let go of first"
    with pytest.raises(OmniPrefixCacheWriteError):
        engine.cache.discard_step(step)


@pytest.mark.eager_only("an interrupt comes to the caller's thread; counts its actions")
def test_an_interrupt_at_any_action_leaves_right_rows_or_a_failed_cache() -> None:
    """A hit is saved and handed over, and Ctrl-C comes at each action in turn: right rows or an error, nothing held."""
    for at in range(200):
        left = [at]

        def interrupt(action: str, acted_on: Mapping[str, object], left: list[int] = left) -> None:  # noqa: ARG001
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt

        policy = ModelCachePolicy(deferred_keys=frozenset({"d"}))
        engine = Engine(trace=interrupt, policy=policy)
        mm = {"d": torch.arange(4.0).reshape(4, 1)}
        try:
            first = engine.step(new=[("A", [0], 0, 4)], mm=mm)
            assert engine.hidden(first, "A") == [0, 1, 2, 3]
            hit = engine.step(new=[("B", [0, 1], 4, 4)], finished=["A"], mm=mm)
            again = engine.step(new=[("C", [0], 0, 4)], finished=["B"], mm=mm, base={"C": 50})
            assert engine.hidden(again, "C") == [50, 51, 52, 53]
            assert engine.hidden(hit, "B") == [*range(8)]
        except KeyboardInterrupt:
            with contextlib.suppress(OmniPrefixCacheWriteError):
                for step in engine.cache.inspect().unconsumed:
                    engine.cache.discard_step(step)
        else:
            assert left[0] >= 0, "an interrupt was swallowed"
            break
        seen = engine.cache.inspect()
        assert not any(seen.pages), f"interrupted at action {at}: {seen.pages}"
        assert not any(seen.pins)
        with contextlib.suppress(OmniPrefixCacheWriteError):  # where it did not fail, it still serves
            engine.take(engine.step(new=[("Z", [2], 0, 4)], base={"Z": 9}), "Z")
    else:
        pytest.fail("the scenario has more actions than were interrupted")


@pytest.mark.eager_only("an interrupt comes to the caller's thread; counts its calls")
def test_an_interrupt_at_any_call_leaves_no_lock_held() -> None:
    """Ctrl-C comes wherever the interpreter takes it, inside the taking of a lock too, and the cache answers.

    Where a function begins and where a C function returned; one place in 7. A lock that stays held is a hang, and a
    page that does is one later.
    """

    def scenario(interrupt: Callable[[FrameType, str, object], None]) -> None:
        engine = Engine(policy=ModelCachePolicy(deferred_keys=frozenset({"d"})))
        mm = {"d": torch.arange(4.0).reshape(4, 1)}
        sys.setprofile(interrupt)
        try:
            first = engine.step(new=[("A", [0], 0, 4)], mm=mm)
            hit = engine.step(new=[("B", [0, 1], 4, 4)], finished=["A"], mm=mm)
            engine.cache.discard_step(first)
            assert engine.hidden(hit, "B") == [*range(8)]
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        with contextlib.suppress(OmniPrefixCacheWriteError):  # where it did not fail, it still serves
            engine.take(engine.step(new=[("Z", [2], 0, 4)], base={"Z": 9}), "Z")
            for step in engine.cache.inspect().unconsumed:
                engine.cache.discard_step(step)
            held.extend(filter(None, engine.cache.inspect().pages))
        engine.cache.inspect()
        engine.cache.shutdown()
        answered.append(True)

    held: list[object] = []
    answered: list[bool] = []
    for at in range(0, 20_000, 7):
        left = [at]

        def interrupt(frame: FrameType, event: str, _: object, left: list[int] = left) -> None:
            ours = frame.f_globals["__name__"].startswith(("omni_prefix_fast", "threading"))
            # A generator that is thrown away begins, too, where nobody hears of an interrupt.
            if ours and event in {"call", "c_return"} and not frame.f_code.co_flags & CO_GENERATOR:
                left[0] -= 1
                if left[0] == -1:
                    raise KeyboardInterrupt

        thread = threading.Thread(target=scenario, args=(interrupt,), daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        assert answered, f"interrupted at call {at}: no answer"
        assert not held, f"interrupted at call {at}: {held}"
        answered.clear()
        if left[0] >= 0:
            break
    else:
        pytest.fail("the scenario has more calls than were interrupted")


def test_a_step_that_cannot_be_given_up_ends_the_cache() -> None:
    """An unsaved step whose slots are unknown: nothing may be hit any more, so every call raises from then on."""
    engine = Engine()
    engine.cache.discard_step(engine.step(new=[("A", [0], 0, 4)]))
    engine.start(new=[("B", [1], 0, 4)])
    engine.view.order = ["B", "B"]
    for _ in range(2):
        with pytest.raises(OmniPrefixCacheWriteError, match="giving up step 1"):
            engine.cache.new_step_starts(engine.schedule(new=[("C", [0, 2], 4, 1)]))


def test_what_ran_of_a_refused_step_is_given_up() -> None:
    """A step is refused for one request; the engine drops that one and runs the rest, unsaved: a hit on it raises."""
    engine = Engine()
    engine.cache.discard_step(engine.step(new=[("A", [0], 0, 4)], base={"A": 100}))
    output = engine.schedule(new=[("X", [0], 0, 4), ("Y", [1, 2], 4, 1)], finished=["A"])
    output.scheduled_new_reqs[1].block_ids = None
    with pytest.raises(OmniPrefixCacheContractError, match="'Y'"):
        engine.cache.new_step_starts(output)
    engine.update(output, finished=["A"])
    engine.view.order = ["X"]
    step = engine.step(new=[("D", [0, 3], 4, 1)], finished=["X"])
    with pytest.raises(OmniPrefixCacheRowError, match="'D'"):
        engine.take(step, "D")


def test_what_ran_of_an_unreadable_step_is_given_up() -> None:
    """The counts of an output contradict each other; the engine runs it all the same, unsaved: a hit on it raises."""
    engine = Engine()
    engine.cache.discard_step(engine.step(new=[("A", [0], 0, 4)], base={"A": 100}))
    output = engine.schedule(new=[("X", [0], 0, 4)], finished=["A"])
    output.total_num_scheduled_tokens = 7
    with pytest.raises(OmniPrefixCacheContractError, match="adds up to 4"):
        engine.cache.new_step_starts(output)
    engine.update(output, finished=["A"])
    step = engine.step(new=[("D", [0, 3], 4, 1)], finished=["X"])
    with pytest.raises(OmniPrefixCacheRowError, match="'D'"):
        engine.take(step, "D")


@pytest.mark.parametrize("req_id", [["unhashable"], None, 3])
def test_an_output_of_unusable_ids_is_the_caches_own_error(req_id: object) -> None:
    """Whatever an id is, the error is one of the project's, and the next step works."""
    engine = Engine()
    output = engine.schedule(new=[("X", [0], 0, 4)])
    output.scheduled_new_reqs[0].req_id = req_id
    output.total_num_scheduled_tokens = 7
    with pytest.raises(OmniPrefixCacheContractError):
        engine.cache.new_step_starts(output)
    assert engine.hidden(engine.step(new=[("D", [1], 0, 4)]), "D") == [*range(4)]


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), "1"])
def test_drain_takes_seconds(timeout_s: object) -> None:
    """A wait that no lock can wait is refused."""
    with pytest.raises(OmniPrefixCacheContractError, match="seconds"):
        Engine().cache.drain(timeout_s)  # type: ignore[arg-type]


class NoThreads(ThreadRuntime):
    """A machine on which no more threads can be started, by name."""

    def __init__(self, *refused: str) -> None:
        self._refused = refused

    def spawn(self, name, target):  # type: ignore[no-untyped-def]
        """See `Runtime`."""
        if name in self._refused:
            raise RuntimeError("can't start new thread")
        return super().spawn(name, target)


@pytest.mark.eager_only("makes its own asynchronous engine")
def test_no_thread_for_the_committer_is_a_failed_write() -> None:
    """Rows that nobody can write are lost: the error names it, and every later call raises it too."""
    engine = Engine(eager=False, runtime=NoThreads("committer"))
    for _ in range(2):
        with pytest.raises(OmniPrefixCacheWriteError, match=r"committer thread.*start new thread"):
            engine.step(new=[("A", [0], 0, 4)])


@pytest.mark.eager_only("makes its own asynchronous engine")
def test_no_thread_for_the_prefetch_costs_nothing_but_time() -> None:
    """Whoever needs the rows gathers them."""
    engine = Engine(eager=False, runtime=NoThreads("prefetch"))
    engine.take(engine.step(new=[("A", [0], 0, 4)], base={"A": 100}), "A")
    step = engine.step(new=[("B", [0, 1], 4, 1)], finished=["A"], base={"B": 100})
    again = engine.step(new=[("C", [0], 0, 4)], finished=["B"])
    assert engine.hidden(step, "B") == [100, 101, 102, 103, 104]
    assert engine.hidden(again, "C") == [0, 1, 2, 3]
    engine.cache.shutdown()


@pytest.mark.parametrize("key", [HIDDEN_KEY, "d"])
def test_calls_may_come_from_inside_and_outside_inference_mode(key: str) -> None:
    """What is made inside it can be changed outside, on any thread, and what is handed over can be changed anywhere."""
    engine = Engine(policy=ModelCachePolicy(deferred_keys=frozenset({"d"})))
    mm = {"d": torch.arange(4.0).reshape(4, 1)}
    with torch.inference_mode():
        engine.cache.discard_step(engine.step(new=[("A", [0], 0, 4)], mm=mm))
    hit = engine.step(new=[("B", [0, 1], 4, 4)], finished=["A"], mm={"d": mm["d"] + 4})
    with torch.inference_mode():  # claims the hit's block: gathers it first
        engine.cache.discard_step(engine.step(new=[("C", [0], 0, 4)], finished=["B"], mm=mm))
    outs = engine.take(hit, "B")
    assert outs.hidden_states is not None
    rows = outs.hidden_states["B"] if key == HIDDEN_KEY else outs.mm_outputs[key]["B"]
    assert column(rows) == [*range(8)]
    assert not rows.is_inference()
    rows += 1


def test_policy_after_warm_up_is_refused() -> None:
    """Pools and tables of a warmed-up key follow the policy that it was warmed up under."""
    engine = Engine(policy=ModelCachePolicy(token_keys=frozenset({"k"})))
    engine.cache.warm_up({"k": (torch.float32, (1,))})
    with pytest.raises(OmniPrefixCacheUnmatchError, match="register the policy when the model is loaded"):
        engine.cache.register_policy(ModelCachePolicy(deferred_keys=frozenset({"k"})))


@pytest.mark.parametrize("hit", [False, True])
def test_an_output_allocator_that_rounds_is_an_error(hit: bool) -> None:
    """Memory of another type would take the rows, rounded: the handover is refused, and nothing stays held."""
    engine = Engine(allocate=lambda shape, _: torch.empty(tuple(shape), dtype=torch.float16))
    step, req_id = engine.step(new=[("A", [0], 0, 4)]), "A"
    if hit:
        engine.cache.discard_step(step)
        step, req_id = engine.step(new=[("B", [0, 1], 4, 1)], finished=["A"]), "B"
    with pytest.raises(OmniPrefixCacheConfigError, match="output_allocator"):
        engine.take(step, req_id)
    seen = engine.settled()
    assert not any(seen.pins)
    assert not any(seen.pages)
