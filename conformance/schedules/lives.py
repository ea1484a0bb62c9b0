"""Who is who in a trace: a request's *life* goes from the start that admits it to the start that tells its end.

An id may be used again, so it is a life that is taken out of a trace, not an id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from conformance.schedules.trace import Event, Save, Start, Unsaved

Life: TypeAlias = int


@dataclass
class Lives:
    """The lives of a trace, and in which steps each takes part."""

    at: list[Mapping[str, Life]] = field(default_factory=list)
    """By event: the life that each id stands for; at a start, once it is over."""
    ended: list[Mapping[str, Life]] = field(default_factory=list)
    """By event: lives that a start ends."""
    turns: list[Mapping[Life, int]] = field(default_factory=list)
    """By event: the how manieth step of its life each request of the batch is in, from 0."""
    lengths: dict[Life, int] = field(default_factory=dict)
    """Steps of each life."""
    of_label: dict[int, Mapping[str, tuple[Life, int]]] = field(default_factory=dict)
    """Who is in a saved step, and the how manieth step of its life it is."""


def find_lives(events: Sequence[Event]) -> Lives:
    """Walk a trace."""
    lives = Lives()
    now: dict[str, Life] = {}
    turns: dict[Life, int] = {}
    for event in events:
        ended: dict[str, Life] = {}
        if isinstance(event, Start):
            ended = {req: now.pop(req) for req in event.finished if req in now}
            for req in [a.req for a in event.admitted] + [r for r in event.scheduled if r not in now]:
                if req not in now:
                    now[req] = len(lives.lengths)
                    lives.lengths[now[req]] = 0
            turns = {}
            for req in event.scheduled:
                turns[now[req]] = lives.lengths[now[req]]
                lives.lengths[now[req]] += 1
        if isinstance(event, Save) and event.error is None:
            lives.of_label[event.label] = {p.req: (now[p.req], turns[now[p.req]]) for p in event.batch}
        lives.at.append(dict(now))
        lives.ended.append(ended)
        lives.turns.append(turns if isinstance(event, (Start, Save, Unsaved)) else {})
    return lives
