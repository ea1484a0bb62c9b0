"""A failing trace, made small, and still a trace: every candidate is one that an engine might have made.

What is taken out is whole: a request's life, the last steps of one, a call that nothing depends on, a key. What is left
is due unchanged, so dues stay what cache-off gives; a candidate for which they are not (it hits rows of a request that
was taken out, it finds no page) is refused by the reference model, and not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from conformance.schedules.ddmin import ddmin
from conformance.schedules.lives import Life, Lives, find_lives
from conformance.schedules.possible import engine_might
from conformance.schedules.trace import (
    CLOSED,
    CONTRACT,
    Discard,
    Due,
    Event,
    Materialize,
    Part,
    Save,
    Start,
    Trace,
    Unsaved,
)

Ask = Callable[[Trace], bool]


def shrink_trace(trace: Trace, *, accepts: Ask, fails: Ask) -> Trace:
    """A smaller trace that fails still.

    Args:
        trace: fails.
        accepts: whether the reference model comes to what is due, at every event of a candidate.
        fails: whether a candidate fails, in the same way. Asked of accepted ones only; it may say no to be done soon.
    """
    shrinking = _Shrinking(trace, accepts, fails)
    while shrinking.once():
        pass
    return shrinking.trace


@dataclass(frozen=True)
class _Cut:
    """What is left of a trace."""

    steps: Mapping[Life, int]
    """How many steps each life has left; 0: it is taken out."""
    dropped: frozenset[int] = frozenset()
    """Events taken out for themselves."""
    keys: frozenset[str] = field(default_factory=frozenset)
    """Keys taken out."""
    strangers: bool = True
    """Whether ends of requests that are not live stay."""


class _Shrinking:
    """Ways of making a trace smaller. `trace` is the smallest that failed."""

    def __init__(self, trace: Trace, accepts: Ask, fails: Ask) -> None:
        self.trace = trace
        self._accepts = accepts
        self._fails = fails

    def once(self) -> bool:
        """Each way of making it smaller, once; whether one did."""
        before = self.trace
        for way in (self._end, self._lives, self._tails, self._room, self._calls, self._strangers, self._keys):
            way()
        return self.trace is not before

    def _try(self, candidate: Trace) -> bool:
        if not candidate.events or candidate == self.trace or not engine_might(candidate.events):
            return False
        if self._accepts(candidate) and self._fails(candidate):
            self.trace = candidate
            return True
        return False

    def _end(self) -> None:
        """Nothing behind some event."""
        low, high = 1, len(self.trace.events)
        while low < high:
            middle = (low + high) // 2
            if self._try(self.trace.model_copy(update={"events": self.trace.events[:middle]})):
                high = middle
            else:
                low = middle + 1

    def _lives(self) -> None:
        """Fewer requests."""
        trace, lives = self.trace, find_lives(self.trace.events)

        def fails(kept: list[Life]) -> bool:
            steps = {life: n if life in kept else 0 for life, n in lives.lengths.items()}
            return self._try(_cut(trace, lives, _Cut(steps)))

        ddmin(list(lives.lengths), fails)

    def _tails(self) -> None:
        """The last steps of each life."""
        trace, lives = self.trace, find_lives(self.trace.events)
        cut = _Cut(dict(lives.lengths))
        for life, length in reversed(lives.lengths.items()):
            for steps in sorted({0, length // 2, length - 1}):
                fewer = replace(cut, steps={**cut.steps, life: steps})
                if steps < length and self._try(_cut(trace, lives, fewer)):
                    cut = fewer
                    break

    def _room(self) -> None:
        """A page for each step, so that no step has to be consumed for the sake of a later one."""
        steps = len(find_lives(self.trace.events).of_label)
        if self.trace.header.staging_depth < steps:
            header = self.trace.header.model_copy(update={"staging_depth": steps})
            self._try(self.trace.model_copy(update={"header": header}))

    def _strangers(self) -> None:
        """No end of a request that never began."""
        lives = find_lives(self.trace.events)
        self._try(_cut(self.trace, lives, _Cut(lives.lengths, strangers=False)))

    def _calls(self) -> None:
        """No single event that the others can do without."""
        trace, lives = self.trace, find_lives(self.trace.events)
        every = frozenset(range(len(trace.events)))

        def fails(kept: list[int]) -> bool:
            return self._try(_cut(trace, lives, _Cut(lives.lengths, every - frozenset(kept))))

        ddmin(sorted(every), fails)

    def _keys(self) -> None:
        """Fewer keys."""
        for key in [key.name for key in self.trace.header.keys]:
            if len(self.trace.header.keys) > 1:
                lives = find_lives(self.trace.events)
                self._try(_cut(self.trace, lives, _Cut(lives.lengths, keys=frozenset({key}))))


def _cut(trace: Trace, lives: Lives, cut: _Cut) -> Trace:
    events: list[Event] = []
    gone: set[int] = set()
    """Labels of steps that are not saved any more."""
    for index, event in enumerate(trace.events):
        left = None if index in cut.dropped else _left(event, index, lives, cut, gone)
        if left is not None:
            events.append(left)
        elif isinstance(event, Save) and event.error is None:
            gone.add(event.label)
    keys = [key for key in trace.header.keys if key.name not in cut.keys]
    header = trace.header.model_copy(update={"keys": keys})
    return trace.model_copy(update={"header": header, "events": events})


def _left(event: Event, index: int, lives: Lives, cut: _Cut, gone: set[int]) -> Event | None:
    """What is left of one event."""
    match event:
        case Start():
            return _left_of_start(event, index, lives, cut)
        case Save():
            return _left_of_save(event, index, lives, cut)
        case Unsaved():
            batch = [part for part in event.batch if _stays(part.req, index, lives, cut)]
            return event.model_copy(update={"batch": batch}) if batch else None
        case Materialize():
            return None if event.label in gone else _left_of_materialize(event, lives, cut)
        case Discard():
            return None if event.label in gone else event
        case _:
            return event


def _stays(req: str, index: int, lives: Lives, cut: _Cut) -> bool:
    """Whether a request takes part in the step of an event still."""
    life = lives.at[index].get(req)
    return life is None or lives.turns[index].get(life, 0) < cut.steps[life]


def _left_of_start(event: Start, index: int, lives: Lives, cut: _Cut) -> Start | None:
    ended = lives.ended[index]
    admitted = [a for a in event.admitted if _stays(a.req, index, lives, cut)]
    error = event.error
    if error == CONTRACT and all(a.blocks for a in admitted if a.computed):
        error = None
    left = event.model_copy(
        update={
            "finished": [r for r in event.finished if (cut.steps[ended[r]] if r in ended else cut.strangers)],
            "admitted": admitted,
            "running": {req: n for req, n in event.running.items() if _stays(req, index, lives, cut)},
            "scheduled": {req: n for req, n in event.scheduled.items() if _stays(req, index, lives, cut)},
            "error": error,
        }
    )
    return left if left.finished or left.scheduled or error == CLOSED else None


def _left_of_save(event: Save, index: int, lives: Lives, cut: _Cut) -> Save | None:
    batch: list[Part] = []
    rows: dict[str, list[int]] = {key: [] for key in event.rows if key not in cut.keys}
    at = 0
    for part in event.batch:
        count = len(part.slots)
        if _stays(part.req, index, lives, cut):
            batch.append(part)
            for key in rows:
                rows[key] += event.rows[key][at : at + count]
        at += count
    if (event.batch and not batch) or event.widths.keys() & cut.keys:
        return None
    padding = event.padded - at
    return event.model_copy(
        update={"batch": batch, "rows": rows, "padded": sum(len(part.slots) for part in batch) + padding}
    )


def _left_of_materialize(event: Materialize, lives: Lives, cut: _Cut) -> Materialize:
    who = lives.of_label.get(event.label, {})
    out = {req for req, (life, turn) in who.items() if turn >= cut.steps[life]}
    reqs = [req for req in event.reqs if req not in out]
    due = event.due
    if due is not None:
        rows = {
            key: {req: column for req, column in of_key.items() if req not in out}
            for key, of_key in due.rows.items()
            if key not in cut.keys
        }
        due = Due(
            rows={key: of_key for key, of_key in rows.items() if of_key},
            spans={req: span for req, span in due.spans.items() if req not in out},
        )
    return event.model_copy(update={"reqs": reqs, "due": due})
