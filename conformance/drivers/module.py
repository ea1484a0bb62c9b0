"""Drives any module that keeps the public contract, by its exported names and calls alone.

What the contract does not say is not asked for: no trace sink, no device, no tables. So an event that only those could
bring about (a write that fails, a clone that finds no room) is left out, an error counts by the nearest class that the
module exports, and spans are compared where outputs have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from conformance.drivers.fast import NEVER_ISSUED
from conformance.drivers.rows import GARBAGE, decode, encode
from conformance.drivers.scheduled import scheduler_output
from conformance.drivers.subject import Run
from conformance.drivers.subjects import run_events
from conformance.schedules.driver import Outcome
from conformance.schedules.oracle import HIDDEN_KEY
from conformance.schedules.trace import (
    CLOSED,
    TIMEOUT,
    Discard,
    Due,
    Event,
    Fail,
    Header,
    Interleaving,
    Materialize,
    Part,
    Save,
    Shutdown,
    Start,
    Trace,
    Unsaved,
)

BASE = "OmniPrefixCacheUnmatchError"
EXPORTED = ("OmniPrefixCacheManager", "PrefixCacheConfig", "ModelCachePolicy", BASE, TIMEOUT)
"""Names of the contract that a trace needs."""

WAIT_S = 0.05
"""How long a save waits for a page that nobody will free; there is no clock to stand still in the contract."""


class ModuleSubject:
    """A module that keeps the contract, eager."""

    interleaves = False

    def __init__(self, name: str) -> None:
        self.name = f"module:{name}"
        try:
            self.module = import_module(name)
        except ImportError as error:
            raise ValueError(f"driver {self.name}: {error}; name a module that can be imported from here") from error
        missing = [wanted for wanted in EXPORTED if not hasattr(self.module, wanted)]
        if missing:
            raise ValueError(f"driver {self.name}: the module lacks {', '.join(missing)} of the public contract")

    def run(
        self,
        trace: Trace,
        *,
        seed: int = 0,  # noqa: ARG002 - its threads, if it has any, are its own
        interleaving: Interleaving | None = None,  # noqa: ARG002
        record: bool = False,  # noqa: ARG002
    ) -> Run:
        """Run a trace."""
        driver = ModuleDriver(self.module, trace.header)
        try:
            return run_events(trace, driver)
        finally:
            driver.close()


class ModuleDriver:
    """Applies a trace to a module's `OmniPrefixCacheManager`.

    `device` is where the engine's tensors are; `wait_s` bounds each wait of the cache.
    """

    def __init__(
        self, module: Any, header: Header, *, eager: bool = True, device: str = "cpu", wait_s: float = WAIT_S
    ) -> None:
        self.keys = {key.name: key for key in header.keys}
        self._module = module
        self._batch: Sequence[Part] = ()
        self._steps: dict[int, int] = {}
        self._closed = False
        self._torch_device = device
        config = _known(
            module.PrefixCacheConfig,
            num_blocks=header.num_blocks,
            block_size=header.block_size,
            gpu_staging_bytes=header.budget_bytes,
            staging_depth=header.staging_depth,
            staging_capacity_tokens=header.page_rows,
            staging_claim_timeout_s=wait_s,
        )
        self.cache = module.OmniPrefixCacheManager(config, self, eager=eager)
        mm = [key for key in header.keys if key.name != HIDDEN_KEY]
        self.cache.register_policy(
            _known(
                module.ModelCachePolicy,
                needs_full_hidden_states=HIDDEN_KEY in self.keys,
                token_keys=frozenset(key.name for key in mm if not key.deferred),
                deferred_keys=frozenset(key.name for key in mm if key.deferred),
            )
        )

    def apply(self, event: Event) -> Outcome | None:
        """Apply one event; None if the contract has no call for it."""
        if isinstance(event, Fail) or (isinstance(event, Save) and event.clone_fails):
            return None
        try:
            outputs = self._call(event)
        except (getattr(self._module, BASE), MemoryError) as error:
            return Outcome(error=self._told(error, getattr(event, "error", None)), detail=str(error))
        return Outcome(due=None if outputs is None else self._due(outputs, event))

    def close(self) -> None:
        """End whatever the cache runs in the background."""
        if not self._closed:
            self.cache.shutdown()

    # ------------------------------------------------------------------------- the engine's batch

    def batch_req_ids(self) -> list[str]:
        """Requests of the batch, in row order."""
        return [part.req for part in self._batch]

    def step_slots_cpu(self, req_ids: Sequence[str], num_scheduled: Mapping[str, int]) -> torch.Tensor:  # noqa: ARG002
        """Slots of the step's tokens."""
        slots = {part.req: part.slots for part in self._batch}
        return torch.tensor([slot for req in req_ids for slot in slots[req]], dtype=torch.int64)

    # ------------------------------------------------------------------------- events

    def _call(self, event: Event) -> Any:
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
            case Shutdown():
                self._closed = True
                self.cache.shutdown()
        return None

    def _save(self, event: Save) -> None:
        self._batch = event.batch
        count = sum(len(part.slots) for part in event.batch)
        tensors = {
            name: encode(
                self.keys[name],
                rows,
                count if self.keys[name].deferred else event.padded,
                event.widths.get(name, self.keys[name].width),
            ).to(self._torch_device)
            for name, rows in event.rows.items()
        }
        live = list(tensors.values())
        hidden = tensors.pop(HIDDEN_KEY, None)
        try:
            self._steps[event.label] = self.cache.save_outputs(
                hidden, tensors, num_tokens_unpadded=count, num_tokens_padded=event.padded
            )
        finally:
            for tensor in live:
                tensor.fill_(GARBAGE)

    def _due(self, outputs: Any, event: Event) -> Due:
        rows: dict[str, dict[str, list[int]]] = {}
        for name, payloads in {HIDDEN_KEY: outputs.hidden_states, **outputs.mm_outputs}.items():
            if payloads:
                rows[name] = {req: decode(self.keys[name], value) for req, value in payloads.items()}
        spans = getattr(outputs, "spans", None)
        if spans is None:  # a module older than spans: its rows are judged, and their number with them
            due = event.due if isinstance(event, Materialize) else None
            spans = {} if due is None else due.spans
        return Due(rows=rows, spans=dict(spans))

    def _told(self, error: BaseException, due: str | None) -> str:
        """The error's name in the contract: a module that exports fewer classes is held to those."""
        name = type(error).__name__
        if due is None or not isinstance(error, getattr(self._module, BASE)) or hasattr(self._module, due):
            return name
        return due if due != CLOSED and not isinstance(error, getattr(self._module, TIMEOUT)) else name


def _known(settings: Any, **values: Any) -> Any:
    """Settings of the module, with the values for the fields that it has."""
    known = signature(settings).parameters
    return settings(**{name: value for name, value in values.items() if name in known})
