"""Cached rows and the step's rows put together, whatever was in the memory before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from omni_prefix_fast import HIDDEN_KEY
from omni_prefix_fast.intake import Whole
from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.merge import merge
from omni_prefix_fast.reads import HitRead
from omni_prefix_fast.steps import StepContext
from tests.omni_prefix_fast.harness import ManualRuntime, column, filled

PAGE = {HIDDEN_KEY: filled([4, 5, 20, 21, 22], 2), "k": filled([40, 50, 200, 210, 220], 3)}


def dirty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory as a recycled output leaves it."""
    return torch.full(tuple(shape), 99, dtype=dtype)


def context(
    emitted: Sequence[str],
    hit: Mapping[str, Sequence[int]] | None = None,
    *,
    hands_hidden: bool = True,
    leftovers: Mapping[str, Any] | None = None,
) -> StepContext:
    """A step of A (positions 4..5) and B (0..2); A hit 0..3 if `hit` has its gathered rows by key."""
    layout = StepLayout(
        0,
        ("A", "B"),
        {"A": 0, "B": 1},
        counts=(2, 3),
        offsets=(0, 2, 5),
        starts=(4, 0),
        ends=(6, 3),
        slots=np.arange(5),
    )
    reads = {}
    if hit is not None:
        read = reads["A"] = HitRead("A", 0, (0, 4), np.arange(4), ManualRuntime())
        read.tail = 2
        read.rows = {key: filled([*values, 99, 99], 2 if key == HIDDEN_KEY else 3) for key, values in hit.items()}
    return StepContext(layout, 0, tuple(emitted), leftovers or {}, reads, hands_hidden)


def test_rows_of_the_step_alone() -> None:
    """Without hits each request gets its part of the page, copied."""
    step = context([HIDDEN_KEY, "k"])
    for asked in (("A", "B"), ("B", "A"), ("B",)):
        outs = merge(step, asked, PAGE.__getitem__, dirty)
        assert outs.hidden_states is not None
        expected = {"A": [4, 5], "B": [20, 21, 22]}
        assert {r: column(rows) for r, rows in outs.hidden_states.items()} == {r: expected[r] for r in asked}
        assert column(outs.mm_outputs["k"]["B"]) == [200, 210, 220]
        outs.hidden_states["B"].fill_(7)
    assert column(PAGE[HIDDEN_KEY]) == [4, 5, 20, 21, 22]


def test_prefix_and_step() -> None:
    """The cached prefix comes first, the step's rows behind it; a key without a cached row has zeros there."""
    outs = merge(context([HIDDEN_KEY, "k"], {HIDDEN_KEY: [0, 1, 2, 3]}), ("A", "B"), PAGE.__getitem__, dirty)
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["A"]) == [0, 1, 2, 3, 4, 5]
    assert column(outs.hidden_states["B"]) == [20, 21, 22]
    assert column(outs.mm_outputs["k"]["A"]) == [0, 0, 0, 0, 40, 50]
    assert outs.spans == {"A": (0, 6), "B": (0, 3)}
    assert outs.mm_spans == {"k": {"A": (0, 6), "B": (0, 3)}}


def test_prefix_of_a_key_that_the_step_does_not_emit() -> None:
    """It ends where the hit ends, and whoever hit nothing has no entry."""
    hit = {HIDDEN_KEY: [0, 1, 2, 3], "k": [10, 20, 30, 40]}
    outs = merge(context([HIDDEN_KEY], hit), ("A", "B"), PAGE.__getitem__, dirty)
    assert {r: column(rows) for r, rows in outs.mm_outputs["k"].items()} == {"A": [10, 20, 30, 40]}
    assert outs.mm_spans == {"k": {"A": (0, 4)}}


def test_nobody_asked_for() -> None:
    """Asking for nothing hands over nothing; hidden states are None only where the policy skips them."""
    outs = merge(context([HIDDEN_KEY]), (), PAGE.__getitem__, dirty)
    assert (outs.hidden_states, outs.spans) == ({}, {})
    assert merge(context([]), ("A",), PAGE.__getitem__, dirty).hidden_states == {}
    assert merge(context(["k"], hands_hidden=False), ("A",), PAGE.__getitem__, dirty).hidden_states is None


def test_leftovers_stand_beside_the_rows() -> None:
    """Each asked request gets its share."""
    outs = merge(context([HIDDEN_KEY], leftovers={"name": Whole("x")}), ("B",), PAGE.__getitem__, dirty)
    assert outs.mm_outputs["name"] == {"B": "x"}
    assert outs.mm_spans == {}
