"""Outputs of a step that are no rows of a cache: what each request takes with it, made up from label and request.

Some saves bring them, and their materialize has to hand over each request's own share, whatever was done to the live
tensors since.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from conformance.schedules.trace import Part

EACH, WHOLE, SLICED = "one each", "whole", "sliced"
KEYS = (EACH, WHOLE, SLICED)
EVERY = 3
"""Of so many saves, one brings them."""


def told(label: int, batch: Sequence[Part]) -> dict[str, Any]:
    """What the forward of a step emits beside its rows; mostly nothing."""
    if label % EVERY or not batch:
        return {}
    return {
        EACH: [_named(label, part) for part in batch],
        WHOLE: _whole(label),
        SLICED: {"of the step": torch.cat([_sliced(label, part) for part in batch])},
    }


def tensors(emitted: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among them, to be overwritten once the save has returned."""
    return [*emitted[EACH], emitted[WHOLE], emitted[SLICED]["of the step"]] if emitted else []


def wrong(found: Mapping[str, Mapping[str, Any]], label: int, batch: Sequence[Part], reqs: Sequence[str]) -> str | None:
    """What is wrong with the leftovers handed over to some requests of a step, or None."""
    if label % EVERY or not batch:
        return f"leftovers of no step: {[key for key in KEYS if key in found]}" if set(KEYS) & found.keys() else None
    parts = {part.req: part for part in batch}
    for req in reqs:
        due = {EACH: _named(label, parts[req]), WHOLE: _whole(label), SLICED: _sliced(label, parts[req])}
        for key, value in due.items():
            share = found.get(key, {}).get(req)
            share = share.get("of the step") if key == SLICED and share is not None else share
            if not isinstance(share, torch.Tensor) or not torch.equal(share, value):
                return f"{key!r} of {req} in the step of label {label}: {share}, {value} is due"
    return None


def _named(label: int, part: Part) -> torch.Tensor:
    return torch.tensor([label, zlib.crc32(part.req.encode()), len(part.slots)])


def _whole(label: int) -> torch.Tensor:
    return torch.arange(label + 1, label + 4)


def _sliced(label: int, part: Part) -> torch.Tensor:
    return torch.tensor([label * 1000 + part.start + i for i in range(len(part.slots))])
