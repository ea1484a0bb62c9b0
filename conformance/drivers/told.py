"""The reference model's calls as a trace: what it was asked, and what it answered as what is due.

So whoever drives the reference model, with any environment, gets a trace that runs on every other driver. `ToldDriver`
stands in for `EagerDriver`; a class of both records another driver, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.schedules.oracle import HIDDEN_KEY
from conformance.schedules.trace import (
    Admission,
    Discard,
    Due,
    Event,
    Header,
    KeySetting,
    Materialize,
    Part,
    Save,
    Shutdown,
    Start,
    Trace,
    Unsaved,
)
from omni_prefix_ref import BatchItem, EagerDriver, Settings, StepStart
from omni_prefix_ref.errors import OmniPrefixCacheUnmatchError

LABEL_OF_NONE = -1
"""Of a step id that was never issued, and of a save that was refused before it had one."""


class ToldDriver(EagerDriver):
    """The reference cache, which keeps what it was asked."""

    def __init__(self, settings: Settings, **kwargs: Any) -> None:
        super().__init__(settings, **kwargs)
        self.events: list[Event] = []
        self._labels: dict[int, int] = {}
        self._at: dict[str, int] = {}
        """Where each live request's next token is, if the engine computes what it starts."""
        self._begins: dict[str, int] = {}
        """Where each request of the present step begins."""

    def trace(self) -> Trace:
        """All of it so far."""
        return Trace(header=header_of(self.machine.settings), events=list(self.events))

    def new_step_starts(self, start: StepStart) -> None:
        """See `EagerDriver`."""
        for req in start.finished:
            self._at.pop(req, None)
        admitted = {admission.req: admission.computed for admission in start.admitted}
        self._begins = {req: admitted.get(req, self._at.get(req, 0)) for req in start.scheduled}
        self._at |= {req: self._begins[req] + count for req, count in start.scheduled.items()}
        event = Start(
            finished=list(start.finished),
            running={req: begin for req, begin in self._begins.items() if req not in admitted},
            admitted=[
                Admission(req=a.req, computed=a.computed, blocks=None if a.blocks is None else list(a.blocks))
                for a in start.admitted
            ],
            scheduled=dict(start.scheduled),
        )
        self._told(event, lambda: super(ToldDriver, self).new_step_starts(start))

    def forward_not_saved(self, slots: tuple[int, ...]) -> None:
        """See `EagerDriver`. The slots are the step's requests', in the order in which it was scheduled."""
        super().forward_not_saved(slots)
        started = next(event for event in reversed(self.events) if isinstance(event, Start))
        batch: list[Part] = []
        for req, count in started.scheduled.items():
            batch.append(Part(req=req, start=self._begins[req], slots=list(slots[:count])))
            slots = slots[count:]
        self.events.append(Unsaved(batch=batch))

    def save_outputs(self, batch: tuple[BatchItem, ...], rows: Any, *, widths: Mapping[str, int] | None = None) -> int:
        """See `EagerDriver`. Widths are told in lanes of one byte."""
        event = Save(
            label=len(self._labels),
            batch=[Part(req=item.req, start=item.start, slots=list(item.slots)) for item in batch],
            padded=sum(len(item.slots) for item in batch),
            rows={key: list(column) for key, column in rows.items()},
            widths=dict(widths or {}),
            clone_fails=self.fail_clone,
        )
        step: int = self._told(event, lambda: super(ToldDriver, self).save_outputs(batch, rows, widths=widths))
        self._labels[step] = event.label
        return step

    def materialize(self, step: int, reqs: tuple[str, ...]) -> Any:
        """See `EagerDriver`."""
        event = Materialize(label=self._labels.get(step, LABEL_OF_NONE), reqs=list(reqs))
        outputs = self._told(event, lambda: super(ToldDriver, self).materialize(step, reqs))
        rows = {key: {req: list(column) for req, column in of.items()} for key, of in outputs.rows.items()}
        self.events[-1] = event.model_copy(update={"due": Due(rows=rows, spans=dict(outputs.spans))})
        return outputs

    def discard_step(self, step: int) -> None:
        """See `EagerDriver`."""
        event = Discard(label=self._labels.get(step, LABEL_OF_NONE))
        self._told(event, lambda: super(ToldDriver, self).discard_step(step))

    def shutdown(self) -> None:
        """See `EagerDriver`."""
        self.events.append(Shutdown())
        super().shutdown()

    def _told(self, event: Event, call: Callable[[], Any]) -> Any:
        """Make the call, and keep it with the error that it raised, if it raised one."""
        try:
            answer = call()
        except (OmniPrefixCacheUnmatchError, MemoryError) as error:
            self.events.append(event.model_copy(update={"error": type(error).__name__}))
            raise
        self.events.append(event)
        return answer


def header_of(settings: Settings) -> Header:
    """The header for a machine's settings. Of a key the machine knows the bytes of a row only."""
    return Header(
        seed=0,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        keys=[_key(spec.name, spec.row_bytes, deferred=spec.deferred) for spec in settings.keys],
        staging_depth=settings.staging_depth,
        page_rows=settings.page_rows,
        budget_bytes=settings.budget_bytes,
    )


def _key(name: str, row_bytes: int, *, deferred: bool) -> KeySetting:
    item_bytes = 4 if name == HIDDEN_KEY or row_bytes % 8 else 8
    if row_bytes % item_bytes:
        raise ValueError(f"rows of {name!r} have {row_bytes} bytes; a trace has lanes of 4 or 8")
    return KeySetting(name=name, width=row_bytes // item_bytes, item_bytes=item_bytes, deferred=deferred)
