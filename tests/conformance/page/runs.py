"""Recorded runs to draw: of a trace with a fault in the package, and of one without."""

from __future__ import annotations

from functools import cache

from conformance.conform.subjects import make_subject
from conformance.drivers.subject import Run
from conformance.schedules import Trace, generate

FAULT = "plan_same_step_once"
"""A read of what its own step computes is not planned again: it hands over an older tenant's rows, or none."""
FAULTY_SEED = 1


@cache
def faulty() -> tuple[Trace, Run]:
    """A run that hands over wrong rows."""
    trace = generate(FAULTY_SEED).trace
    return trace, make_subject("fast-eager", mutant=FAULT).run(trace, record=True)


@cache
def right(driver: str, seed: int) -> tuple[Trace, Run]:
    """A run in which all is right."""
    trace = generate(seed).trace
    return trace, make_subject(driver).run(trace, seed=seed, record=True)
