"""The same cache, written straightforwardly: one write task a request, plain loops, no arrays. Right, and slow.

A floor for the comparison: what somebody writes in an afternoon. It keeps no rule that the measured steps do not need
(no failure handling, no threads, no deadlines).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from conformance.bench.feed import Batch

HIDDEN = "hidden"


@dataclass
class Task:
    """Rows of one request and key on their way to the pool."""

    key: str
    slots: list[int]
    rows: torch.Tensor


@dataclass
class StraightforwardOutputs:
    hidden_states: dict[str, torch.Tensor]
    mm_outputs: dict[str, dict[str, Any]]


class StraightforwardCache:
    """Rows by key and slot in plain tensors; a step's rows by request; hits gathered block by block."""

    def __init__(self, num_blocks: int, block_size: int, batch: Batch, deferred: Iterable[str] = ()) -> None:
        self._num_slots, self._size, self._batch = num_blocks * block_size, block_size, batch
        self._deferred = set(deferred)
        self._pool: dict[str, torch.Tensor] = {}
        self._open: dict[str, list[Task]] = {}
        self._newest: dict[tuple[str, int], Task | None] = {}
        self._scheduled: dict[str, int] = {}
        self._hits: dict[str, list[int]] = {}
        self._steps: dict[int, dict[str, dict[str, torch.Tensor]]] = {}
        self._next = 0

    def new_step_starts(self, scheduler_output: Any) -> None:
        for req_id in scheduler_output.finished_req_ids:
            for task in self._open.pop(req_id, ()):
                self._write(task)
        self._scheduled = dict(scheduler_output.num_scheduled_tokens)
        self._hits = {
            new.req_id: [b * self._size for b in new.block_ids[0][: new.num_computed_tokens // self._size]]
            for new in scheduler_output.scheduled_new_reqs
        }

    def save_outputs(self, hidden: torch.Tensor | None, mm_outputs: Mapping[str, Any] | None, /, **_counts: int) -> int:
        assert hidden is not None
        step: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in {HIDDEN: hidden, **(mm_outputs or {})}.items():
            if key not in self._pool:
                self._pool[key] = torch.zeros((self._num_slots, *tensor.shape[1:]), dtype=tensor.dtype)
            at, step[key] = 0, {}
            for req_id in self._batch.req_ids:
                task = Task(key, self._slots(req_id), tensor[at : at + self._scheduled[req_id]].clone())
                if key in self._deferred:
                    self._open.setdefault(req_id, []).append(task)
                    self._newest.update(((key, slot), task) for slot in task.slots)
                else:
                    self._write(task)
                at, step[key][req_id] = at + len(task.slots), task.rows
        for key, by_request in step.items():  # after the writes, so that a hit on this very step's rows finds them
            for req_id, blocks in self._hits.items():
                by_request[req_id] = torch.cat([*(self._block(key, first) for first in blocks), by_request[req_id]])
        self._next += 1
        self._steps[self._next] = step
        return self._next

    def materialize(self, step_id: int, req_ids: list[str]) -> StraightforwardOutputs:
        step = self._steps.pop(step_id)
        mine = {key: {r: by_request[r] for r in req_ids} for key, by_request in step.items()}
        return StraightforwardOutputs(mine.pop(HIDDEN), dict(mine))

    def discard_step(self, step_id: int) -> None:
        del self._steps[step_id]

    def shutdown(self) -> None:
        self._pool.clear()

    def _slots(self, req_id: str) -> list[int]:
        row = self._batch.req_id_to_index[req_id]
        start = int(self._batch.num_computed_tokens_cpu[row])
        blocks = self._batch.table[row].tolist()
        return [
            blocks[p // self._size] * self._size + p % self._size for p in range(start, start + self._scheduled[req_id])
        ]

    def _write(self, task: Task) -> None:
        """Rows to the pool, those left out that a newer task has the slot of."""
        for i, slot in enumerate(task.slots):
            if self._newest.get((task.key, slot), task) is task:
                self._newest.pop((task.key, slot), None)
                self._pool[task.key][slot] = task.rows[i]

    def _block(self, key: str, first: int) -> torch.Tensor:
        slots = range(first, first + self._size)
        waiting = [self._newest.get((key, slot)) for slot in slots]
        if not any(waiting):
            return self._pool[key][first : first + self._size]
        rows = [
            self._pool[key][slot] if task is None else task.rows[task.slots.index(slot)]
            for slot, task in zip(slots, waiting, strict=True)
        ]
        return torch.stack(rows)
