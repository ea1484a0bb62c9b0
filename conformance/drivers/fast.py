"""Drives the production cache: rows of a trace become tensors, scheduler events become scheduler outputs.

Eagerly, if no more is said: then nothing waits, the clock stands still and waits end at once, which is right for a
cache that runs alone. Every tensor given to the cache is overwritten as soon as the call returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch

from conformance.drivers import leftovers
from conformance.drivers.inject import Injected, Injector
from conformance.drivers.rows import GARBAGE, TornError, decode, dtype_of, encode, is_encoded
from conformance.drivers.scheduled import scheduler_output
from conformance.drivers.standing import StandingRuntime
from conformance.schedules.driver import INJECTED, Outcome, Snapshot
from conformance.schedules.oracle import HIDDEN_KEY
from conformance.schedules.trace import (
    CONTRACT,
    TIMEOUT,
    Discard,
    Due,
    Event,
    Fail,
    Header,
    KeySetting,
    Materialize,
    Part,
    Rest,
    Save,
    Shutdown,
    Start,
    Unsaved,
)
from omni_prefix_fast import (
    ModelCachePolicy,
    OmniPrefixCacheManager,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheUnmatchError,
    OmniPrefixCacheWriteError,
    PrefixCacheConfig,
    StageCacheOutputs,
)
from omni_prefix_fast.device import Device, HostDevice
from omni_prefix_fast.recycler import OutputAllocator
from omni_prefix_fast.runtime import Runtime
from omni_prefix_fast.types import Occupancy

Observe = Callable[[str, Mapping[str, object]], None]

GATHERS = ("rows_to_host", "outputs")
"""Failures that come out of a save where it completes a read."""
NEVER_ISSUED = 1 << 40
COPY_BYTES = 24
"""Deferred rows come to the host a few at a time, so that most writes take several copies."""
_OCCUPANCY = tuple(occupancy.name.lower() for occupancy in Occupancy)
"""The reference model's words, by value."""


class FastDriver:
    """Applies a trace to `OmniPrefixCacheManager`.

    Args:
        header: the trace's.
        observe: told every action, with what it acted on, on its thread.
        runtime: None: the cache is eager, and alone. Else where the threads of an asynchronous one come from.
        device: what moves rows. None: the host.
        allocate: makes the tensors that are handed over.
        faults: what makes the environment fail. None: the driver's own, which knows real threads by name.
    """

    def __init__(
        self,
        header: Header,
        *,
        observe: Observe | None = None,
        runtime: Runtime | None = None,
        device: LimitedDevice | None = None,
        allocate: OutputAllocator | None = None,
        faults: Injector | None = None,
    ) -> None:
        self._observe = observe
        self._alone = runtime is None
        self.header = header
        self.keys = {key.name: key for key in header.keys}
        self._batch: Sequence[Part] = ()
        self._steps: dict[int, int] = {}
        self._batches: dict[int, Sequence[Part]] = {}
        self._wide: set[str] = set()
        """Keys of which rows of full width were saved."""
        self.failed = False
        config = PrefixCacheConfig(
            num_blocks=header.num_blocks,
            block_size=header.block_size,
            gpu_staging_bytes=header.budget_bytes,
            staging_depth=header.staging_depth,
            staging_capacity_tokens=header.page_rows,
            copy_chunk_bytes=COPY_BYTES,
        )
        self._device = device or FullDevice()
        if runtime is None:
            runtime = standing = StandingRuntime()
            faults = Injector(jump=standing.jump)
        self.made_room = False
        """Whether a save has failed behind room that it had made in the budget. Made again it needs to make less, so
        until all is at rest more may be left on the device than without the failure."""
        self._faults = faults or Injector(thread=lambda: threading.current_thread().name)
        self.cache = OmniPrefixCacheManager(
            config,
            self,
            eager=self._alone,
            runtime=runtime,
            device=self._faults.device(self._device),
            output_allocator=None if allocate is None else self._faults.allocator(allocate),
            trace=self._on_action,
        )
        self._faults.limit_growth(self.cache)
        mm = [key for key in header.keys if key.name != HIDDEN_KEY]
        self.cache.register_policy(
            ModelCachePolicy(
                needs_full_hidden_states=HIDDEN_KEY in self.keys,
                token_keys=frozenset(key.name for key in mm if not key.deferred),
                deferred_keys=frozenset(key.name for key in mm if key.deferred),
                request_keys=frozenset({leftovers.WHOLE}),
                request_list_keys=frozenset({leftovers.EACH}),
            )
        )

    # ------------------------------------------------------------------------- the driver

    def apply(self, event: Event, *, again: bool = False) -> Outcome:
        """Apply one event. `again`: it failed for a reason of the environment's, and is made once more."""
        try:
            return self._outcome(event, self._call(event))
        except Injected:
            return self._again(event)
        except (OmniPrefixCacheUnmatchError, MemoryError) as error:
            late = isinstance(error, OmniPrefixCacheStagingTimeoutError) and getattr(event, "error", None) != TIMEOUT
            if late and not again and self._faults.went_off == "clock":
                return self._again(event)
            self.failed = self.failed or isinstance(error, OmniPrefixCacheWriteError)
            return Outcome(error=type(error).__name__, detail=str(error))

    @property
    def went_off(self) -> str | None:
        """The failure of the environment that occurred, if one did."""
        return self._faults.went_off

    def _outcome(self, event: Event, outputs: StageCacheOutputs | None) -> Outcome:
        if outputs is None:
            return Outcome()
        assert isinstance(event, Materialize)
        what = leftovers.wrong(outputs.mm_outputs, event.label, self._batches[event.label], event.reqs)
        if what is not None:
            return Outcome(error="torn rows", detail=what)
        try:
            return Outcome(due=self.due_of(outputs, event.due))
        except TornError as torn:
            return Outcome(error="torn rows", detail=str(torn))

    def _again(self, event: Event) -> Outcome:
        """The failure that the trace asked for came out of a call: it is made again, or has consumed its step."""
        self.made_room = self.made_room or (isinstance(event, Save) and self._faults.went_off in GATHERS)
        outcome = self.apply(event, again=True)
        if isinstance(event, (Materialize, Discard)) and outcome.error == CONTRACT != event.error:
            return Outcome(error=INJECTED)
        return outcome

    def due_of(self, outputs: StageCacheOutputs, expected: Due | None = None) -> Due:
        """What was handed over, as a trace tells it. `expected`, if it is just that. Raises `TornError`."""
        if expected is not None and self._holds(outputs, expected):
            return expected
        return self._decoded(outputs)

    def snapshot(self) -> Snapshot:
        """The manager's tables."""
        seen = self.cache.inspect()
        state = {task: found.value for task, found in seen.tasks.items()}
        open_ids = {task for task, _ in seen.open_writes.values()}
        writes: list[tuple[str | None, int, str]] = [
            (req, write_n, state[task]) for req, (task, write_n) in seen.open_writes.items()
        ]
        writes += [(None, 0, found) for task, found in state.items() if task not in open_ids]
        return Snapshot(
            version=seen.version,
            occupancy={
                key: tuple(map(_OCCUPANCY.__getitem__, column)) for key, column in seen.occupancy.items() if any(column)
            },
            writes=tuple(writes),
            unfetched=seen.pins,
            charged=seen.charged,
            pages_held=sum(bool(holders) for holders in seen.pages),
            emitted=dict(seen.emitted),
        )

    # ------------------------------------------------------------------------- the engine's batch

    def batch_req_ids(self) -> list[str]:
        """Requests of the batch, in row order."""
        return [part.req for part in self._batch]

    def step_slots_cpu(self, req_ids: Sequence[str], num_scheduled: Mapping[str, int]) -> torch.Tensor:
        """Slots of the step's tokens."""
        slots = {part.req: part.slots for part in self._batch}
        assert all(len(slots[req]) == num_scheduled[req] for req in req_ids), "the trace contradicts itself"
        told = [slot for req in req_ids for slot in slots[req]]
        return torch.from_numpy(np.array(told, dtype=np.int64))

    # ------------------------------------------------------------------------- events

    def _call(self, event: Event) -> StageCacheOutputs | None:
        match event:
            case Start():
                self.cache.new_step_starts(scheduler_output(event))
            case Save():
                self._save(event)
            case Unsaved():
                self._batch = event.batch
            case Materialize():
                return self.cache.materialize(self._steps.get(event.label, NEVER_ISSUED), event.reqs)
            case Discard():
                self.cache.discard_step(self._steps.get(event.label, NEVER_ISSUED))
            case Fail():
                self._faults.arm(event)
            case Rest():
                self._rest()
            case Shutdown():
                self._shut_down()
        return None

    def _rest(self) -> None:
        if self.failed:
            with suppress(OmniPrefixCacheWriteError):
                self.cache.drain()  # any call lets go of everything
        self.check_at_rest()

    def _shut_down(self) -> None:
        self.cache.shutdown()
        if self._alone:
            self.check_at_rest()

    def _save(self, event: Save) -> None:
        self._batch = event.batch
        count = sum(len(part.slots) for part in event.batch)
        tensors: dict[str, torch.Tensor] = {}
        for name, rows in event.rows.items():
            key = self.keys[name]
            padded = count if key.deferred else event.padded
            tensors[name] = encode(key, rows, padded, event.widths.get(name, key.width), self._dtype_of(event, key))
        emitted = leftovers.told(event.label, event.batch)
        live = [*tensors.values(), *leftovers.tensors(emitted)]
        hidden = tensors.pop(HIDDEN_KEY, None)
        self._batches[event.label] = event.batch
        self._device.is_full = event.clone_fails
        try:
            self._steps[event.label] = self.cache.save_outputs(
                hidden, tensors | emitted, num_tokens_unpadded=count, num_tokens_padded=event.padded
            )
            self._wide.update(event.rows)
        finally:
            self._device.is_full = False
            for tensor in live:
                tensor.numpy()[:] = GARBAGE

    def _dtype_of(self, event: Save, key: KeySetting) -> Any:
        """Now and then integers come half as wide as those that the cache already holds."""
        narrow = event.label % 4 == 1 and key.name in self._wide and dtype_of(key) == np.int64
        return np.int32 if narrow else dtype_of(key)

    def _holds(self, outputs: StageCacheOutputs, due: Due) -> bool:
        """Whether exactly `due` was handed over. Decoding tells more, and takes longer."""
        found: dict[str, Mapping[str, torch.Tensor]] = {
            k: v for k, v in outputs.mm_outputs.items() if v and k not in leftovers.KEYS
        }
        if outputs.hidden_states:
            found[HIDDEN_KEY] = outputs.hidden_states
        if outputs.spans != due.spans or found.keys() != due.rows.keys():
            return False
        for name, column in due.rows.items():
            tensors, key = found[name], self.keys[name]
            if tensors.keys() != column.keys():
                return False
            if not all(is_encoded(key, tensors[req], rows) for req, rows in column.items()):
                return False
            if name != HIDDEN_KEY and not self._spans_fit(outputs, name, column):
                return False
        return True

    @staticmethod
    def _spans_fit(outputs: StageCacheOutputs, name: str, column: Mapping[str, Sequence[int]]) -> bool:
        spans = outputs.mm_spans[name]
        return all(spans[r] == (outputs.spans[r][0], outputs.spans[r][0] + len(rows)) for r, rows in column.items())

    def _decoded(self, outputs: StageCacheOutputs) -> Due:
        rows: dict[str, dict[str, list[int]]] = {}
        if outputs.hidden_states:
            rows[HIDDEN_KEY] = {
                req: decode(self.keys[HIDDEN_KEY], value) for req, value in outputs.hidden_states.items()
            }
        for name, payloads in outputs.mm_outputs.items():
            if payloads and name not in leftovers.KEYS:
                rows[name] = {req: decode(self.keys[name], value) for req, value in payloads.items()}
            for req, column in rows.get(name, {}).items():
                start, end = outputs.mm_spans[name][req]
                if start != outputs.spans[req][0]:
                    raise TornError(f"{name} of {req} starts at {start}, span {outputs.spans[req]}")
                if end - start != len(column):
                    raise TornError(f"{name} of {req}: {len(column)} rows for {start}..{end}")
        return Due(rows=rows, spans=dict(outputs.spans))

    def _on_action(self, action: str, acted_on: Mapping[str, object]) -> None:
        """The trace sink, which is one of the places where the environment may be made to fail."""
        if self._observe is not None:
            self._observe(action, acted_on)
        self._faults.action(action)

    def check_at_rest(self) -> None:
        """Raise `AssertionError` if anything is left behind."""
        seen = self.cache.inspect()
        left = {
            "tasks": seen.tasks,
            "emitted": seen.emitted,
            "charged": seen.charged,
            "chunks": seen.chunks,
            "unconsumed": seen.unconsumed,
            "reads": seen.reads,
            "pages": tuple(holders for holders in seen.pages if holders),
            "pins": any(seen.pins),
        }
        found = {name: value for name, value in left.items() if value}
        assert not found, f"left behind at rest: {found}"


class LimitedDevice(Device, Protocol):
    """A device that can be told to have no room for another clone."""

    is_full: bool


class FullDevice(HostDevice):
    """The host as a device, with no room for another clone where `is_full` says so."""

    is_full: bool = False

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        if self.is_full:
            raise MemoryError("the device has no room for the clone")
        return super().clone(rows, dtype)
