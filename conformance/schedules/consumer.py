"""Who consumes the steps of a trace: late, out of order, in part, not at all, and now and then wrongly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

from conformance.schedules.chances import Chances
from conformance.schedules.oracle import Delivery, due_of
from conformance.schedules.trace import CONTRACT, Discard, Event, Materialize, Save


class Consumer:
    """Appends its calls to the trace's events."""

    def __init__(self, rng: random.Random, chances: Chances, events: list[Event], counts: Counter[str]) -> None:
        self.rng = rng
        self.chances = chances
        self.events = events
        self.counts = counts
        self.open: dict[int, Mapping[str, Delivery]] = {}
        """Steps saved and not consumed, by label, with what each request is owed."""
        self.consumed: list[int] = []
        self.saved = 0

    def take(self, deliveries: Mapping[str, Delivery]) -> None:
        """A step was saved: it is owed this, under the next label."""
        self.open[self.saved] = deliveries
        self.saved += 1

    def consume_any(self) -> None:
        """One of the steps that are open."""
        self.consume(self.rng.choice(list(self.open)))

    def consume_all(self) -> None:
        """Every step that is open."""
        for label in self.rng.sample(list(self.open), len(self.open)):
            self.consume(label)

    def consume_some(self) -> None:
        """After a step: some of those that are open, now and then with a call that is refused."""
        if self.rng.random() < self.chances.misuse:
            self._wrongly()
        while self.open and self.rng.random() > self.chances.hoard:
            self.consume_any()

    def consume(self, label: int) -> None:
        """Hand a step over, whole or in part, or discard it."""
        deliveries = self.open.pop(label)
        self.consumed.append(label)
        self.counts["late consumers"] += label < self.saved - 1
        if self.rng.random() < self.chances.discard:
            self.events.append(Discard(label=label))
            self.counts["discards"] += 1
            return
        reqs = self.rng.sample(list(deliveries), len(deliveries))
        if self.rng.random() < self.chances.partial:
            reqs = reqs[: self.rng.randint(0, len(reqs))]
        due, error = due_of(deliveries, reqs)
        self.events.append(Materialize(label=label, reqs=reqs, due=due, error=error))

    def _wrongly(self) -> None:
        """Calls that are refused: an id consumed before, an id never issued, a request outside the snapshot."""
        wrong = self.rng.choice(("consumed", "unknown", "stranger", "save"))
        if wrong == "consumed" and self.consumed:
            label = self.rng.choice(self.consumed)
            self.events.append(
                self.rng.choice(
                    (Materialize(label=label, reqs=[], error=CONTRACT), Discard(label=label, error=CONTRACT))
                )
            )
        elif wrong == "unknown":
            self.events.append(Materialize(label=-1, reqs=[], error=CONTRACT))
        elif wrong == "stranger" and self.open:
            label = self.rng.choice(list(self.open))
            self.events.append(Materialize(label=label, reqs=[*self.open[label], "stranger"], error=CONTRACT))
        elif wrong == "save" and isinstance(self.events[-1] if self.events else None, Save):
            self.events.append(Save(label=-1, batch=[], padded=0, rows={}, error=CONTRACT))
        else:
            return
        self.counts["refused calls"] += 1
