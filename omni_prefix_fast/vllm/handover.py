"""From saved steps to sinks: one queue, in order, emptied at once or some steps late, here or on a builder thread.

Guarantees:

- Sinks see steps and finishes in the engine's order; each step is materialized exactly once and its rows reach every
  sink. A message that a sink refused stays at the head of the queue, with the very same rows. Each refusal is raised
  once, by `pump`, `drain` or `close`, and the message is offered again after that: by the next `pump` or `drain`, or,
  by the builder thread, at once. `close` offers for the last time.
- At most `lag` steps wait once `pump` has returned (inline), so that a cache of more than `lag` staging pages never
  waits for one. `drain` leaves nothing waiting.
- A step that the cache cannot hand over, and whatever else ends the builder thread, is raised on the engine's thread
  by its next call here, and again by each call after it. No wait is without a deadline.
- Every sink is closed, whatever the last handover or another sink's `close` raises.

The state (`_Queue`) is separate from the thread that drives it. Nothing here imports vLLM.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from omni_prefix_fast.types import ReqId, StageCacheOutputs, StepId
from omni_prefix_fast.vllm.sinks import Delivery, Finished, Message, Sink, SinkError

_log = logging.getLogger(__name__)


class Materializer(Protocol):
    """The part of the cache that turns a step id into rows, or drops it. Exactly one of the two, once."""

    def materialize(self, step_id: StepId, req_ids: Sequence[ReqId]) -> StageCacheOutputs:
        """Rows of a step."""
        ...

    def discard_step(self, step_id: StepId) -> None:
        """Drop a step that nobody wants."""
        ...


@dataclass(slots=True)
class _Item:
    """Something to hand over. `due` is the number of saved steps from which on it may go."""

    due: int
    saved: int
    step_id: StepId | None
    req_ids: tuple[ReqId, ...]
    message: Message | None = None
    sinks_done: int = 0


@dataclass(frozen=True, slots=True)
class HandoverStatistics:
    """What was handed over so far.

    Attributes:
        steps: steps that were materialized or, without a sink, discarded.
        largest_lateness: the most steps that were saved between a step's own save and its handover.
        waiting: messages in the queue.
    """

    steps: int
    largest_lateness: int
    waiting: int


class _Queue:
    """Items in order, and which of them are due. No locks, no threads."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._saved = 0
        self._items: deque[_Item] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def add_step(self, step_id: StepId, req_ids: Sequence[ReqId]) -> None:
        self._saved += 1
        self._items.append(_Item(self._saved + self._lag, self._saved, step_id, tuple(req_ids)))

    def add_finished(self, req_ids: Sequence[ReqId]) -> None:
        self._items.append(_Item(0, self._saved, None, tuple(req_ids)))

    def make_all_due(self) -> None:
        for item in self._items:
            item.due = min(item.due, self._saved)

    def lateness(self, item: _Item) -> int:
        """Steps saved since the item's own."""
        return self._saved - item.saved

    def head(self) -> _Item | None:
        """The first item if it is due."""
        return self._items[0] if self._items and self._items[0].due <= self._saved else None

    def pop(self) -> None:
        self._items.popleft()


class Handover:
    """Hands saved steps over to the sinks, on the calling thread or on a builder thread."""

    def __init__(
        self,
        cache: Materializer,
        sinks: Sequence[Sink],
        *,
        lag: int = 0,
        threaded: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        """Start the builder thread if `threaded`. `timeout_s` bounds every wait for it."""
        self._cache = cache
        self._sinks = list(sinks)
        self._timeout_s = timeout_s
        self._queue = _Queue(lag)
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._refusal: SinkError | None = None  # on the builder thread, which waits until it was raised
        self._steps = 0
        self._largest_lateness = 0
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="omni-prefix-builder", daemon=True)
            self._thread.start()

    def statistics(self) -> HandoverStatistics:
        """Totals so far. Any thread."""
        return HandoverStatistics(self._steps, self._largest_lateness, len(self._queue))

    def add_sink(self, sink: Sink) -> None:
        """Add a receiver; it sees what is handed over from now on. Engine thread, between steps."""
        with self._wake:
            self._sinks.append(sink)

    def add_step(self, step_id: StepId, req_ids: Sequence[ReqId]) -> None:
        """Queue a saved step. Engine thread."""
        self._raise_failure()
        with self._wake:
            self._queue.add_step(step_id, req_ids)
            self._wake.notify_all()

    def add_finished(self, req_ids: Sequence[ReqId]) -> None:
        """Queue the news that requests get no more rows. Engine thread."""
        self._raise_failure()
        if req_ids:
            with self._wake:
                self._queue.add_finished(req_ids)
                self._wake.notify_all()

    def pump(self) -> None:
        """Hand over what is due: here if inline; the builder thread does so by itself.

        Raises:
            SinkError: a sink refused a message, which is kept.
            OmniPrefixCacheUnmatchError: the cache could not hand over a step.
        """
        self._raise_failure()
        self._raise_refusal()
        if self._thread is None:
            while (item := self._queue.head()) is not None:
                self._hand_over(item)
                self._queue.pop()

    def drain(self) -> None:
        """Let everything queued go, however late it was meant to be: no step follows soon. Does not wait."""
        with self._wake:
            self._queue.make_all_due()
            self._wake.notify_all()
        self.pump()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing that is due is left in the queue.

        Returns:
            Whether that is so; False if the builder thread failed, a sink refused or `timeout_s` ran out.
        """
        if self._thread is None:
            return self._queue.head() is None
        with self._wake:
            self._wake.wait_for(lambda: bool(self._failure or self._refusal) or self._queue.head() is None, timeout_s)
            return self._failure is None and self._queue.head() is None

    def close(self) -> None:
        """Hand over what is queued and close the sinks. May be called twice.

        Raises:
            SinkError: a sink refused a message or did not close, or the builder thread did not finish within
                `timeout_s`.
            OmniPrefixCacheUnmatchError: the cache could not hand over a step.
        """
        with self._wake:
            if self._closing:
                return
            self._closing = True
            refusal, self._refusal = self._refusal, None
            self._queue.make_all_due()
            self._wake.notify_all()
        stuck = False
        try:
            if self._thread is None:
                self.pump()
            else:
                stuck = self._join()
        finally:
            unclosed = self._close_sinks()
        if stuck:
            raise SinkError(
                f"the builder thread did not hand over {len(self._queue)} queued messages within {self._timeout_s} s "
                "(omni_prefix.handover_timeout_s)"
            )
        self._raise_failure()
        self._raise_refusal()
        if refusal is not None:
            raise refusal
        if unclosed is not None:
            raise unclosed

    def _close_sinks(self) -> SinkError | None:
        """Close every sink. Returns what the first one that failed raised; an interrupt is raised after the last."""
        failed: SinkError | None = None
        interrupt: BaseException | None = None
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - returned, once every sink is closed
                _log.exception("%s did not close", type(sink).__name__)
                if failed is None:
                    failed = SinkError(f"{type(sink).__name__} did not close ({type(error).__name__}: {error})")
                    failed.__cause__ = error
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return failed

    def _join(self) -> bool:
        """Wait for the builder thread. Returns whether it is stuck."""
        if self._thread is None:
            return False
        self._thread.join(self._timeout_s)
        return self._thread.is_alive()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _raise_refusal(self) -> None:
        """Raise what a sink refused on the builder thread, and let the thread offer it again."""
        with self._wake:
            refusal, self._refusal = self._refusal, None
            self._wake.notify_all()
        if refusal is not None:
            raise refusal

    def _hand_over(self, item: _Item) -> None:
        """Materialize an item if that was not done before, and give it to the sinks that have not got it yet."""
        if item.message is None:
            if item.step_id is None:
                item.message = Finished(item.req_ids)
            else:
                self._steps += 1
                self._largest_lateness = max(self._largest_lateness, self._queue.lateness(item))
                if not self._sinks:
                    self._cache.discard_step(item.step_id)
                    return
                outputs = self._materialize(item.step_id, item.req_ids)
                item.message = Delivery(item.step_id, item.req_ids, outputs)
        while item.sinks_done < len(self._sinks):
            sink = self._sinks[item.sinks_done]
            try:
                sink.receive(item.message)
            except Exception as error:
                again = "the engine shuts down" if self._closing else "it is kept and offered again"
                what = "the end of requests" if item.step_id is None else f"step {item.step_id}"
                raise SinkError(
                    f"{type(sink).__name__} did not take {what} ({type(error).__name__}: {error}); {again}"
                ) from error
            item.sinks_done += 1

    def _materialize(self, step_id: StepId, req_ids: tuple[ReqId, ...]) -> StageCacheOutputs:
        """Rows of a step. A failure stays: the step is consumed, and nobody may hand over what follows without it."""
        try:
            return self._cache.materialize(step_id, list(req_ids))
        except BaseException as error:
            self._failure = error
            raise

    def _run(self) -> None:
        """The builder thread."""
        while (item := self._next_due()) is not None:
            try:
                self._hand_over(item)
            except SinkError as error:
                _log.error("refused on the builder thread: %s", error)
                with self._wake:
                    self._refusal = error
                    self._wake.notify_all()
                continue
            except BaseException as error:  # noqa: BLE001 - whatever it is, the engine's thread has to see it
                _log.error("handover failed on the builder thread: %s", error)
                with self._wake:
                    self._failure = error
                    self._wake.notify_all()
                return
            with self._wake:
                self._queue.pop()
                self._wake.notify_all()

    def _next_due(self) -> _Item | None:
        """Wait for the next item that is due; None when closing and nothing is left, or nothing that a sink takes."""
        with self._wake:
            while self._refusal is not None or (item := self._queue.head()) is None:
                if self._closing:
                    return None
                self._wake.wait(self._timeout_s)
            return item
