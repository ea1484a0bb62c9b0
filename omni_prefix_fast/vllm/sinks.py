"""Where rows go: what is handed over, and the two kinds of receiver.

A sink receives two kinds of message, in the order in which the engine produced them: a `Delivery` for each step, and
`Finished` when requests will get no more rows (finished or aborted; the worker is not told which). A message about a
request that uses an id again comes after the `Finished` of the former one.

Guarantees: one thread at a time calls a sink; a sink owns the tensors that it is given. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from omni_prefix_fast.types import ReqId, StageCacheOutputs, StepId


@dataclass(frozen=True, slots=True)
class Delivery:
    """The rows of one step.

    Attributes:
        step_id: the step, in rising order within an engine.
        req_ids: the requests of the step, in batch order.
        outputs: rows by request, with the absolute positions that they cover.
    """

    step_id: StepId
    req_ids: tuple[ReqId, ...]
    outputs: StageCacheOutputs


@dataclass(frozen=True, slots=True)
class Finished:
    """Requests that will get no more rows."""

    req_ids: tuple[ReqId, ...]


Message: TypeAlias = Delivery | Finished


class SinkError(RuntimeError):
    """A sink did not take a message, or did not close.

    A message is kept and offered again, unless the engine shuts down.
    """


class Sink(Protocol):
    """A receiver of rows. An exception from `receive` halts the handover and is raised on the engine's thread."""

    def receive(self, message: Message) -> None:
        """Take one message. Called again with the same message if it raised."""
        ...

    def close(self) -> None:
        """The engine shuts down; nothing follows. May be called twice."""
        ...


class CallbackSink:
    """Calls a function with each message, in the engine's process."""

    def __init__(self, callback: Callable[[Message], object]) -> None:
        self._callback = callback

    def receive(self, message: Message) -> None:
        """See `Sink`."""
        self._callback(message)

    def close(self) -> None:
        """See `Sink`. Does nothing."""
