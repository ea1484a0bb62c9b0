"""The prefetch thread: gathers planned hits while the forward runs, so that `materialize` finds them done.

Best effort. A read that it cannot fetch (a write failed, the device raised, a deadline passed) is left planned: whoever
needs it fetches it and gets the error.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from omni_prefix_fast.reads import HitRead
from omni_prefix_fast.runtime import Deadline, Runtime, Thread, serve

logger = logging.getLogger(__name__)


class Prefetcher:
    """One thread that calls `fetch` for each read it is given, oldest first. Started with the first one."""

    def __init__(self, fetch: Callable[[HitRead], None], runtime: Runtime, idle_s: float) -> None:
        self._fetch = fetch
        self._runtime = runtime
        self._idle_s = idle_s
        self._wake = runtime.condition("prefetch queue")
        self._queue: deque[HitRead] = deque()
        self._fetching = False
        self._closed = False
        self._thread: Thread | None = None

    def enqueue(self, reads: Iterable[HitRead]) -> None:
        """Fetch these soon. Never waits."""
        with self._wake:
            self._queue.extend(reads)
            if self._queue and not self._closed:
                if self._thread is None:
                    try:
                        cls = type(self)
                        work = partial(serve, weakref.ref(self), self._wake, self._idle_s, cls._is_idle, cls._work)
                        self._thread = self._runtime.spawn("prefetch", work)
                    except RuntimeError as error:  # no more threads: whoever needs the rows gathers them
                        self._queue.clear()
                        logger.warning("prefix-cache hits are not gathered ahead: %s", error)
                self._wake.notify_all()

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until every read was fetched or left; False if the deadline passed first."""
        with self._wake:
            while self._queue or self._fetching:
                remaining = deadline.remaining()
                if remaining <= 0:
                    return False
                self._wake.wait(remaining)
        return True

    def close(self, timeout_s: float) -> None:
        """End the thread. Waits for the gather in progress, up to `timeout_s`."""
        with self._wake:
            self._closed = True
            self._queue.clear()
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _is_idle(self) -> bool:
        return not self._queue and not self._closed

    def _work(self) -> bool:
        """Fetch the oldest read; whether to go on."""
        with self._wake:
            if self._closed:
                return False
            read = self._queue.popleft()
            self._fetching = True
        try:
            self._fetch(read)
        except Exception as error:  # noqa: BLE001 - whatever the device raises: the thread has to live on
            logger.debug("prefetch of %r, step %d: %s", read.req_id, read.step_id, error)
        with self._wake:
            self._fetching = False
            self._wake.notify_all()
        return True
