"""A failing run is made small together with its interleaving, and what is left fails in the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.drivers.asynchronous import AsynchronousFast
from conformance.drivers.shrink import shrink
from conformance.drivers.subject import Failure, Run, Subject
from conformance.drivers.subjects import EagerFast
from conformance.schedules import generate
from conformance.schedules.trace import Interleaving, Trace


class _Allergic:
    """Fails as soon as an action occurs."""

    def __init__(self, subject: Subject, action: str) -> None:
        self.name, self.interleaves = subject.name, subject.interleaves
        self._subject, self._action = subject, action

    def run(
        self, trace: Trace, *, seed: int = 0, interleaving: Interleaving | None = None, record: bool = False
    ) -> Run:
        """See `Subject`."""
        run = self._subject.run(trace, seed=seed, interleaving=interleaving, record=record)
        assert run.failure is None, f"{run.failure}"
        if not run.actions[self._action]:
            return run
        return replace(run, failure=Failure(-1, "", "crash", self._action))


@pytest.mark.parametrize(
    ("subject", "action", "most_events", "most_switches"),
    [(EagerFast(), "preserve_read", 6, 0), (AsynchronousFast(), "wait_task", 8, 2)],
    ids=["eager", "asynchronous"],
)
def test_a_failing_run_is_made_small(subject: Subject, action: str, most_events: int, most_switches: int) -> None:
    """A few events and switches are left; the run that is given with them replays, and has its moments."""
    faulty = _Allergic(subject, action)
    seed = next(s for s in range(50) if faulty.run(generate(s).trace, seed=s).failure)
    trace = generate(seed).trace
    shrunk = shrink(faulty, trace, faulty.run(trace, seed=seed), seed=seed, seconds=20.0)
    assert shrunk.run.failure == Failure(-1, "", "crash", action)
    assert len(shrunk.trace.events) <= most_events < len(trace.events)
    assert action in {moment.action for moment in shrunk.run.moments}
    if subject.interleaves:
        assert shrunk.trace.interleaving is not None
        assert len(shrunk.trace.interleaving.switches) <= most_switches
    again = faulty.run(shrunk.trace, seed=seed, interleaving=shrunk.trace.interleaving, record=True)
    assert (again.failure, again.actions, again.points) == (shrunk.run.failure, shrunk.run.actions, shrunk.run.points)
    assert [moment.action for moment in again.moments] == [moment.action for moment in shrunk.run.moments]


def test_what_was_reached_in_time_is_taken() -> None:
    """With no time at all the trace stays whole, and its run is told."""
    faulty = _Allergic(AsynchronousFast(), "open_step")
    trace = generate(0).trace
    shrunk = shrink(faulty, trace, faulty.run(trace), seconds=0.0)
    assert shrunk.trace.events == trace.events
    assert shrunk.run.failure is not None
