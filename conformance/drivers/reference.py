"""Drives the reference model: eagerly, or with a committer and a prefetch thread that move when a seed says so."""

from __future__ import annotations

import contextlib
import random
from typing import Any

from conformance.schedules.driver import Outcome, Snapshot
from conformance.schedules.trace import (
    Discard,
    Due,
    Event,
    Fail,
    Header,
    Materialize,
    Rest,
    Save,
    Shutdown,
    Start,
    Unsaved,
)
from omni_prefix_ref import Admission, BatchItem, EagerDriver, KeySpec, Machine, Outputs, Rules, Settings, StepStart
from omni_prefix_ref.errors import NotEnabled, OmniPrefixCacheUnmatchError
from omni_prefix_ref.state import Occupancy

NEVER_ISSUED = -1


def settings_of(header: Header) -> Settings:
    """The machine's settings for a trace."""
    return Settings(
        block_size=header.block_size,
        num_blocks=header.num_blocks,
        keys=tuple(KeySpec(key.name, key.row_bytes, key.deferred) for key in header.keys),
        staging_depth=header.staging_depth,
        page_rows=header.page_rows,
        budget_bytes=header.budget_bytes,
    )


class LaggingDriver(EagerDriver):
    """Between any two actions of a call, other threads may move: the committer by an action, or a read's prefetch.

    Writes are queued and not awaited, so they overlap later steps. The same `random.Random` gives the same run.
    """

    def __init__(self, *args: Any, rng: random.Random, **kwargs: Any) -> None:
        self.rng = rng
        self.pace = rng.choice((0.01, 0.05, 0.25))
        """How readily other threads move: a committer may fall steps behind, or keep up."""
        self._nested = False
        self._committing = False
        super().__init__(*args, **kwargs)

    def dispatch(self) -> None:
        """Queue what is ready; the committer takes it up when it likes."""
        self.queue_tasks()

    def commit_some(self) -> bool:
        """One action of the committer, which is one thread: it does nothing else meanwhile."""
        self._committing = True
        try:
            return super().commit_some()
        finally:
            self._committing = False

    def between(self) -> None:
        """Let another thread move, now and then."""
        if self._nested:
            return
        self._nested = True
        try:
            while self.rng.random() < self.pace:
                self.move_another_thread()
        finally:
            self._nested = False

    def move_another_thread(self) -> None:
        """One action of the committer or of the prefetch thread."""
        planned = [r for r, hit in self.machine.reads.items() if hit.plan is not None and hit.rows is None]
        if planned and self.rng.random() < 0.3:
            with contextlib.suppress(NotEnabled, OmniPrefixCacheUnmatchError):
                self.do("fetch_read", self.rng.choice(planned))
        elif not self._committing:
            self.commit_some()


class ReferenceDriver:
    """Applies a trace to the reference model. `lag`: a seed for the other threads, or None for none."""

    def __init__(
        self,
        header: Header,
        *,
        lag: int | None = None,
        machine: type[Machine] = Machine,
        driver: type[EagerDriver] = EagerDriver,
        checked: bool = True,
    ) -> None:
        self.header = header
        self.rules = Rules()
        observers = (self.rules,) if checked else ()
        settings = settings_of(header)
        if lag is None:
            self.cache = driver(settings, machine=machine, observers=observers)
        else:
            rng = random.Random(f"lag {lag}")
            lagging = type("Lagging", (driver, LaggingDriver), {}) if driver is not EagerDriver else LaggingDriver
            self.cache = lagging(settings, machine=machine, observers=observers, rng=rng)
        self._steps: dict[int, int] = {}
        self._told: dict[str, tuple[tuple[Occupancy, ...], tuple[str, ...]]] = {}

    def apply(self, event: Event) -> Outcome:
        """Apply one event."""
        try:
            outputs = self._call(event)
        except (OmniPrefixCacheUnmatchError, MemoryError) as error:
            return Outcome(error=type(error).__name__, detail=str(error))
        return Outcome(due=None if outputs is None else _due(outputs))

    def snapshot(self) -> Snapshot:
        """The machine's tables."""
        m = self.cache.machine
        return Snapshot(
            version=m.version,
            occupancy={key: names for key, column in m.occupancy.items() if (names := self._names(key, column))},
            writes=tuple((t.req, t.write_n, t.state.value) for t in m.tasks.values()),
            unfetched=m.pins,
            charged=m.charged,
            pages_held=sum(bool(page.holders) for page in m.pages),
            emitted=dict(m.emitted),
        )

    def _names(self, key: str, column: tuple[Occupancy, ...]) -> tuple[str, ...]:
        """A column in words; nothing if all of it is absent. A column that did not change is the same object."""
        if key not in self._told or self._told[key][0] is not column:
            names = tuple(o.value for o in column)
            self._told[key] = column, names if any(name != "absent" for name in names) else ()
        return self._told[key][1]

    def _call(self, event: Event) -> Outputs | None:
        cache = self.cache
        match event:
            case Start():
                cache.new_step_starts(start_of(event))
            case Save():
                self._save(event)
            case Unsaved():
                cache.forward_not_saved(tuple(slot for part in event.batch for slot in part.slots))
            case Materialize():
                return cache.materialize(self._steps.get(event.label, NEVER_ISSUED), tuple(event.reqs))
            case Discard():
                cache.discard_step(self._steps.get(event.label, NEVER_ISSUED))
            case Fail():
                cache.fail_next = event.stage if event.stage in {"copy", "write"} and not event.after else None
            case Rest():
                self._rest()
            case Shutdown():
                cache.shutdown()
        return None

    def _save(self, event: Save) -> None:
        batch = tuple(BatchItem(part.req, part.start, tuple(part.slots)) for part in event.batch)
        rows = {key: tuple(column) for key, column in event.rows.items()}
        item = {key.name: key.item_bytes for key in self.header.keys}
        widths = {key: width * item[key] for key, width in event.widths.items()}
        self.cache.fail_clone = event.clone_fails
        try:
            self._steps[event.label] = self.cache.save_outputs(batch, rows, widths=widths)
        finally:
            self.cache.fail_clone = False

    def _rest(self) -> None:
        while self.cache.commit_some():
            pass
        if self.cache.machine.failure is None:
            self.rules.at_rest(self.cache.machine)


def start_of(event: Start) -> StepStart:
    """The reference's form of a start event."""
    admitted = tuple(
        Admission(a.req, a.computed, None if a.blocks is None else tuple(a.blocks)) for a in event.admitted
    )
    return StepStart(tuple(event.finished), admitted, event.scheduled)


def _due(outputs: Outputs) -> Due:
    rows = {key: {req: list(column) for req, column in of_key.items()} for key, of_key in outputs.rows.items()}
    return Due(rows=rows, spans=dict(outputs.spans))
