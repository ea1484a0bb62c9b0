"""`StagingBufferPool`: where a step's rows land on the host, one page a step, and who still needs each page.

A page is held by the step until it is consumed and by each write that views it until its rows are in the pool.
Guarantees: a page is free only when nobody holds it; a claim waits no longer than its deadline, and its error says who
holds what.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from omni_prefix_fast.config import PrefixCacheConfig
from omni_prefix_fast.errors import OmniPrefixCacheStagingTimeoutError
from omni_prefix_fast.pool import ByteRows, RowSpec, byte_rows
from omni_prefix_fast.runtime import Deadline, Runtime
from omni_prefix_fast.types import Holder, Key


class StagingBufferPool:
    """`depth` pages of `capacity` token rows, with a buffer for each key. Claim and release from any thread."""

    def __init__(self, config: PrefixCacheConfig, runtime: Runtime, *, pin: bool = False) -> None:
        self.depth = config.staging_depth
        self.capacity = config.staging_capacity_tokens
        self._runtime = runtime
        self._freed = runtime.condition("staging pages")
        self._holders: list[set[Holder]] = [set() for _ in range(self.depth)]
        self._pin = pin
        self._buffers: dict[Key, torch.Tensor] = {}
        self._pages: dict[tuple[int, Key], torch.Tensor] = {}
        self._bytes: dict[tuple[int, Key], ByteRows] = {}
        """The same memory, row by row."""

    def nbytes(self) -> dict[Key, int]:
        """Bytes allocated, by key."""
        return {key: t.numel() * t.element_size() for key, t in list(self._buffers.items())}

    def holders(self) -> tuple[tuple[Holder, ...], ...]:
        """Who holds each page."""
        with self._freed:
            return tuple(tuple(sorted(h)) for h in self._holders)

    def open(self, key: Key, spec: RowSpec, *, resident: bool = False) -> None:
        """Allocate the buffers of `key` in every page. Nothing if it has them; `resident` as in the pool."""
        if key not in self._buffers:
            shape = (self.depth, self.capacity, *spec.feature)
            buffers = torch.zeros(shape, dtype=spec.dtype, pin_memory=self._pin)
            if resident:
                buffers.zero_()
            self._buffers[key] = buffers
            self._pages.update(((page, key), buffers[page]) for page in range(self.depth))
            self._bytes.update(((page, key), byte_rows(buffers[page], self.capacity)) for page in range(self.depth))

    def rows(self, page: int, key: Key, num_rows: int) -> torch.Tensor:
        """The first `num_rows` rows of a page, a view `(num_rows, *feature)`. Only for a holder of the page."""
        return self._pages[page, key].narrow(0, 0, num_rows)

    def byte_rows(self, page: int, key: Key, num_rows: int) -> ByteRows:
        """The same rows as `PrefixBlockPool.write` likes them best."""
        return self._bytes[page, key][:num_rows]

    def claim(self, holder: Holder, deadline: Deadline, check: Callable[[], None] = lambda: None) -> int:
        """Take a free page for `holder`, waiting for one until the deadline.

        `check` raises where waiting has become pointless; it is asked each time that the waiter wakes.

        Raises:
            OmniPrefixCacheStagingTimeoutError: none became free. Names the steps that were never consumed.
        """
        with self._freed:
            while True:
                check()
                for page, holders in enumerate(self._holders):
                    if not holders:
                        holders.add(holder)
                        return page
                remaining = deadline.remaining()
                if remaining <= 0 or not self._freed.wait(remaining):
                    if any(not h for h in self._holders):
                        continue
                    raise self._timed_out(holder, deadline.seconds)

    def bind(self, page: int, holder: Holder) -> None:
        """One more holder of a page that is held."""
        with self._freed:
            self._holders[page].add(holder)

    def release(self, page: int, holder: Holder) -> None:
        """`holder` is done with the page. Nothing if it was before."""
        with self._freed:
            self._holders[page].discard(holder)
            if not self._holders[page]:
                self._freed.notify_all()

    def wake(self) -> None:
        """Make every waiter ask its `check`."""
        with self._freed:
            self._freed.notify_all()

    def _timed_out(self, holder: Holder, seconds: float) -> OmniPrefixCacheStagingTimeoutError:
        held = sorted(h for holders in self._holders for h in holders)
        steps = [h.number for h in held if h.kind == "step"]
        writes = [h.number for h in held if h.kind == "write"]
        return OmniPrefixCacheStagingTimeoutError(
            f"{holder}: no staging page became free within {seconds:g} s (staging_claim_timeout_s). "
            f"Step ids never consumed: {steps}; writes in flight: {len(writes)} {writes}. Call materialize or "
            f"discard_step once for each step id, or raise staging_depth (now {self.depth})"
        )
