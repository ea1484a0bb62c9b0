"""Staging pages: who holds what, and waits that end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_prefix_fast import OmniPrefixCacheStagingTimeoutError, PrefixCacheConfig
from omni_prefix_fast.pool import RowSpec
from omni_prefix_fast.runtime import Deadline
from omni_prefix_fast.staging import StagingBufferPool
from omni_prefix_fast.types import Holder
from tests.omni_prefix_fast.harness import ManualRuntime


def make(depth: int = 2, capacity: int = 8) -> tuple[StagingBufferPool, ManualRuntime]:
    """A pool of pages and its clock."""
    runtime = ManualRuntime()
    config = PrefixCacheConfig(num_blocks=4, block_size=4, staging_depth=depth, staging_capacity_tokens=capacity)
    return StagingBufferPool(config, runtime), runtime


@given(st.data())
def test_random_schedules_of_holders(data: st.DataObject) -> None:
    """Over claims, binds and releases (repeated ones too) a page is handed out only while nobody holds it."""
    staging, runtime = make(depth=data.draw(st.integers(1, 3)))
    model: list[set[Holder]] = [set() for _ in range(staging.depth)]
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["claim", "bind", "release", "release"]))
        held = [(page, holder) for page, holders in enumerate(model) for holder in sorted(holders)]
        if action == "claim":
            holder = Holder("step", number)
            if all(model):
                with pytest.raises(OmniPrefixCacheStagingTimeoutError):
                    staging.claim(holder, Deadline(runtime, 1.0))
            else:
                page = staging.claim(holder, Deadline(runtime, 1.0))
                assert not model[page]
                model[page].add(holder)
        elif action == "bind" and held:
            page, _ = data.draw(st.sampled_from(held))
            staging.bind(page, Holder("write", number))
            model[page].add(Holder("write", number))
        elif action == "release" and held:
            page, holder = data.draw(st.sampled_from(held))
            staging.release(page, holder)
            staging.release(page, holder)
            model[page].discard(holder)
        assert staging.holders() == tuple(tuple(sorted(holders)) for holders in model)


def test_page_waits_for_its_last_holder() -> None:
    """A page that a step let go of is taken while a write still views it: not free."""
    staging, runtime = make(depth=1)
    page = staging.claim(Holder("step", 0), Deadline(runtime, 1.0))
    staging.bind(page, Holder("write", 5))
    staging.release(page, Holder("step", 0))
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"writes in flight: 1 \[5\]"):
        staging.claim(Holder("step", 1), Deadline(runtime, 1.0))
    staging.release(page, Holder("write", 5))
    assert staging.claim(Holder("step", 1), Deadline(runtime, 1.0)) == page


def test_timeout_says_who_holds_the_pages() -> None:
    """The error names the claimant, the limit, every unconsumed step, and what to do."""
    staging, runtime = make(depth=2)
    for number in (3, 4):
        staging.claim(Holder("step", number), Deadline(runtime, 2.5))
    words = (
        r"step 5: .*2\.5 s \(staging_claim_timeout_s\).*never consumed: \[3, 4\].*discard_step.*staging_depth \(now 2\)"
    )
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=words):
        staging.claim(Holder("step", 5), Deadline(runtime, 2.5))
    assert runtime.now == 2.5


def test_waiting_claim_takes_the_page_that_becomes_free() -> None:
    """A page released during the wait ends it."""
    staging, runtime = make(depth=1)
    page = staging.claim(Holder("step", 0), Deadline(runtime, 9.0))
    runtime.meanwhile = lambda _: staging.release(page, Holder("step", 0))
    assert staging.claim(Holder("step", 1), Deadline(runtime, 9.0)) == page


def test_page_freed_at_the_last_moment_is_taken() -> None:
    """A page that is free when the time is up is taken, whether or not the notification was seen."""
    staging, runtime = make(depth=1)
    page = staging.claim(Holder("step", 0), Deadline(runtime, 9.0))

    def late(_: str) -> None:
        runtime.now += 100
        staging.release(page, Holder("step", 0))

    runtime.meanwhile = late
    assert staging.claim(Holder("step", 1), Deadline(runtime, 9.0)) == page


def test_free_page_is_taken_even_without_time_left() -> None:
    """A deadline of the past does not refuse what needs no wait."""
    staging, runtime = make(depth=1)
    deadline = Deadline(runtime, 1.0)
    runtime.now = 10.0
    assert staging.claim(Holder("step", 0), deadline) == 0


@pytest.mark.parametrize("feature", [(), (3,), (2, 2)], ids=str)
def test_pages_are_apart(feature: tuple[int, ...]) -> None:
    """Each key has rows of its own in each page; a view covers the rows asked for."""
    staging, _ = make(depth=2, capacity=8)
    for key in ("a", "b"):
        staging.open(key, RowSpec(torch.int32, feature))
    staging.rows(0, "a", 8).fill_(1)
    assert staging.rows(0, "a", 5).shape == (5, *feature)
    assert (staging.rows(0, "a", 5) == 1).all()
    assert not staging.rows(1, "a", 8).any()
    assert not staging.rows(0, "b", 8).any()


def test_bytes_of_a_page_are_its_rows() -> None:
    """What is written to the pool from a page's bytes is what stands in its rows."""
    staging, _ = make(depth=2, capacity=8)
    staging.open("k", RowSpec(torch.int32, (3,)))
    staging.rows(1, "k", 4).copy_(torch.arange(12, dtype=torch.int32).reshape(4, 3))
    found = staging.byte_rows(1, "k", 4)
    assert found.shape == (4,)
    assert np.frombuffer(found.tobytes(), dtype=np.int32).tolist() == list(range(12))


def test_opening_twice_keeps_rows_and_bytes() -> None:
    """Buffers are allocated once a key, for all pages."""
    staging, _ = make(depth=2, capacity=8)
    spec = RowSpec(torch.float32, (3,))
    staging.open("k", spec)
    staging.rows(1, "k", 1).fill_(1)
    staging.open("k", spec)
    assert staging.rows(1, "k", 1).sum() == 3
    assert staging.nbytes() == {"k": 2 * 8 * 3 * 4}
