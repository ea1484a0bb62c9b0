"""What a worker does with some traces: run each on every driver, and note what was covered and what failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping

from conformance.conform.coverage import Coverage
from conformance.conform.plan import Found, Part, Plan
from conformance.drivers.subject import Failure, Subject
from conformance.schedules.generator import Generated, generate

Announce = Callable[[int, int], None]
"""Is told the trace and the driver, by its place among the plan's, before each run."""


def run_part(
    plan: Plan,
    subjects: Mapping[str, Subject],
    first: int,
    last: int,
    *,
    skip: Collection[tuple[int, int]] = (),
    announce: Announce = lambda n, driver: None,  # noqa: ARG005
) -> Part:
    """Run the traces `[first, last)`, but for the (trace, driver) pairs of `skip`: those had ended a process."""
    part = Part(first, last, Coverage(), [])
    for n in range(first, last):
        announce(n, 0)
        drawn = generate(plan.trace_seed(n))
        part.coverage.add_trace(drawn)
        for at, driver in enumerate(plan.drivers):
            if (n, at) not in skip:
                announce(n, at)
                _run(plan, n, driver, subjects[driver], drawn, part)
    return part


def _run(plan: Plan, n: int, driver: str, subject: Subject, drawn: Generated, part: Part) -> None:
    try:
        run = subject.run(drawn.trace, seed=plan.trace_seed(n), record=True)
        part.coverage.add_run(driver, drawn, run)
    except Exception as error:  # noqa: BLE001 - the harness's own fault is told like any other, with its seed
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"the harness raised {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        part.found.append(Found(n, driver, Failure(-1, "", "crash", what)))
        return
    if run.failure is not None:
        part.found.append(Found(n, driver, run.failure))
