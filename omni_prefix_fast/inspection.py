"""Copies of the machine's tables, for conformance checks, debugging and footprint reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from omni_prefix_fast.machine import PrefixCacheMachine
from omni_prefix_fast.metrics import Footprint
from omni_prefix_fast.tasks import WriteTask
from omni_prefix_fast.types import Holder, IntArray, Key, Occupancy, ReqId, StepId, TaskId, TaskState

_OCCUPANCY = tuple(Occupancy)
"""By value: 0, 1, 2."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """State of a cache at one moment, under the names of docs/machine.md."""

    version: tuple[int, ...]
    owner: tuple[int, ...]
    """Step id by slot; -1 for none."""
    pins: tuple[int, ...]
    occupancy: Mapping[Key, tuple[Occupancy, ...]]
    tasks: Mapping[TaskId, TaskState]
    """Writes that are open or not committed yet."""
    open_writes: Mapping[ReqId, tuple[TaskId, int]]
    """The open deferred write of each request: task id and `write_n`."""
    emitted: Mapping[ReqId, int]
    """Live requests."""
    charged: int
    """Device bytes."""
    chunks: tuple[int, ...]
    """Log chunks that somebody holds."""
    unconsumed: tuple[StepId, ...]
    reads: Mapping[tuple[StepId, ReqId], str]
    """State of the hit reads of unconsumed steps."""
    pages: tuple[tuple[Holder, ...], ...]


def inspect_machine(machine: PrefixCacheMachine) -> Inspection:
    """Copy the tables. Any thread."""
    every = np.arange(machine.table.num_slots)
    with machine.lock, machine.held:
        log = machine.log
        tasks: list[WriteTask] = [*machine.writers.values(), *log.open_writes.values(), *log.sealed.values()]
        contexts = machine.steps.contexts()
        return Inspection(
            version=_tuple(machine.table.version),
            owner=_tuple(machine.table.owner),
            pins=_tuple(machine.table.pins.astype(np.int64)),
            occupancy={
                key: tuple(map(_OCCUPANCY.__getitem__, machine.table.occupancy(key, every).tolist()))
                for key in machine.table.open_keys()
            },
            tasks={task.task_id: task.state for task in tasks},
            open_writes={r: (t.task_id, t.write_n) for r, t in machine.log.open_writes.items()},
            emitted=machine.requests.watermarks(),
            charged=machine.budget.charged,
            chunks=tuple(machine.log.chunks),
            unconsumed=tuple(machine.steps.unconsumed()),
            reads={(c.layout.step_id, r): read.state.value for c in contexts for r, read in c.reads.items()},
            pages=machine.staging.holders(),
        )


def measure(machine: PrefixCacheMachine) -> Footprint:
    """Bytes allocated now. Any thread."""
    with machine.lock, machine.held:
        reads = [read for context in machine.steps.contexts() for read in context.reads.values()]
        return Footprint(
            pool_bytes=machine.pool.nbytes(),
            staging_bytes=machine.staging.nbytes(),
            table_bytes=machine.table.nbytes,
            device_bytes=machine.budget.charged,
            pending_bytes=sum(t.numel() * t.element_size() for read in reads for t in read.rows.values()),
        )


def _tuple(array: IntArray) -> tuple[int, ...]:
    return tuple(array.tolist())
