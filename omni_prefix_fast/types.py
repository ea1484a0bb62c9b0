"""Words shared by every module: the hidden key, ids, occupancy, task states, and what a step hands over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

HIDDEN_KEY = "__hidden_states__"
"""Name of the last hidden states among the keys. No mm output may carry it."""

Key: TypeAlias = str
ReqId: TypeAlias = str
StepId: TypeAlias = int
TaskId: TypeAlias = int
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Span: TypeAlias = tuple[int, int]
"""Absolute token positions, first included, last excluded."""


class Occupancy(IntEnum):
    """Whether a slot has a row of its current version under one key."""

    ABSENT = 0
    IN_TRANSIT = 1
    COMMITTED = 2


class TaskState(Enum):
    """Where a write task stands. `tasks.LEGAL_MOVES` is the table of the moves that exist."""

    PENDING = "pending"
    QUEUED = "queued"
    COPYING = "copying"
    HOST_READY = "host_ready"
    WRITTEN = "written"
    FAILED = "failed"

    __hash__ = object.__hash__  # members are singletons, and an Enum's own hash is a call in Python


class WriteSchedule(Enum):
    """When a key's rows are written to the pool, and so when somebody has to wait for them."""

    JOIN_NEXT_STEP = "join_next_step"
    """Immediate: written as soon as the step is saved; done before the next step saves."""
    JOIN_ON_FINISH = "join_on_finish"
    """Deferred: kept on the device until the request finishes, is aborted, or the byte budget needs the room."""


class Holder(NamedTuple):
    """Who needs a page: `("step", step_id)` or `("write", task_id)`."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"


@dataclass(frozen=True, slots=True)
class StageCacheOutputs:
    """What one step hands over to the next stage. Owned by the caller; the cache keeps no reference.

    Rows of requests without a hit are views of one tensor of the whole step, each its own part: changing one changes no
    other, but keeping or pickling one keeps or ships all. Clone what outlives its step.

    Attributes:
        hidden_states: rows of each request, `(end - start, *feature)`, host memory; None where the policy skips hidden.
        mm_outputs: `{key: {req_id: payload}}`. A per-token key's payload is rows over `mm_spans[key][req_id]`;
            anything else is the request's share of a leftover.
        spans: absolute positions `(start, end)` that the rows of each request cover: the cached prefix and this step.
        mm_spans: the same for each per-token mm key. It ends where the hit span ends if this step did not emit the key.
    """

    hidden_states: Mapping[ReqId, torch.Tensor] | None
    mm_outputs: Mapping[Key, Mapping[ReqId, Any]]
    spans: Mapping[ReqId, Span]
    mm_spans: Mapping[Key, Mapping[ReqId, Span]] = field(default_factory=dict)
