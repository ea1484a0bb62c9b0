"""The queue from saved steps to sinks: order, lateness, threads, and what happens when somebody fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from omni_prefix_fast.errors import OmniPrefixCacheRowError
from omni_prefix_fast.types import StageCacheOutputs
from omni_prefix_fast.vllm.handover import Handover
from omni_prefix_fast.vllm.sinks import CallbackSink, Finished, Message, SinkError

LIMIT = 10.0
"""Seconds that a test waits for a thread at most."""


class StepCache:
    """Stands for the cache: remembers what was consumed how, on which thread."""

    def __init__(self) -> None:
        self.materialized: list[int] = []
        self.discarded: list[int] = []
        self.threads: set[str] = set()
        self.fail_on: int | None = None

    def materialize(self, step_id: int, req_ids: Sequence[str]) -> StageCacheOutputs:
        """See the cache's method of this name."""
        self.threads.add(threading.current_thread().name)
        if step_id == self.fail_on:
            raise OmniPrefixCacheRowError(f"step {step_id}: a row is missing")
        self.materialized.append(step_id)
        return StageCacheOutputs(None, {}, dict.fromkeys(req_ids, (step_id, step_id + 1)))

    def discard_step(self, step_id: int) -> None:
        """See the cache's method of this name."""
        self.discarded.append(step_id)


class Log:
    """A sink that notes what it got, can refuse, and lets a test wait for a message."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.refuse = 0
        self.closed = 0
        self._changed = threading.Condition()

    def receive(self, message: Message) -> None:
        """See `Sink`."""
        with self._changed:
            if self.refuse:
                self.refuse -= 1
                raise OSError("no")
            self.seen.append(
                "end " + ",".join(message.req_ids) if isinstance(message, Finished) else f"step {message.step_id}"
            )
            self._changed.notify_all()

    def close(self) -> None:
        """See `Sink`."""
        self.closed += 1

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, LIMIT), self.seen


def test_steps_and_finishes_come_in_order_and_at_once() -> None:
    """Without a lag everything queued is handed over by the next pump, once each."""
    log, cache = Log(), StepCache()
    handover = Handover(cache, [log])
    handover.add_step(0, ["a", "b"])
    handover.pump()
    assert log.seen == ["step 0"]
    handover.add_finished(["a"])
    handover.add_step(1, ["b"])
    handover.pump()
    handover.pump()
    assert log.seen == ["step 0", "end a", "step 1"]
    assert cache.materialized == [0, 1]
    handover.close()
    assert log.closed == 1


@pytest.mark.parametrize("lag", (1, 2))
def test_a_lag_holds_back_that_many_steps_and_the_finishes_behind_them(lag: int) -> None:
    """A finish is never told before the last rows of its request."""
    log = Log()
    handover = Handover(StepCache(), [log], lag=lag)
    for step in range(4):
        handover.add_step(step, ["a"])
        handover.pump()
        assert log.seen == [f"step {i}" for i in range(step + 1 - lag)]
    handover.add_finished(["a"])
    handover.pump()
    assert "end a" not in log.seen
    assert handover.statistics().waiting == lag + 1
    handover.drain()
    assert log.seen[-2:] == ["step 3", "end a"]
    assert handover.statistics().largest_lateness == lag
    assert (handover.statistics().steps, handover.statistics().waiting) == (4, 0)
    handover.close()


def test_close_hands_over_what_waits() -> None:
    """Nothing saved is lost when the engine goes down, and closing twice is fine."""
    log = Log()
    handover = Handover(StepCache(), [log], lag=3)
    handover.add_step(0, ["a"])
    handover.add_finished(["a"])
    handover.close()
    handover.close()
    assert log.seen == ["step 0", "end a"]
    assert log.closed == 1


def test_without_a_sink_steps_are_discarded_not_kept() -> None:
    """Each step is consumed exactly once, whoever listens; a sink added later gets what follows."""
    cache, log = StepCache(), Log()
    handover = Handover(cache, [])
    handover.add_step(0, ["a"])
    handover.pump()
    assert (cache.discarded, cache.materialized) == ([0], [])
    handover.add_sink(log)
    handover.add_step(1, ["a"])
    handover.pump()
    assert log.seen == ["step 1"]


def test_a_refused_message_is_offered_again_with_the_same_rows() -> None:
    """D4: nothing counts as handed over until every sink took it; no sink gets it twice; it is materialized once."""
    cache, first, second = StepCache(), Log(), Log()
    handover = Handover(cache, [first, second])
    second.refuse = 1
    handover.add_step(0, ["a"])
    with pytest.raises(SinkError, match="Log did not take step 0"):
        handover.pump()
    handover.add_step(1, ["a"])
    handover.pump()
    assert first.seen == second.seen == ["step 0", "step 1"]
    assert cache.materialized == [0, 1]


def test_a_step_that_the_cache_cannot_hand_over_is_raised_again_and_again() -> None:
    """Its id is consumed, so it is not asked for twice, and nothing that follows is handed over without it."""
    cache, log = StepCache(), Log()
    cache.fail_on = 0
    handover = Handover(cache, [log])
    handover.add_step(0, ["a"])
    for call in (handover.pump, handover.pump, lambda: handover.add_step(1, ["a"]), handover.drain, handover.close):
        with pytest.raises(OmniPrefixCacheRowError, match="step 0: a row is missing"):
            call()
    assert (log.seen, log.closed) == ([], 1)


def test_sinks_are_closed_even_if_the_last_handover_fails() -> None:
    """An error at shutdown is raised, after every sink was closed."""
    log = Log()
    handover = Handover(StepCache(), [log])
    log.refuse = 1
    handover.add_finished(["a"])
    with pytest.raises(SinkError, match="the end of requests"):
        handover.close()
    assert log.closed == 1


def test_the_builder_thread_hands_over_in_order_without_being_asked() -> None:
    """Everything is materialized on the thread, in the engine's order."""
    cache, log = StepCache(), Log()
    handover = Handover(cache, [log], threaded=True, timeout_s=LIMIT)
    handover.add_step(0, ["a"])
    log.wait_for(1)
    handover.add_finished(["a"])
    handover.add_step(1, ["b"])
    log.wait_for(3)
    handover.close()
    assert log.seen == ["step 0", "end a", "step 1"]
    assert cache.threads == {"omni-prefix-builder"}


def test_the_builder_thread_keeps_its_lag_and_loses_nothing_at_the_end() -> None:
    """What waits when no step follows is handed over by `drain`, the rest by `close`."""
    log = Log()
    handover = Handover(StepCache(), [log], lag=2, threaded=True, timeout_s=LIMIT)
    for step in range(3):
        handover.add_step(step, ["a"])
    log.wait_for(1)
    assert log.seen == ["step 0"]
    handover.drain()
    log.wait_for(3)
    handover.add_step(3, ["a"])
    handover.close()
    assert log.seen == ["step 0", "step 1", "step 2", "step 3"]
    assert handover.statistics().largest_lateness >= 1


def test_a_failure_on_the_builder_thread_reaches_the_engine() -> None:
    """Its next call raises it, and so does every later one; nobody waits for a thread that is gone."""
    cache, log = StepCache(), Log()
    cache.fail_on = 0
    handover = Handover(cache, [log], threaded=True, timeout_s=LIMIT)
    handover.add_step(0, ["a"])
    assert handover.wait_idle(LIMIT) is False
    for call in (handover.pump, lambda: handover.add_step(1, ["a"]), handover.close):
        with pytest.raises(OmniPrefixCacheRowError):
            call()
    assert log.closed == 1


def test_a_message_refused_on_the_builder_thread_is_offered_again_once_the_engine_knows() -> None:
    """Each refusal is raised once, by the next pump; then the thread offers the same rows again, and goes on."""
    cache, first, second = StepCache(), Log(), Log()
    second.refuse = 2
    handover = Handover(cache, [first, second], threaded=True, timeout_s=LIMIT)
    handover.add_step(0, ["a"])
    for _ in range(2):
        assert handover.wait_idle(LIMIT) is False
        handover.add_finished(["a"])
        with pytest.raises(SinkError, match=r"Log did not take step 0 .*offered again"):
            handover.pump()
    assert handover.wait_idle(LIMIT)
    handover.add_step(1, ["b"])
    handover.close()
    assert first.seen == second.seen == ["step 0", "end a", "end a", "step 1"]
    assert cache.materialized == [0, 1]


def test_a_refusal_that_the_engine_has_not_seen_is_raised_by_close_after_one_more_offer() -> None:
    """Shutdown is the last handover: the message gets through, and that it was refused is told all the same."""
    log = Log()
    log.refuse = 1
    handover = Handover(StepCache(), [log], threaded=True, timeout_s=LIMIT)
    handover.add_step(0, ["a"])
    assert handover.wait_idle(LIMIT) is False
    with pytest.raises(SinkError, match="did not take step 0"):
        handover.close()
    assert (log.seen, log.closed, handover.statistics().waiting) == (["step 0"], 1, 0)


@pytest.mark.parametrize("threaded", (False, True))
def test_a_message_refused_for_the_last_time_is_not_promised_again(threaded: bool) -> None:
    """The error at shutdown does not say that the message is offered again, and the wait for it ends at once."""
    log = Log()
    handover = Handover(StepCache(), [log], lag=1, threaded=threaded, timeout_s=LIMIT)
    handover.add_step(0, ["a"])
    log.refuse = 9
    with pytest.raises(SinkError, match=r"did not take step 0 .*; the engine shuts down$"):
        handover.close()
    assert (log.refuse, log.closed) == (8, 1)


@pytest.mark.parametrize("error", (OSError("no"), KeyboardInterrupt()), ids=lambda error: type(error).__name__)
def test_every_sink_is_closed_whatever_another_raises(error: BaseException) -> None:
    """An error of one sink's close is raised after the others were closed, an interrupt as itself."""

    class Stubborn(Log):
        def close(self) -> None:
            raise error

    last = Log()
    handover = Handover(StepCache(), [Stubborn(), last])
    handover.add_step(0, ["a"])
    expected = SinkError if isinstance(error, Exception) else type(error)
    with pytest.raises(expected):
        handover.close()
    assert (last.seen, last.closed) == (["step 0"], 1)


def test_a_builder_that_is_stuck_is_reported_within_the_deadline() -> None:
    """A consumer that never returns cannot hold the engine's shutdown for ever."""
    inside, release = threading.Event(), threading.Event()

    def hang(_: Message) -> None:
        inside.set()
        assert release.wait(LIMIT)

    handover = Handover(StepCache(), [CallbackSink(hang)], threaded=True, timeout_s=0.05)
    handover.add_step(0, ["a"])
    assert inside.wait(LIMIT)
    with pytest.raises(SinkError, match="handover_timeout_s"):
        handover.close()
    release.set()
