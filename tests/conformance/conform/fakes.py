"""Subjects that cost nothing, for sessions: right ones, wrong ones, and ones that take their process with them."""

from __future__ import annotations

import os
import threading

from conformance.drivers.subject import Failure, Moment, Run
from conformance.schedules.trace import Interleaving, Trace

BAD = 37
"""The trace that a faulty fake fails at, of seed 0."""


class Fake:
    """Claims a slot of its own at each event, on two threads in turn. `at_bad` is what happens at trace `BAD`."""

    interleaves = True

    def __init__(self, name: str, at_bad: str = "nothing") -> None:
        self.name = name
        self.at_bad = at_bad

    def run(
        self, trace: Trace, *, seed: int = 0, interleaving: Interleaving | None = None, record: bool = False
    ) -> Run:
        """See `Subject`."""
        failure = None
        if trace.header.seed == BAD:
            if self.at_bad == "dies":
                os._exit(9)
            if self.at_bad == "hangs":
                threading.Event().wait()
            if self.at_bad == "raises":
                raise RuntimeError("a fault of the harness")
            if self.at_bad == "fails":
                failure = Failure(2, trace.events[2].event, "outcome", "expected one thing, found another")
        moments = [
            Moment(i, ("engine", "committer")[(seed + i) % 2], "finish_request", {"req_id": "r"}, i)
            for i in range(len(trace.events) if record else 0)
        ]
        told = interleaving or Interleaving(device_seed=seed, switches=[(seed % 7, "engine")])
        return Run(failure, len(trace.events), interleaving=told, points=len(moments), moments=tuple(moments))


def right(driver: str) -> Fake:
    """Does what is due."""
    return Fake(driver)


def fails(driver: str) -> Fake:
    """Fails at one trace."""
    return Fake(driver, "fails")


def raises(driver: str) -> Fake:
    """Raises at one trace, which a subject must not."""
    return Fake(driver, "raises")


def dies(driver: str) -> Fake:
    """Ends its process at one trace."""
    return Fake(driver, "dies")


def hangs(driver: str) -> Fake:
    """Does not come back from one trace."""
    return Fake(driver, "hangs")


def absent(driver: str) -> Fake:
    """Cannot be made."""
    raise ValueError(f"nothing is called {driver}")
