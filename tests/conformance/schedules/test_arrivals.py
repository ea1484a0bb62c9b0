"""Requests that arrive: they fit, begin alike, and hold their items whole."""

from __future__ import annotations

import random

import pytest

from conformance.schedules.arrivals import IDS, Arrivals


@pytest.mark.parametrize("seed", range(30))
def test_arrivals_fit_and_hold_items_whole(seed: int) -> None:
    """Each request fits the slots with all its chunks, under a free id; one item has one length everywhere."""
    arrivals = Arrivals(random.Random(seed), capacity=12, vocabulary=2, stream=0.4, item=0.8)
    lengths: dict[int, set[int]] = {}
    for n in range(60):
        request = arrivals.draw({f"r{n % IDS}"})
        assert request.req != f"r{n % IDS}"
        assert len(request.content) - 1 <= request.length
        assert request.length + sum(len(chunk.tokens) + chunk.outputs for chunk in request.chunks) <= 12
        for token in set(request.content):
            if token < 0:
                lengths.setdefault(token, set()).add(request.content.count(token))
    assert all(len(found) == 1 for found in lengths.values()), lengths
