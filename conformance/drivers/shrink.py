"""A failing run of a subject, made small: its trace, and how its threads were interleaved."""

from __future__ import annotations

import time
from dataclasses import dataclass

from conformance.drivers.reference import ReferenceDriver
from conformance.drivers.subject import Failure, Run, Subject
from conformance.interleave.shrink import Switch, shrink_switches
from conformance.schedules.replay import replay
from conformance.schedules.shrink import shrink_trace
from conformance.schedules.trace import Interleaving, Trace
from omni_prefix_ref.errors import NotEnabled

SEEDS = 12
"""Interleavings that are tried of each smaller trace, beside the one that failed before."""


@dataclass(frozen=True)
class Shrunk:
    """A small trace, with its interleaving in it where the subject has threads, and its run, with its moments."""

    trace: Trace
    run: Run


def shrink(subject: Subject, trace: Trace, run: Run, *, seed: int = 0, seconds: float = 60.0) -> Shrunk:
    """Make a failing run small. It fails in the same way still: the same kind of failure, at the same kind of event.

    Args:
        subject: what was run.
        trace: what it was run on.
        run: its run, which failed.
        seed: of that run.
        seconds: after so long, what was reached is taken.
    """
    shrinking = _Shrinking(subject, trace, run, seed, time.monotonic() + seconds)
    smaller = shrink_trace(shrinking.trace, accepts=shrinking.accepts, fails=shrinking.fails)
    return shrinking.end(smaller)


class _Shrinking:
    def __init__(self, subject: Subject, trace: Trace, run: Run, seed: int, until: float) -> None:
        assert run.failure is not None, "the run did not fail"
        self._subject = subject
        self._failure: Failure = run.failure
        self._seed = seed
        self._until = until
        self._interleaving = run.interleaving
        self.trace = trace.model_copy(update={"interleaving": None})

    @property
    def _late(self) -> bool:
        return time.monotonic() > self._until

    def accepts(self, trace: Trace) -> bool:
        """Whether the reference model comes to what is due."""
        if self._late:
            return False
        try:
            return replay(trace, ReferenceDriver(trace.header, checked=False)) is None
        except (NotEnabled, AssertionError, KeyError, IndexError, ValueError):
            return False  # no engine does this: a step of a request that was never admitted, say

    def fails(self, trace: Trace) -> bool:
        """Whether the subject fails on it, as it did: by the interleaving that failed before, or by some other."""
        if not self._subject.interleaves:
            return self._same(self._subject.run(trace, seed=self._seed))
        runs = (self._subject.run(trace, seed=self._seed + n) for n in range(SEEDS))
        if self._interleaving is not None:
            first = self._subject.run(trace, interleaving=self._interleaving)
            if self._same(first):
                self._interleaving = first.interleaving
                return True
        for run in runs:
            if self._same(run):
                self._interleaving = run.interleaving
                return True
            if self._late:
                break
        return False

    def _same(self, run: Run) -> bool:
        failure = run.failure
        return failure is not None and (failure.kind, failure.event) == (self._failure.kind, self._failure.event)

    def end(self, trace: Trace) -> Shrunk:
        """The interleaving made small, too; and the run of what is left, recorded."""
        if self._interleaving is None:
            return Shrunk(trace, self._subject.run(trace, seed=self._seed, record=True))
        device_seed = self._interleaving.device_seed

        def fails(switches: list[Switch]) -> bool:
            if self._late:
                return False
            tried = Interleaving(device_seed=device_seed, switches=switches)
            return self._same(self._subject.run(trace, interleaving=tried))

        switches = shrink_switches(self._interleaving.switches, fails)
        left = Interleaving(device_seed=device_seed, switches=switches)
        run = self._subject.run(trace, interleaving=left, record=True)
        return Shrunk(trace.model_copy(update={"interleaving": left}), run)
