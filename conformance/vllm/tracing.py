"""Writes a real engine's calls of the cache as a trace, line by line: the `record` setting of the integration.

A row is told by its content: equal bits are one number, whichever request they are of. What a step is due is worked out
from the rows that were saved and from the engine's own block tables, not taken from the cache, so that a replay finds
what the cache did wrong. Declared per-token keys and hidden states are recorded; other values have no slots.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

import torch

from conformance.schedules.content import ROWS
from conformance.schedules.oracle import HIDDEN_KEY, Delivery, due_of
from conformance.schedules.trace import (
    Admission,
    Discard,
    Event,
    Header,
    KeySetting,
    Materialize,
    Part,
    Rest,
    Save,
    Shutdown,
    Start,
    Trace,
    Unsaved,
)
from omni_prefix_fast.config import ModelCachePolicy, PrefixCacheConfig

BUDGET = 1 << 30
"""Bytes. A trace's rows are narrow, so the engine's own budget would mean nothing: here it never binds."""


def record(cache: Any, view: Any, config: PrefixCacheConfig, policy: ModelCachePolicy, path: Path) -> RecordedCache:
    """What the `record` setting names by default."""
    return RecordedCache(cache, view, config, policy, path)


def row_number(row: torch.Tensor) -> int:
    """A row by its bits, its type and its shape."""
    told = f"{row.dtype} {tuple(row.shape)}".encode()
    bits = row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return 1 + int.from_bytes(blake2b(told + bits, digest_size=8).digest(), "big") % ROWS


class RecordedCache:
    """Stands before a cache, passes every call on, and writes it down. Calls may come from several threads."""

    def __init__(self, cache: Any, view: Any, config: PrefixCacheConfig, policy: ModelCachePolicy, path: Path) -> None:
        self._cache = cache
        self._view = view
        self._lock = threading.Lock()
        self._file: TextIO = path.open("w", encoding="utf-8")
        keys = [KeySetting(name=HIDDEN_KEY, width=2, item_bytes=4)] if policy.needs_full_hidden_states else []
        keys += [
            KeySetting(name=key, width=1, item_bytes=8, deferred=key in policy.deferred_keys)
            for key in sorted((policy.token_keys or frozenset()) | policy.deferred_keys)
        ]
        self._header = Header(
            seed=0,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            keys=keys,
            staging_depth=config.staging_depth,
            page_rows=config.staging_capacity_tokens,
            budget_bytes=BUDGET,
        )
        self._ledger = _Ledger([key.name for key in keys], config.block_size)
        self._labels: dict[int, int] = {}
        self._open: dict[int, dict[str, Delivery]] = {}
        self._started: tuple[Start, dict[str, int]] | None = None
        """The step that was started and not saved: its event, and where each request begins."""
        self._write(Trace(header=self._header, events=[]).lines())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def new_step_starts(self, scheduler_output: Any) -> None:
        """See the cache."""
        with self._lock:
            self._give_up()
            event, starts = _start_of(scheduler_output)
            for req in event.finished:
                self._ledger.forget(req)
            self._started = (event, starts) if event.scheduled else None
        try:
            self._cache.new_step_starts(scheduler_output)
        except BaseException as error:
            self._tell(event.model_copy(update={"error": type(error).__name__}))
            raise
        self._tell(event)

    def save_outputs(
        self, hidden: Any, mm_outputs: Mapping[str, Any] | None, *, num_tokens_unpadded: int, num_tokens_padded: int
    ) -> int:
        """See the cache."""
        with self._lock:
            batch = self._batch()
            tensors = {HIDDEN_KEY: hidden, **(mm_outputs or {})}
            rows = {
                key: [row_number(row) for row in tensors[key][:num_tokens_unpadded].cpu()]
                for key in self._ledger.keys
                if tensors.get(key) is not None
            }
            event = Save(label=len(self._labels), batch=batch, padded=num_tokens_padded, rows=rows)
        try:
            step: int = self._cache.save_outputs(
                hidden, mm_outputs, num_tokens_unpadded=num_tokens_unpadded, num_tokens_padded=num_tokens_padded
            )
        except BaseException as error:
            self._tell(event.model_copy(update={"error": type(error).__name__}))
            raise
        with self._lock:
            assert self._started is not None
            self._labels[step] = event.label
            self._open[step] = self._ledger.saved(event, self._started[0])
            self._started = None
            self._write_event(event)
        return step

    def materialize(self, step_id: int, req_ids: Sequence[str]) -> Any:
        """See the cache."""
        with self._lock:
            label = self._labels.get(step_id, -1)
            due, error = due_of(self._open.pop(step_id, {}), req_ids)
            self._write_event(Materialize(label=label, reqs=list(req_ids), due=due, error=error))
        return self._cache.materialize(step_id, req_ids)

    def discard_step(self, step_id: int) -> None:
        """See the cache."""
        with self._lock:
            self._open.pop(step_id, None)
            self._write_event(Discard(label=self._labels.get(step_id, -1)))
        self._cache.discard_step(step_id)

    def shutdown(self) -> None:
        """See the cache. The trace ends with everybody's finish where the engine left some running."""
        with self._lock:
            if not self._file.closed:
                self._give_up()
                if live := self._ledger.live():
                    self._write_event(Start(finished=live))
                for step in list(self._open):
                    self._write_event(Discard(label=self._labels[step]))
                self._write_event(Rest())
                self._write_event(Shutdown())
                self._file.close()
        self._cache.shutdown()

    def _batch(self) -> list[Part]:
        """The step that was started, by the engine's own tables."""
        if self._started is None:
            return []
        event, starts = self._started
        reqs = [req for req in self._view.batch_req_ids() if event.scheduled.get(req)]
        slots: list[int] = self._view.step_slots_cpu(reqs, event.scheduled).tolist()
        batch: list[Part] = []
        for req in reqs:
            count = event.scheduled[req]
            batch.append(Part(req=req, start=starts[req], slots=slots[:count]))
            slots = slots[count:]
        return batch

    def _give_up(self) -> None:
        """A step that was never saved: the engine's tables are still its own when the next one starts."""
        if self._started is not None:
            batch = self._batch()
            self._ledger.lost(batch)
            self._write_event(Unsaved(batch=batch))
            self._started = None

    def _tell(self, event: Event) -> None:
        with self._lock:
            self._write_event(event)

    def _write_event(self, event: Event) -> None:
        _, line = Trace(header=self._header, events=[event]).lines()
        self._write([line])

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._file.write(f"{line}\n")
        self._file.flush()


class _Ledger:
    """Which rows each slot was computed with last, and how far each live request was served."""

    def __init__(self, keys: Sequence[str], block_size: int) -> None:
        self.keys = tuple(keys)
        self._block_size = block_size
        self._rows: dict[int, dict[str, int]] = {}
        self._offered: dict[str, int] = {}

    def live(self) -> list[str]:
        """Requests whose end was not told."""
        return list(self._offered)

    def forget(self, req: str) -> None:
        """A request's end is told."""
        self._offered.pop(req, None)

    def lost(self, batch: Sequence[Part]) -> None:
        """A step's slots were computed, and nobody has their rows."""
        for part in batch:
            self._rows.update({slot: {} for slot in part.slots})
            self._offered.setdefault(part.req, 0)

    def saved(self, event: Save, start: Start) -> dict[str, Delivery]:
        """A step is saved. Returns what each of its requests is due."""
        at = 0
        for part in event.batch:
            for slot in part.slots:
                self._rows[slot] = {key: column[at] for key, column in event.rows.items()}
                at += 1
        tables = {admission.req: admission.blocks or [] for admission in start.admitted}
        return {part.req: self._deliver(part, tables.get(part.req), event.rows) for part in event.batch}

    def _deliver(self, part: Part, blocks: Sequence[int] | None, emitted: Mapping[str, Any]) -> Delivery:
        begin = part.start if blocks is None else min(self._offered.get(part.req, 0), part.start)
        end = part.start + len(part.slots)
        self._offered[part.req] = end
        size = self._block_size
        hit = [(blocks or ())[p // size] * size + p % size for p in range(begin, part.start)]
        rows: dict[str, list[int]] = {}
        lost = False
        for key in self.keys:
            cached = [self._rows.get(slot, {}).get(key) for slot in hit]
            lost = lost or (key == HIDDEN_KEY and None in cached)
            if key in emitted or any(row is not None for row in cached):
                mine = [self._rows[slot][key] for slot in part.slots] if key in emitted else []
                rows[key] = [row or 0 for row in cached] + mine
        return Delivery((begin, end), rows, lost)


def _start_of(scheduler_output: Any) -> tuple[Start, dict[str, int]]:
    """A scheduler output as an event, and by request the position that its step begins at."""
    admitted = [
        Admission(req=new.req_id, computed=new.num_computed_tokens, blocks=list(new.block_ids[0]))
        for new in scheduler_output.scheduled_new_reqs
    ]
    running: dict[str, int] = {}
    if (cached := scheduler_output.scheduled_cached_reqs) is not None:
        told = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for req, computed, blocks in told:
            if req in cached.resumed_req_ids:
                table = None if blocks is None else list(blocks[0])
                admitted.append(Admission(req=req, computed=computed, blocks=table, resumed=True))
            else:
                running[req] = computed
    event = Start(
        finished=sorted(scheduler_output.finished_req_ids),
        admitted=admitted,
        running=running,
        scheduled={req: count for req, count in scheduler_output.num_scheduled_tokens.items() if count},
    )
    return event, running | {admission.req: admission.computed for admission in admitted}
