"""Every failure at every place: a trace is run once for each, with the failure armed before its first event."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from conformance.drivers.subject import Failure, Run, Subject
from conformance.schedules import generate
from conformance.schedules.trace import STAGES, Fail, Materialize, Stage, Trace


@dataclass(frozen=True)
class Injection:
    """One failure at one place, and what the run came to."""

    trace: Trace
    fail: Fail
    run: Run

    @property
    def failure(self) -> Failure | None:
        """What is wrong, or None."""
        return self.run.failure

    def __str__(self) -> str:
        where = f"seed {self.trace.header.seed}, {self.fail.stage} behind {self.fail.after} others"
        return f"{where}: {self.failure or 'right'}"


@dataclass
class Totals:
    """What a sweep has done."""

    injections: Counter[str] = field(default_factory=Counter)
    """Failures that went off, by stage."""
    wrong: list[Injection] = field(default_factory=list)


def small_traces(first: int, *, events: int = 26) -> Iterator[Trace]:
    """Random traces of few events, that hand something over, from a seed on: without failures of their own."""
    for seed in itertools.count(first):
        trace = generate(seed).trace
        own = [event for event in trace.events if not isinstance(event, Fail)]
        if len(own) <= events and sum(isinstance(event, Materialize) for event in own) > 1:
            yield trace.model_copy(update={"events": own})


def with_failure(trace: Trace, fail: Fail) -> Trace:
    """The trace with a failure armed from the start."""
    return trace.model_copy(update={"events": [fail, *trace.events]})


def places(
    subject: Subject, trace: Trace, stage: Stage, *, seed: int = 0, most: int | None = None
) -> Iterator[Injection]:
    """A failure of `stage` at its first place, its second, and so on, until it does not go off any more."""
    after = 0
    while most is None or after < most:
        fail = Fail(stage=stage, after=after)
        run = subject.run(with_failure(trace, fail), seed=seed)
        if run.failure is None and not run.went_off:
            return
        yield Injection(trace, fail, run)
        after += 1


def sweep(
    subject: Subject,
    trace: Trace,
    totals: Totals,
    *,
    seed: int = 0,
    stages: tuple[Stage, ...] = STAGES,
    most: int | None = None,
) -> None:
    """Every failure at each of its places, in one trace."""
    for stage in stages:
        for injection in places(subject, trace, stage, seed=seed, most=most):
            totals.injections[stage] += 1
            if injection.failure is not None:
                totals.wrong.append(injection)
