"""Words shared by every module."""

import dataclasses

import pytest
import torch

from omni_prefix_fast.types import HIDDEN_KEY, Holder, Occupancy, StageCacheOutputs, TaskState, WriteSchedule


def test_names_are_those_of_the_machine() -> None:
    """Occupancy, task states and schedules are named as in docs/machine.md and the seed."""
    assert [o.name for o in Occupancy] == ["ABSENT", "IN_TRANSIT", "COMMITTED"]
    assert [s.name for s in TaskState] == ["PENDING", "QUEUED", "COPYING", "HOST_READY", "WRITTEN", "FAILED"]
    assert [s.name for s in WriteSchedule] == ["JOIN_NEXT_STEP", "JOIN_ON_FINISH"]
    assert HIDDEN_KEY == "__hidden_states__"


def test_a_fresh_table_is_absent() -> None:
    """A zeroed table says absent."""
    assert Occupancy(0) is Occupancy.ABSENT


def test_holder_reads_as_words() -> None:
    """Messages print who holds a page."""
    assert str(Holder("step", 3)) == "step 3"


def test_outputs_cannot_be_swapped() -> None:
    """What is handed over is frozen: fields are set once."""
    outs = StageCacheOutputs({"A": torch.zeros(1, 2)}, {}, {"A": (0, 1)})
    assert outs.mm_spans == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        outs.spans = {}  # type: ignore[misc]
