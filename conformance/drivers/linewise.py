"""The asynchronous production cache with a point at every line of its core: ten times the points, for long hunts.

Whatever two threads share is seen there, also where no lock and no action stands between two lines.
"""

from __future__ import annotations

import sys

from conformance.drivers.asynchronous import Session, serial_runtime
from conformance.drivers.subject import Run
from conformance.interleave.strategies import Pct, Replay, Strategy, Uniform
from conformance.schedules.trace import Interleaving, Trace

MODULES = tuple(
    f"omni_prefix_fast.{name}"
    for name in (
        "committer",
        "log",
        "machine",
        "manager",
        "merge",
        "prefetch",
        "reads",
        "runtime",
        "slots",
        "staging",
        "steps",
        "tasks",
    )
)
"""Where threads meet."""
POINTS_OF_EVENT = 200
"""About how many points the event of a trace has."""


class LinewiseFast:
    """As `AsynchronousFast`, line by line. An interleaving of the one is none of the other."""

    name = "fast-lines"
    interleaves = True

    def run(
        self, trace: Trace, *, seed: int = 0, interleaving: Interleaving | None = None, record: bool = False
    ) -> Run:
        """Run a trace."""
        strategy = _drawn(seed, trace) if interleaving is None else Replay(interleaving.switches)
        runtime = serial_runtime(strategy, limit=100 * POINTS_OF_EVENT * (1 + len(trace.events)))
        device_seed = seed if interleaving is None else interleaving.device_seed
        before = sys.gettrace()
        runtime.trace_lines(MODULES)
        try:
            return Session(trace, runtime, device_seed=device_seed, record=record).run()
        finally:
            sys.settrace(before)


def _drawn(seed: int, trace: Trace) -> Strategy:
    if seed % 2:
        return Uniform(seed, 0.01)
    return Pct(seed, depth=4, points=POINTS_OF_EVENT * (1 + len(trace.events)))
