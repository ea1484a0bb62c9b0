"""What was handed over, held against what is owed, bit for bit and position by position.

What is owed comes from the run with prefix caching off. Four things are checked of each step:

- *Positions.* A span ends where the step's computation ends, leaves no gap after what was offered before, and starts
  where computation starts unless the request was admitted in this step.
- *Rows.* Each row has the bits that the other run computed at that position. A key that not every token emits may be
  left out where no token of the span emits it; elsewhere its rows are due, and zeros where a token has none.
- *Later.* Some of what was handed over is kept and compared again at the end of the run: nothing may write to it.
- *Leftovers.* What is no row comes back whole: the list entry of the request itself, the tensor that is everybody's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conformance.engine.engine import REFERENCE, TAGS
from conformance.engine.model import VOICE
from omni_prefix_fast.types import HIDDEN_KEY, Span, StageCacheOutputs

MAX_NOTES = 20
KEEP_EVERY = 200
"""One in so many tensors handed over is kept to the end of the run."""


@dataclass(slots=True)
class Owed:
    """All rows of one request, from the run with prefix caching off; row ``p`` is that of position ``p``."""

    rows: dict[str, torch.Tensor]
    emits: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the engine knew of a step when it saved it, for when it is consumed, however late."""

    step_id: int
    computed: Mapping[str, int]
    counts: Mapping[str, int]
    admitted: frozenset[str]
    leftovers: Mapping[str, Mapping[str, torch.Tensor]]


def same_rows(got: torch.Tensor, want: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Which rows have the same bits. Shapes and dtypes must be equal for any of them to have."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return np.zeros(len(want), dtype=np.bool_)
    if not len(want):
        return np.ones(0, dtype=np.bool_)
    left, right = (rows.contiguous().reshape(len(want), -1).view(torch.uint8).numpy() for rows in (got, want))
    equal: npt.NDArray[np.bool_] = (left == right).all(axis=1)
    return equal


@dataclass(slots=True)
class Ledger:
    """Collects the findings of one run. ``notes`` describes the first of them.

    ``gaps`` counts resumed requests whose hit was larger than what had been offered: rows between come from the cache.
    """

    owed: Mapping[str, Owed]
    hidden: bool = True
    rows_compared: int = 0
    rows_from_cache: int = 0
    leftovers_compared: int = 0
    gaps: int = 0
    rows_kept: int = 0
    differences: int = 0
    missing: int = 0
    notes: list[str] = field(default_factory=list)
    _offered: dict[str, int] = field(default_factory=dict)
    _settled: int = 0
    _kept: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _due_from: dict[int, dict[str, int]] = field(default_factory=dict)

    def save(self, ticket: Ticket) -> None:
        """A step was saved: from here on its positions count as offered, whatever becomes of it."""
        due = self._due_from[ticket.step_id] = {}
        for req_id, computed in ticket.computed.items():
            offered = self._offered.get(req_id, 0)
            start = due[req_id] = min(offered, computed) if req_id in ticket.admitted else computed
            if start > offered:
                self._miss(f"{req_id}: positions {offered}..{start - 1} were never offered", start - offered)
            self.gaps += 0 < offered < computed
            self._offered[req_id] = max(offered, computed + ticket.counts[req_id])

    def drop(self, ticket: Ticket) -> None:
        """A step was discarded: nothing of it is handed over."""
        del self._due_from[ticket.step_id]

    def settle(self, ticket: Ticket, req_ids: list[str], outs: StageCacheOutputs) -> None:
        """A step was materialized for these requests: compare all that it handed over."""
        due = self._due_from.pop(ticket.step_id)
        if (outs.hidden_states is not None) != self.hidden:
            self._differ(f"step {ticket.step_id}: hidden_states is {type(outs.hidden_states).__name__}", 1)
        for req_id in req_ids:
            span = outs.spans.get(req_id)
            end = ticket.computed[req_id] + ticket.counts[req_id]
            if span is None or span[1] != end or span[0] > due[req_id]:
                want = (due[req_id], end)
                self._miss(f"step {ticket.step_id} {req_id}: span {span}, due {want}", want[1] - want[0])
                continue
            self._settle_rows(ticket, req_id, outs, span)
            self._settle_leftovers(ticket, req_id, outs.mm_outputs)

    def close(self, computed: Mapping[str, int]) -> None:
        """The run is over: every position that was computed or hit must have been offered."""
        for req_id, end in computed.items():
            offered = self._offered.get(req_id, 0)
            if offered < end:
                self._miss(f"{req_id}: offered only {offered} of {end} positions", end - offered)
        for what, rows, want in self._kept:
            changed = int((~same_rows(rows, want)).sum())
            self.rows_kept += len(rows)
            if changed:
                self._differ(f"{what}: {changed} rows changed after they were handed over", changed)
        self._kept.clear()
        if self._due_from:
            self._miss(f"steps {sorted(self._due_from)} were never consumed", len(self._due_from))

    def _settle_rows(self, ticket: Ticket, req_id: str, outs: StageCacheOutputs, span: Span) -> None:
        computed = ticket.computed[req_id]
        owed = self.owed[req_id]
        for key in owed.rows:
            if key == HIDDEN_KEY:
                if self.hidden and outs.hidden_states is not None:
                    self._compare(ticket.step_id, req_id, key, span, computed, outs.hidden_states.get(req_id))
                continue
            key_span = outs.mm_spans.get(key, {}).get(req_id)
            rows = outs.mm_outputs.get(key, {}).get(req_id)
            if key == VOICE and not self._voice_is_whole(req_id, span, key_span):
                self._miss(f"step {ticket.step_id} {req_id}: {key} covers {key_span} of {span}, and more is due", 1)
            elif key != VOICE and key_span != span:
                self._miss(f"step {ticket.step_id} {req_id}: {key} covers {key_span} of {span}", span[1] - span[0])
            elif key_span is not None:
                self._compare(ticket.step_id, req_id, key, key_span, computed, rows)

    def _voice_is_whole(self, req_id: str, span: Span, key_span: Span | None) -> bool:
        """Whether every position of ``span`` that emits is covered, and nothing beyond the span."""
        emits = self.owed[req_id].emits
        start, end = key_span or (span[1], span[1])
        inside = span[0] <= start <= end <= span[1]
        return inside and not emits[span[0] : start].any() and not emits[end : span[1]].any()

    def _compare(self, step_id: int, req_id: str, key: str, span: Span, computed: int, rows: Any) -> None:
        start, end = span
        if not isinstance(rows, torch.Tensor):
            self._miss(f"step {step_id} {req_id}: {key} over {span} is {type(rows).__name__}", end - start)
            return
        want = self.owed[req_id].rows[key][start:end]
        same = same_rows(rows, want)
        self._settled += 1
        if self._settled % KEEP_EVERY == 0:
            self._kept.append((f"step {step_id} {req_id}: {key}", rows, want))
        self.rows_compared += end - start
        self.rows_from_cache += max(min(computed, end) - start, 0)
        if not same.all():
            wrong = start + np.flatnonzero(~same)
            self._differ(f"step {step_id} {req_id}: {key} differs at positions {wrong.tolist()[:8]}", len(wrong))

    def _settle_leftovers(self, ticket: Ticket, req_id: str, payloads: Mapping[str, Mapping[str, Any]]) -> None:
        for key in (REFERENCE, TAGS):
            got, want = payloads.get(key, {}).get(req_id), ticket.leftovers[key][req_id]
            self.leftovers_compared += 1
            if not isinstance(got, torch.Tensor) or not torch.equal(got, want):
                self._differ(f"step {ticket.step_id} {req_id}: {key} is {got}, not {want}", 1)

    def _differ(self, note: str, count: int) -> None:
        self.differences += count
        self._note(note)

    def _miss(self, note: str, count: int) -> None:
        self.missing += count
        self._note(note)

    def _note(self, note: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(note)
