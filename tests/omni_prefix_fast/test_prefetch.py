"""The prefetch thread fetches what it is given, in order, and survives what it cannot fetch."""

from __future__ import annotations

import threading

import numpy as np

from omni_prefix_fast.errors import OmniPrefixCacheRowError
from omni_prefix_fast.prefetch import Prefetcher
from omni_prefix_fast.reads import HitRead
from omni_prefix_fast.runtime import ThreadRuntime

DEADLINE_S = 20.0


def _read(req_id: str) -> HitRead:
    return HitRead(req_id, 0, (0, 4), np.arange(4), ThreadRuntime())


def test_reads_are_fetched_in_order_on_one_other_thread() -> None:
    """First in, first out, and never on the caller's thread."""
    fetched: list[tuple[str, int]] = []
    done = threading.Event()

    def fetch(read: HitRead) -> None:
        fetched.append((read.req_id, threading.get_ident()))
        if read.req_id == "c":
            done.set()

    prefetcher = Prefetcher(fetch, ThreadRuntime(), DEADLINE_S)
    prefetcher.enqueue([_read("a"), _read("b")])
    prefetcher.enqueue([_read("c")])
    assert done.wait(DEADLINE_S)
    prefetcher.close(DEADLINE_S)
    assert [req_id for req_id, _ in fetched] == ["a", "b", "c"]
    assert len({thread for _, thread in fetched} | {threading.get_ident()}) == 2


def test_a_read_that_fails_does_not_end_the_thread() -> None:
    """The error belongs to whoever needs the rows; the next read is fetched all the same."""
    done = threading.Event()

    def fetch(read: HitRead) -> None:
        if read.req_id == "bad":
            raise OmniPrefixCacheRowError("no rows")
        done.set()

    prefetcher = Prefetcher(fetch, ThreadRuntime(), DEADLINE_S)
    prefetcher.enqueue([_read("bad"), _read("good")])
    assert done.wait(DEADLINE_S)
    prefetcher.close(DEADLINE_S)


def test_close_ends_the_thread_and_nothing_is_fetched_after_it() -> None:
    """A closed prefetcher takes reads and leaves them."""
    fetched: list[str] = []
    prefetcher = Prefetcher(lambda read: fetched.append(read.req_id), ThreadRuntime(), DEADLINE_S)
    prefetcher.close(DEADLINE_S)
    prefetcher.enqueue([_read("late")])
    prefetcher.close(DEADLINE_S)
    assert fetched == []
