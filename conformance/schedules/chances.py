"""What kind of trace a seed's is: the keys of the cache, and how likely each thing is, drawn once a trace."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from conformance.schedules.oracle import HIDDEN_KEY
from conformance.schedules.trace import KeySetting

FEED = KeySetting(name="feed", width=1, item_bytes=8)
CODES = KeySetting(name="codes", width=2, item_bytes=8, deferred=True)
TONES = KeySetting(name="tones", width=1, item_bytes=8, deferred=True)
HIDDEN = KeySetting(name=HIDDEN_KEY, width=2, item_bytes=4)


@dataclass
class Chances:
    """How likely each thing is, drawn once a trace so that traces differ in kind."""

    abort: float
    preempt: float
    late_report: float
    stream: float
    unsaved: float
    misuse: float
    partial: float
    discard: float
    item: float
    """A multimodal item in a document that prompts share."""
    hoard: float
    """Leave steps unconsumed for as long as the staging pool lets them be."""
    emit: dict[str, float] = field(default_factory=dict)

    @classmethod
    def draw(cls, rng: random.Random, keys: list[KeySetting]) -> Chances:
        def some(*values: float) -> float:
            return rng.choice(values)

        emit = {key.name: some(0.0 if key == FEED else 1.0, 0.2, 0.5, 0.8) for key in keys}
        if HIDDEN not in keys:
            # Deferred rows, and nothing that would have a planned read fetched before its block changes hands.
            emit[FEED.name] = some(0.0, 0.0, 0.3)
        return cls(
            abort=some(0.0, 0.05, 0.15),
            preempt=some(0.0, 0.05, 0.2) if HIDDEN in keys else some(0.1, 0.3),
            late_report=some(0.0, 0.3, 0.6),
            stream=some(0.0, 0.0, 0.3),
            unsaved=some(0.0, 0.0, 0.0, 0.0, 0.1),
            misuse=some(0.0, 0.03, 0.1),
            partial=some(0.0, 0.2),
            discard=some(0.0, 0.1, 0.3),
            item=some(0.0, 0.0, 0.7),
            hoard=some(0.2, 0.6, 0.9) if HIDDEN in keys else some(0.6, 0.9),
            emit=emit | {HIDDEN_KEY: 1.0},
        )
