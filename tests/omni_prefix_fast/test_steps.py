"""Step ids: issued once, consumed once, spans of a saved step."""

from __future__ import annotations

import numpy as np
import pytest

from omni_prefix_fast import OmniPrefixCacheContractError
from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.reads import HitRead
from omni_prefix_fast.steps import StepContext, StepTable
from tests.omni_prefix_fast.harness import ManualRuntime


def context(step_id: int, reads: dict[str, tuple[int, int]] | None = None) -> StepContext:
    """A saved step of A (positions 4..5) and B (positions 8..10)."""
    layout = StepLayout(
        step_id,
        ("A", "B"),
        {"A": 0, "B": 1},
        counts=(2, 3),
        offsets=(0, 2, 5),
        starts=(4, 8),
        ends=(6, 11),
        slots=np.arange(5),
    )
    hits = {r: HitRead(r, step_id, span, np.arange(*span), ManualRuntime()) for r, span in (reads or {}).items()}
    return StepContext(layout, 0, (), {}, hits, hands_hidden=True)


def test_ids_rise_and_are_never_issued_twice() -> None:
    """An id is used up even if its step is never saved."""
    steps = StepTable()
    assert [steps.issue() for _ in range(3)] == [0, 1, 2]
    steps.open(context(1))
    steps.take(1)
    assert steps.issue() == 3


def test_each_step_is_taken_once_in_any_order() -> None:
    """A taken step is gone; the others are told in the order of their saves."""
    steps = StepTable()
    contexts = [context(steps.issue()) for _ in range(3)]
    for saved in contexts:
        steps.open(saved)
    assert steps.take(1, ["B", "A"]) is contexts[1]
    assert steps.unconsumed() == [0, 2]
    with pytest.raises(OmniPrefixCacheContractError, match=r"step id 1 was consumed already.*Unconsumed.*\[0, 2\]"):
        steps.take(1)
    assert steps.contexts() == [contexts[0], contexts[2]]
    assert steps.clear() == [contexts[0], contexts[2]]
    assert steps.unconsumed() == []


@pytest.mark.parametrize("step_id", [1, -1, 99, None, "0", [0], 0.5])
def test_wrong_id_consumes_nothing(step_id: object) -> None:
    """Ids of no step, and things that are no ids, are refused with the ids that could be meant."""
    steps = StepTable()
    steps.open(context(steps.issue()))
    with pytest.raises(OmniPrefixCacheContractError, match=r"was never issued.*exactly once.*\[0\]"):
        steps.take(step_id)  # type: ignore[arg-type]
    assert steps.unconsumed() == [0]


def test_stranger_consumes_nothing() -> None:
    """A request outside the snapshot is named beside those inside."""
    steps = StepTable()
    steps.open(context(steps.issue()))
    with pytest.raises(OmniPrefixCacheContractError, match=r"\['C'\] were not in the batch.*\['A', 'B'\]"):
        steps.take(0, ["A", "C"])
    steps.take(0, ["A"])


@pytest.mark.parametrize("asked", [("A", "B"), ("B", "A"), ("B",), ()])
def test_spans_of_a_step(asked: tuple[str, ...]) -> None:
    """A span runs from the first cached row that is owed to the last computed one, for whoever is asked for."""
    assert context(0).spans(asked) == {r: {"A": (4, 6), "B": (8, 11)}[r] for r in asked}
    assert context(0, {"B": (2, 8)}).spans(asked) == {r: {"A": (4, 6), "B": (2, 11)}[r] for r in asked}
