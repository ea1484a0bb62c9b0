"""The next stage's manners: it takes a step at once or late, in order or not, on a thread, in part or not at all."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Protocol, Self

from conformance.onoff.ledger import Ledger, Ticket
from omni_prefix_fast.types import StageCacheOutputs

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Manners:
    """How often a step is put off, taken on a thread (joined at once or a step later), taken in part, or discarded."""

    late: float = 0.3
    threaded: float = 0.2
    overlapping: float = 0.1
    partial: float = 0.05
    discard: float = 0.05
    max_open: int = 2


class Outlet(Protocol):
    """The two ways to consume a step."""

    def materialize(self, step_id: int, req_ids: list[str]) -> StageCacheOutputs:
        """Hand the step over for these requests."""

    def discard_step(self, step_id: int) -> None:
        """Hand nothing over."""


class Consumer:
    """Consumes the saved steps of one run by its manners. Findings are entered by the calling thread alone."""

    def __init__(self, outlet: Outlet, ledger: Ledger, manners: Manners, rng: Random) -> None:
        self._outlet = outlet
        self._ledger = ledger
        self._manners = manners
        self._rng = rng
        self._open: list[Ticket] = []
        self._flying: list[tuple[Ticket, list[str], Future[StageCacheOutputs]]] = []
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="consumer")
        self.counts = dict.fromkeys(("inline", "late", "threaded", "overlapping", "partial", "discarded"), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def step_saved(self, ticket: Ticket) -> None:
        """Take note of a saved step, and consume as many steps, in whatever order, as manners allow to leave open."""
        self._land()
        self._ledger.save(ticket)
        self._open.append(ticket)
        if self._rng.random() >= self._manners.late:
            self._consume(self._rng.randrange(len(self._open)))
        while len(self._open) + len(self._flying) > self._manners.max_open:
            if self._open:
                self._consume(self._rng.randrange(len(self._open)))
            else:
                self._land()

    def finish(self) -> None:
        """Consume whatever is left."""
        while self._open:
            self._consume(self._rng.randrange(len(self._open)))
        self._land()

    def _consume(self, index: int) -> None:
        ticket = self._open.pop(index)
        if index < len(self._open):
            self.counts["late"] += 1
        req_ids = list(ticket.computed)
        self._rng.shuffle(req_ids)
        for ways, share in (
            (self._discard, self._manners.discard),
            (self._partial, self._manners.partial),
            (self._threaded, self._manners.threaded),
            (self._overlapping, self._manners.overlapping),
        ):
            if self._rng.random() < share:
                ways(ticket, req_ids)
                return
        self.counts["inline"] += 1
        self._settle(ticket, req_ids, lambda: self._outlet.materialize(ticket.step_id, req_ids))

    def _discard(self, ticket: Ticket, req_ids: list[str]) -> None:
        del req_ids
        self.counts["discarded"] += 1
        self._outlet.discard_step(ticket.step_id)
        self._ledger.drop(ticket)

    def _partial(self, ticket: Ticket, req_ids: list[str]) -> None:
        self.counts["partial"] += 1
        some = req_ids[: self._rng.randint(0, len(req_ids))]
        self._settle(ticket, some, lambda: self._outlet.materialize(ticket.step_id, some))

    def _threaded(self, ticket: Ticket, req_ids: list[str]) -> None:
        self.counts["threaded"] += 1
        future = self._pool.submit(self._outlet.materialize, ticket.step_id, req_ids)
        self._settle(ticket, req_ids, lambda: future.result(DEADLINE_S))

    def _overlapping(self, ticket: Ticket, req_ids: list[str]) -> None:
        """Start on a thread, and look only after the engine's next step."""
        self.counts["overlapping"] += 1
        self._flying.append((ticket, req_ids, self._pool.submit(self._outlet.materialize, ticket.step_id, req_ids)))

    def _land(self) -> None:
        flying, self._flying = self._flying, []
        for ticket, req_ids, future in flying:
            self._settle(ticket, req_ids, lambda future=future: future.result(DEADLINE_S))  # type: ignore[misc]

    def _settle(self, ticket: Ticket, req_ids: list[str], take: Callable[[], StageCacheOutputs]) -> None:
        self._ledger.settle(ticket, req_ids, take())
