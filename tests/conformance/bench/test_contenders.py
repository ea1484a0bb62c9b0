"""The implementations that are compared hand over the same rows, and the comparison would notice if not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from conformance.bench import other
from conformance.bench.contenders import OMNI, Sizes, contenders
from conformance.bench.feed import Admission, Feed, Step, same_rows

SIZES = Sizes(num_blocks=8, max_requests=4, max_blocks=4, capacity=32, block_size=4, deferred=frozenset({"codes"}))
WHEEL = other.find_wheel(download=False)
NAMES = [*contenders(None), *([OMNI] if WHEEL else [])]


@pytest.fixture(params=NAMES)
def feed(request: pytest.FixtureRequest) -> Iterator[Feed]:
    """A feed to each of them."""
    feed = contenders(None if WHEEL is None else other.load(WHEEL))[request.param](SIZES)
    yield feed
    feed.cache.shutdown()


def rows(first: int, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden rows and codes that count up."""
    values = torch.arange(first, first + count)
    return values[:, None].expand(-1, 3).to(torch.bfloat16).clone(), {"codes": values[:, None].expand(-1, 2).clone()}


def test_a_hit_gets_the_rows_that_were_written(feed: Feed) -> None:
    """Immediate rows and deferred ones, whether their request still runs or has finished, and of the newest tenant."""
    feed.run(Step(new=[Admission("old", [1, 2], 0, 8)]), *rows(100, 8))
    feed.run(Step(new=[Admission("a", [1, 2, 3], 0, 8)], finished=["old"]), *rows(0, 8))
    cached, cached_codes = rows(0, 8)
    own, own_codes = rows(20, 3)
    # The rows of a step stand in the order of the batch: a's one token, then b's two.
    hit, _ = feed.run(Step(running={"a": 1}, new=[Admission("b", [1, 2, 4], 8, 2)]), own, own_codes)
    same_rows(hit, {"a": own[:1], "b": torch.cat([cached, own[1:]])})
    codes = torch.cat([cached_codes["codes"], own_codes["codes"][1:]])
    same_rows(hit, {"a": own_codes["codes"][:1], "b": codes}, "codes")
    hit, _ = feed.run(Step(new=[Admission("c", [1, 2, 5], 8, 3)], finished=["a", "b"]), own, own_codes)
    same_rows(hit, {"c": torch.cat([cached, own])})
    same_rows(hit, {"c": torch.cat([cached_codes["codes"], own_codes["codes"]])}, "codes")


def test_rows_that_differ_are_noticed(feed: Feed) -> None:
    """By hidden states and by key."""
    hidden, mm = rows(0, 4)
    outputs, times = feed.run(Step(new=[Admission("a", [1], 0, 4)]), hidden.clone(), dict(mm))
    assert times.whole > 0
    same_rows(outputs, {"a": hidden})
    same_rows(outputs, {"a": mm["codes"]}, "codes")
    for key in (None, "codes"):
        with pytest.raises(AssertionError):
            same_rows(outputs, {"a": rows(1, 4)[0] if key is None else rows(1, 4)[1][key]}, key)
        with pytest.raises(AssertionError):
            same_rows(outputs, {}, key)
