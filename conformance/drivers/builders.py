"""Output builders: threads that consume steps, at times of their own choosing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from conformance.schedules.trace import Discard, Event, Materialize
from omni_prefix_fast.runtime import Runtime, Thread


class Builders:
    """Some threads, each started with its first event. Events of one step go to the same one, in order.

    Args:
        runtime: of the threads.
        count: how many.
        apply: called with each event and its index, on a builder's thread.
    """

    WORK: ClassVar[str] = "builder work"
    DONE: ClassVar[str] = "builders done"

    def __init__(self, runtime: Runtime, count: int, apply: Callable[[int, Event], None]) -> None:
        self._runtime = runtime
        self._apply = apply
        self._queues: list[deque[tuple[int, Event]]] = [deque() for _ in range(count)]
        self._work = [runtime.condition(self.WORK) for _ in range(count)]
        self._done = runtime.condition(self.DONE)
        self._left = 0
        self._closed = False
        self._threads: list[Thread | None] = [None] * count

    def post(self, index: int, event: Materialize | Discard) -> None:
        """Have an event applied some time. Engine thread."""
        builder = event.label % len(self._queues)
        with self._done:
            self._left += 1
        with self._work[builder]:
            self._queues[builder].append((index, event))
            self._work[builder].notify_all()
        if self._threads[builder] is None:
            self._threads[builder] = self._runtime.spawn(f"builder {builder}", partial(self._run, builder))

    def wait(self) -> None:
        """Until every event was applied. Engine thread."""
        with self._done:
            while self._left:
                self._done.wait()

    def close(self) -> None:
        """End the threads, once every event was applied. Engine thread."""
        self._closed = True
        for work in self._work:
            with work:
                work.notify_all()
        for thread in self._threads:
            if thread is not None:
                thread.join()

    def _run(self, builder: int) -> None:
        queue, work = self._queues[builder], self._work[builder]
        while True:
            with work:
                while not queue and not self._closed:
                    work.wait()
                if not queue:
                    return
                index, event = queue.popleft()
            self._apply(index, event)
            with self._done:
                self._left -= 1
                if not self._left:
                    self._done.notify_all()
