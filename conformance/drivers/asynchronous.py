"""The production cache with its own threads, under the serial scheduler and on the simulated device.

The engine thread takes a trace's events in order. Each materialize and discard goes to a builder, at its place in the
trace, and runs whenever the strategy lets it: steps are consumed late, in other orders, and in the middle of a save.
What is due stays the same. Events of one step stay in order, and the engine waits for the builders only where something
else would be due otherwise: before a save that is due to time out, and at rest.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from conformance.device.simulated import CONDITION, POISON, SimulatedDevice
from conformance.drivers.agree import tables_differ
from conformance.drivers.builders import Builders
from conformance.drivers.expected import tables_at_rest
from conformance.drivers.fast import FastDriver
from conformance.drivers.inject import Injected, Injector
from conformance.drivers.overlap import OverlappingJudge
from conformance.drivers.rules import OneWriter, UnderLock
from conformance.drivers.subject import Failure, Kind, Moment, Run
from conformance.interleave.runtime import POINTS, SerialRuntime
from conformance.interleave.strategies import Replay, Strategy, drawn
from conformance.interleave.tasks import CrashError, LeftBehindError, RunError, Task
from conformance.schedules.driver import Outcome
from conformance.schedules.trace import (
    TIMEOUT,
    Discard,
    Due,
    Event,
    Interleaving,
    Materialize,
    Rest,
    Save,
    Shutdown,
    Trace,
)
from omni_prefix_fast import OmniPrefixCacheStagingTimeoutError, OmniPrefixCacheWriteError, StageCacheOutputs

QUIET = ("counters", CONDITION, Builders.WORK, Builders.DONE)
"""Guard a few lines without a point in them."""
POINTS_OF_EVENT = 18
"""About how many points the event of a trace has: what change points of a strategy are drawn from."""
KEPT = 0.7
"""How likely a consumer keeps what it was handed, until the end of the run."""


class AsynchronousFast:
    """The production cache, asynchronous, every thread interleaved as a seed or a saved interleaving says."""

    name = "fast-async"
    interleaves = True

    def run(
        self, trace: Trace, *, seed: int = 0, interleaving: Interleaving | None = None, record: bool = False
    ) -> Run:
        """Run a trace."""
        if interleaving is None:
            strategy: Strategy = drawn(seed, max(1, POINTS_OF_EVENT * len(trace.events)))
            return Session(trace, serial_runtime(strategy), device_seed=seed, record=record).run()
        runtime = serial_runtime(Replay(interleaving.switches))
        return Session(trace, runtime, device_seed=interleaving.device_seed, record=record).run()


def serial_runtime(strategy: Strategy, *, limit: int = POINTS) -> SerialRuntime:
    """A runtime for one run of a session."""
    return SerialRuntime(strategy, quiet=QUIET, limit=limit)


class FoundError(Exception):
    """Something is wrong: the run ends here."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Device(SimulatedDevice):
    """Has no room for another clone where it is told so."""

    is_full = False

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        if self.is_full:
            raise MemoryError("the device has no room for the clone")
        return super().clone(rows, dtype)


class _Driver(FastDriver):
    """Keeps what was handed over, for a last look; and tells what is left behind after a failure, too."""

    def __init__(self, trace: Trace, runtime: SerialRuntime, device: _Device, session: Session) -> None:
        self.kept: list[tuple[StageCacheOutputs, Due]] = []
        self._drops = random.Random(f"consumer {session.device_seed}")
        super().__init__(
            trace.header,
            observe=session.observe,
            runtime=runtime,
            device=device,
            allocate=poisoned_outputs,
            faults=Injector(thread=lambda: runtime.thread, jump=runtime.jump),
        )

    def due_of(self, outputs: StageCacheOutputs, expected: Due | None = None) -> Due:
        """See `FastDriver`."""
        due = super().due_of(outputs, expected)
        if self._drops.random() < KEPT:
            self.kept.append((outputs, due))
        return due


class Session:
    """One run of one trace.

    Args:
        trace: what to run.
        runtime: of this run, and of no other one.
        device_seed: decides when copies land, how many builders there are, and what consumers drop.
        record: tell the moments.
        window: from which event to which one, the second left out, an exhaustive search looks for other interleavings.
            None: everywhere.
    """

    def __init__(
        self,
        trace: Trace,
        runtime: SerialRuntime,
        *,
        device_seed: int,
        record: bool = False,
        window: tuple[int, int] | None = None,
    ) -> None:
        self.trace = trace
        self.device_seed = device_seed
        self.runtime = runtime
        self._window = window
        self.actions: Counter[str] = Counter()
        self.moments: list[Moment] = []
        self._record = record
        self._at: dict[str, int] = {}
        """Event that each thread is busy with."""
        self._events = 0
        self._waited = 0.0
        """What the clock may show: the time that due time-outs took."""
        self._device = _Device(device_seed, runtime=self.runtime, on_call=self.runtime.point)
        self._driver = _Driver(trace, self.runtime, self._device, self)
        self._judge = OverlappingJudge()
        self._one_writer = OneWriter()
        self._under_lock = UnderLock(self._driver.cache, lambda: runtime.baton.running.holds)
        self._builders = Builders(self.runtime, 1 + device_seed % 2, self._apply)
        if record:
            self.runtime.baton.on_turn = self._turn

    def run(self) -> Run:
        """Run the trace to its end, or to the first failure."""
        failure: Failure | None = None
        try:
            self.runtime.run(self.program)
        except FoundError as found:
            failure = found.failure
        except RunError as error:
            failure = self._failure_of(error)
        except Exception as error:  # noqa: BLE001 - whatever the cache raises where nothing may is the run's failure
            failure = Failure(-1, "", "crash", f"{type(error).__name__}: {error}")
        return Run(
            failure,
            self._events,
            self.actions,
            Interleaving(device_seed=self.device_seed, switches=self.runtime.switches),
            self.runtime.points,
            tuple(self.moments),
            self._driver.went_off,
        )

    def _failure_of(self, error: RunError) -> Failure:
        if isinstance(error, CrashError) and isinstance(error.__cause__, FoundError):
            return error.__cause__.failure
        kind: Kind = "deadlock"
        if isinstance(error, CrashError):
            kind = "crash"
        elif isinstance(error, LeftBehindError):
            kind = "left behind"
        index = self._at.get("engine", -1)
        return Failure(index, self.trace.events[index].event if index >= 0 else "", kind, str(error))

    # ------------------------------------------------------------------------- the threads

    def program(self) -> None:
        """What the engine thread does. Raises `FoundError`."""
        for index, event in enumerate(self.trace.events):
            if self._window is not None:
                self.runtime.explored = index in range(*self._window)
            if isinstance(event, (Materialize, Discard)):
                self._builders.post(index, event)
                continue
            if isinstance(event, Rest) or (isinstance(event, Save) and event.error == TIMEOUT):
                self._builders.wait()
            if isinstance(event, Shutdown):
                self._judge.shuts_down(index)
            self._check_clock(index, event.event)
            self._apply(index, event)
            if getattr(event, "error", None) == TIMEOUT:
                self._waited = self.runtime.baton.now
            self._check(index, event)
        self._builders.close()
        self.runtime.explored = self._window is None
        self._at.pop("engine", None)
        try:
            self._driver.cache.shutdown()
        except Injected:  # interrupted: once more
            self._driver.cache.shutdown()
        self._check_rules(-1, "")
        self._check_clock(-1, "")
        self._nothing_left(-1, "")
        for outputs, due in self._driver.kept:
            if (found := self._driver.due_of(outputs, due)) is not due:
                raise FoundError(Failure(-1, "", "outcome", f"{due} was handed over, and became {found}"))

    def _check(self, index: int, event: Event) -> None:
        """What holds after every event."""
        self._check_rules(index, event.event)
        self._check_clock(index, event.event)

    def _check_rules(self, index: int, event: str) -> None:
        broken = self._one_writer.broken or self._under_lock.broken
        if broken is not None:
            raise FoundError(Failure(index, event, "rule", broken))

    def _check_clock(self, index: int, event: str) -> None:
        """The clock moves only when everybody waits: it has to stand, unless a time-out is due."""
        waited = self.runtime.baton.now - self._waited
        if waited:
            what = f"for {waited:g} s of the virtual clock everybody waited, and nobody was woken"
            raise FoundError(Failure(index, event, "deadlock", what))

    def _apply(self, index: int, event: Event) -> None:
        thread = self.runtime.thread
        self._at[thread] = index
        self._events += 1
        if self._record:
            self._tell("call", event=event.event)
        told_before = self._judge.begin()
        try:
            if isinstance(event, Rest):
                self._rest(index)
                outcome = Outcome()
            else:
                outcome = self._driver.apply(event)
        except FoundError:
            raise
        except Exception as error:
            raise FoundError(Failure(index, event.event, "crash", f"{type(error).__name__}: {error}")) from error
        if self._record:
            self._tell("return", error=outcome.error)
        mismatch = self._judge.judge(index, event, outcome, told_before=told_before)
        if mismatch is not None:
            raise FoundError(Failure(index, event.event, "outcome", mismatch))
        del self._at[thread]

    def _rest(self, index: int) -> None:
        """Everything has landed and been consumed: tables are the reference's, and nothing is left."""
        try:
            self._driver.cache.drain()
        except (OmniPrefixCacheWriteError, OmniPrefixCacheStagingTimeoutError, Injected) as error:
            if not self._judge.may_fail:
                raise
            if isinstance(error, OmniPrefixCacheStagingTimeoutError) and self._driver.went_off != "clock":
                raise
            with contextlib.suppress(OmniPrefixCacheWriteError):
                self._driver.cache.drain()  # the next call lets go of everything
        else:
            due = tables_at_rest(self.trace)[index]
            different = tables_differ(due, self._driver.snapshot()) if due is not None else None
            if different is not None:
                raise FoundError(Failure(index, "rest", "tables", different))
        self._nothing_left(index, "rest")

    def _nothing_left(self, index: int, event: str) -> None:
        try:
            self._driver.check_at_rest()
        except AssertionError as left:
            raise FoundError(Failure(index, event, "left behind", str(left))) from left

    # ------------------------------------------------------------------------- what is told

    def observe(self, action: str, acted_on: Mapping[str, object]) -> None:
        """The cache's trace sink: each action is a point."""
        self.actions[action] += 1
        self._one_writer.see(action, acted_on)
        if self._record:
            self._tell(action, **{name: _plain(value) for name, value in acted_on.items()})
        self._device.time_passes()
        self.runtime.point(action)

    def _tell(self, action: str, **details: object) -> None:
        thread = self.runtime.thread
        self.moments.append(Moment(self.runtime.points, thread, action, details, self._at.get(thread, -1)))

    def _turn(self, what: str, task: Task) -> None:
        waits = {} if task.waits is None or what != "block" else {"for": task.waits.told()}
        self.moments.append(Moment(self.runtime.points, task.name, what, waits, self._at.get(task.name, -1)))


def poisoned_outputs(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An `OutputAllocator` whose memory is poison until it is written."""
    memory = np.full(math.prod(shape) * dtype.itemsize, POISON, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(tuple(shape)) if memory.size else torch.empty(*shape, dtype=dtype)


_ATOMS = frozenset({int, str, float, bool, type(None)})


def _plain(value: Any) -> object:
    """What a moment may keep of what an action acted on: numbers and names, and nothing that the cache still uses."""
    if type(value) in _ATOMS or isinstance(value, Enum):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        told = value.tolist()
        return tuple(told) if value.ndim == 1 else _plain(told)
    if isinstance(value, Mapping):
        return {key: _plain(of_key) for key, of_key in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted((_plain(item) for item in value), key=repr))
    return type(value).__name__
