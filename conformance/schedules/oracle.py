"""What is due, worked out with no cache: rows by content, and a ledger of which keys each slot was computed with.

Hidden rows are due by content alone, at every position of a span, as with prefix caching off. A multimodal key is
emitted by some steps only, so what a hit is owed of it depends on the step that computed the slot last: the ledger says
which keys that step emitted. A slot computed anew is another's for every key at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conformance.schedules.content import Prefix, row
from conformance.schedules.trace import CONTRACT, ROW, Due

HIDDEN_KEY = "__hidden_states__"


@dataclass(frozen=True)
class Delivery:
    """What one request is owed in one step. `lost`: its hit covers hidden rows that nobody computed."""

    span: tuple[int, int]
    rows: Mapping[str, Sequence[int]]
    lost: bool


class Served(NamedTuple):
    """A request's part of a step as the engine knows it: it computes `[start, end)`; `slots` has one a position."""

    req: str
    content: Prefix
    slots: Sequence[int]
    start: int
    end: int
    admitted: bool


class Oracle:
    """The ledger, and how far rows of each live request have been offered."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = tuple(keys)
        self._ledger: dict[int, dict[str, int]] = {}
        self._offered: dict[str, int] = {}
        self.hit_rows = 0

    def computed(self, slots: Sequence[int], content: Prefix, start: int, emits: Iterable[str]) -> dict[str, list[int]]:
        """A request's tokens from `start` on are computed into `slots`. Returns the rows emitted, by key."""
        emits = tuple(emits)
        for i, slot in enumerate(slots):
            self._ledger[slot] = {key: row(key, content[: start + i + 2]) for key in emits}
        return {key: [self._ledger[slot][key] for slot in slots] for key in emits}

    def deliver(self, part: Served, emits: frozenset[str]) -> Delivery:
        """What a request is owed in a step.

        To be asked once the whole step is computed, since a request may hit what another computes in the same step.
        """
        req, content, table, start, end, admitted = part
        begin = min(self._offered.get(req, 0), start) if admitted else start
        self._offered[req] = end
        rows: dict[str, list[int]] = {}
        lost = False
        for key in self.keys:
            cached = [self._ledger.get(slot, {}).get(key) for slot in table[begin:start]]
            mine = [row(key, content[: p + 2]) for p in range(start, end)] if key in emits else []
            if key == HIDDEN_KEY:
                lost = None in cached
                due = [row(key, content[: p + 2]) for p in range(begin, start)]
                assert lost or cached == due, f"the environment broke its own rules: {cached} at {table}, due {due}"
            if key in emits or any(r is not None for r in cached):
                rows[key] = [r or 0 for r in cached] + mine
        self.hit_rows += start - begin
        return Delivery((begin, end), rows, lost)

    def offered(self, req: str) -> int:
        """How far rows of a live request have been offered."""
        return self._offered.get(req, 0)

    def forget(self, req: str) -> None:
        """The request's end was reported."""
        self._offered.pop(req, None)


def due_of(deliveries: Mapping[str, Delivery], reqs: Sequence[str]) -> tuple[Due | None, str | None]:
    """What `materialize` of these requests returns, or the error that it raises."""
    if set(reqs) - set(deliveries):
        return None, CONTRACT
    if any(deliveries[req].lost for req in reqs):
        return None, ROW
    rows: dict[str, dict[str, list[int]]] = {}
    for req in reqs:
        for key, column in deliveries[req].rows.items():
            rows.setdefault(key, {})[req] = list(column)
    return Due(rows=rows, spans={req: deliveries[req].span for req in reqs}), None
