"""Leftovers of a step: each request's own share is due, and anything else is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.drivers.leftovers import EACH, EVERY, SLICED, WHOLE, tensors, told, wrong
from conformance.schedules.trace import Part

BATCH = [Part(req="a", start=0, slots=[4, 5]), Part(req="b", start=3, slots=[1])]


def shares() -> dict[str, dict[str, Any]]:
    """What a cache that does right hands over of the step of label 0."""
    emitted = told(0, BATCH)
    at = {"a": slice(0, 2), "b": slice(2, 3)}
    return {
        EACH: {part.req: emitted[EACH][i].clone() for i, part in enumerate(BATCH)},
        WHOLE: {req: emitted[WHOLE].clone() for req in at},
        SLICED: {req: {"of the step": emitted[SLICED]["of the step"][rows].clone()} for req, rows in at.items()},
    }


def test_each_request_gets_its_own_share() -> None:
    """Right shares are right; steps without leftovers may have none."""
    assert wrong(shares(), 0, BATCH, ["b", "a"]) is None
    assert told(1, BATCH) == {}
    assert wrong({}, 1, BATCH, ["a"]) is None
    assert wrong(shares(), EVERY + 1, BATCH, ["a"]) is not None


@pytest.mark.parametrize("key", [EACH, WHOLE, SLICED])
def test_what_is_not_a_requests_own_is_told(key: str) -> None:
    """Another request's share, an overwritten one, and none at all."""
    swapped, missing = shares(), shares()
    swapped[key]["a"] = shares()[EACH]["b"] if key == WHOLE else shares()[key]["b"]
    del missing[key]["a"]
    for found in (swapped, missing):
        assert key in (wrong(found, 0, BATCH, ["a", "b"]) or "")
        assert wrong(found, 0, BATCH, ["b"]) is None


def test_every_live_tensor_is_named() -> None:
    """So that the driver can overwrite them all."""
    assert len(tensors(told(0, BATCH))) == len(BATCH) + 2
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors(told(0, BATCH)))
