"""What a consumer received: rows by request, key and position, checked for gaps and for rows that changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from conformance.vllm.truth import LIST_KEY, REFERENCE_KEY, SOMETIMES_KEY, true_reference
from omni_prefix_fast.types import HIDDEN_KEY, ReqId
from omni_prefix_fast.vllm.sinks import Delivery, Finished, Message


@dataclass(slots=True)
class KeyRows:
    """Rows of one request and key. `there[p]` tells whether position p was handed over."""

    rows: torch.Tensor
    there: npt.NDArray[np.bool_]

    @classmethod
    def like(cls, rows: torch.Tensor) -> KeyRows:
        return cls(rows.new_empty((0, *rows.shape[1:])), np.zeros(0, dtype=np.bool_))

    def put(self, start: int, rows: torch.Tensor) -> tuple[int, int]:
        """Keep rows from position `start` on. Returns how many came again, and how many of these are different."""
        end = start + rows.shape[0]
        if end > len(self.there):
            more = end - len(self.there)
            self.rows = torch.cat([self.rows, self.rows.new_zeros((more, *self.rows.shape[1:]))])
            self.there = np.concatenate([self.there, np.zeros(more, dtype=np.bool_)])
        again = self.there[start:end]
        changed = 0
        if again.any():
            differs = ~rows_equal(self.rows[start:end], rows)
            changed = int((differs & again).sum())
        self.rows[start:end] = rows
        self.there[start:end] = True
        return int(again.sum()), changed

    def gaps(self, length: int) -> int:
        """Positions below `length` that never came."""
        return length - int(self.there[:length].sum())


def rows_equal(a: torch.Tensor, b: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Row by row, whether the bits are the same."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return np.zeros(a.shape[0], dtype=np.bool_)
    if a.shape[0] == 0:
        return np.zeros(0, dtype=np.bool_)
    flat_a = a.contiguous().reshape(a.shape[0], -1).view(torch.uint8).numpy()
    flat_b = b.contiguous().reshape(b.shape[0], -1).view(torch.uint8).numpy()
    equal: npt.NDArray[np.bool_] = (flat_a == flat_b).all(axis=1)
    return equal


@dataclass(slots=True)
class Received:
    """One request."""

    keys: dict[str, KeyRows] = field(default_factory=dict)
    finished: bool = False


@dataclass(slots=True)
class Recorder:
    """A sink that keeps everything. Used by one thread at a time."""

    requests: dict[ReqId, Received] = field(default_factory=dict)
    deliveries: int = 0
    rows: int = 0
    """Rows of hidden states, or of the widest-covering key where hidden states are skipped."""
    rows_again: int = 0
    rows_changed: int = 0
    problems: list[str] = field(default_factory=list)
    _last_step: int = -1

    def receive(self, message: Message) -> None:
        """See `Sink`."""
        if isinstance(message, Finished):
            for req_id in message.req_ids:
                if req_id in self.requests:
                    self.requests[req_id].finished = True
            return
        self.deliveries += 1
        if message.step_id <= self._last_step:
            self.problems.append(f"step {message.step_id} came after step {self._last_step}")
        self._last_step = message.step_id
        for i, req_id in enumerate(message.req_ids):
            self._take(req_id, i, message)

    def _take(self, req_id: ReqId, index: int, delivery: Delivery) -> None:
        outputs = delivery.outputs
        received = self.requests.setdefault(req_id, Received())
        if received.finished:
            self.problems.append(f"{req_id} got rows of step {delivery.step_id} after it had finished")
        start, end = outputs.spans[req_id]
        self.rows += end - start
        if outputs.hidden_states is not None:
            self._put(req_id, HIDDEN_KEY, (start, end), outputs.hidden_states[req_id])
        for key, payloads in outputs.mm_outputs.items():
            spans = outputs.mm_spans.get(key)
            if spans is not None:
                if req_id in payloads:
                    self._put(req_id, key, spans[req_id], payloads[req_id])
            elif key == REFERENCE_KEY:
                if not np.array_equal(payloads[req_id].numpy(), true_reference()):
                    self.problems.append(
                        f"{req_id}: {key} is {tuple(payloads[req_id].shape)} in step {delivery.step_id}"
                    )
            elif key == LIST_KEY:
                if payloads[req_id].shape != (1,):
                    self.problems.append(f"{req_id}: {key} is not this request's own entry ({index})")
            else:
                self.problems.append(f"{key} was handed over without positions")

    def _put(self, req_id: ReqId, key: str, span: tuple[int, int], rows: torch.Tensor) -> None:
        if rows.shape[0] != span[1] - span[0]:
            self.problems.append(f"{req_id}: {rows.shape[0]} rows of {key} for span {span}")
            return
        kept = self.requests[req_id].keys.setdefault(key, KeyRows.like(rows))
        if kept.rows.dtype != rows.dtype or kept.rows.shape[1:] != rows.shape[1:]:
            self.problems.append(f"{req_id}: rows of {key} changed to {rows.dtype} {tuple(rows.shape[1:])}")
            return
        again, changed = kept.put(span[0], rows.clone())
        self.rows_again += again
        if key != SOMETIMES_KEY:  # zeros from a hit on blocks without rows may become rows when they are recomputed
            self.rows_changed += changed

    def close(self) -> None:
        """See `Sink`."""
