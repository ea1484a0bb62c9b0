"""The strict chain of a write task."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from omni_prefix_fast.tasks import LEGAL_MOVES, DeferredWrite, IllegalMoveError, ImmediateWrite, WritePiece, WriteTask
from omni_prefix_fast.types import TaskState, WriteSchedule
from tests.omni_prefix_fast.harness import ManualRuntime

CHAIN = [TaskState.PENDING, TaskState.QUEUED, TaskState.COPYING, TaskState.HOST_READY, TaskState.WRITTEN]
LEGAL = {*pairwise(CHAIN), *((state, TaskState.FAILED) for state in CHAIN[:-1])}


def make(kind: str = "immediate") -> WriteTask:
    """A fresh task of either kind."""
    if kind == "immediate":
        return ImmediateWrite(7, 3, ManualRuntime(), page=1)
    return DeferredWrite(8, 3, ManualRuntime(), req_id="A", write_n=2, first_chunk=0)


def bring_to(task: WriteTask, state: TaskState) -> None:
    """Take the task along the chain to `state`."""
    path = CHAIN[1 : CHAIN.index(state) + 1] if state in CHAIN else [TaskState.FAILED]
    for step in path:
        task.move(step)


@pytest.mark.parametrize(("source", "target"), list(product(TaskState, TaskState)))
@pytest.mark.parametrize("kind", ["immediate", "deferred"])
def test_chain_is_strict(kind: str, source: TaskState, target: TaskState) -> None:
    """Of all pairs of states only the next in the chain, and FAILED from any but the last, are moves."""
    task = make(kind)
    bring_to(task, source)
    if (source, target) in LEGAL:
        task.move(target)
        assert task.state is target
    else:
        with pytest.raises(IllegalMoveError, match=f"{source.name} -> {target.name}"):
            task.move(target)
        assert task.state is source


def test_table_of_moves_covers_every_state() -> None:
    """The table is the chain, neither more nor less, and cannot be changed."""
    assert {(s, t) for s, targets in LEGAL_MOVES.items() for t in targets} == LEGAL
    assert set(LEGAL_MOVES) == set(TaskState)
    with pytest.raises(TypeError):
        LEGAL_MOVES[TaskState.FAILED] = frozenset(TaskState)  # type: ignore[index]


@pytest.mark.parametrize("state", list(TaskState))
def test_waiters_wake_only_when_there_is_something_to_see(state: TaskState) -> None:
    """`host_ready` is set once rows are on the host or lost, `done` once they are in the pool or lost."""
    task = make()
    bring_to(task, state)
    task.wake()
    assert task.host_ready.is_set() == (state in {TaskState.HOST_READY, TaskState.WRITTEN, TaskState.FAILED})
    assert task.done.is_set() == (state in {TaskState.WRITTEN, TaskState.FAILED})


def test_rows_are_let_go_and_the_commit_still_knows_its_slots() -> None:
    """Dropping rows keeps slots and versions."""
    task = make()
    slots, versions = np.array([4, 5]), np.array([1, 1])
    task.pieces.append(WritePiece("k", slots, versions, [torch.zeros(2, 3)]))
    task.drop_rows()
    (piece,) = task.pieces
    assert len(piece.rows) == 0
    assert piece.slots is slots
    assert piece.versions is versions


def test_tasks_say_who_they_are() -> None:
    """Messages name the task, its step or request, and how manieth write it is."""
    assert str(make()) == "write 7 (step 3)"
    assert str(make("deferred")) == "write 8 (deferred write 2 of request 'A')"
    assert make().schedule is WriteSchedule.JOIN_NEXT_STEP
    assert make("deferred").schedule is WriteSchedule.JOIN_ON_FINISH
