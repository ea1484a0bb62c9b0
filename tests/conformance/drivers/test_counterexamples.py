"""What TLC shows of a fault, asked of a cache: right where the cache is right, and wrong where it has the same fault.

All faults of the rows take some minutes, so a few stand for them here; `omni-prefix replay fault:NAME` runs any.
"""

from __future__ import annotations

import functools

import pytest

from conformance.drivers.counterexamples import counterexample, row_faults
from conformance.drivers.reference import ReferenceDriver
from conformance.drivers.registry import subject
from conformance.drivers.subjects import run_events
from conformance.mutants.table import MUTANTS
from conformance.schedules import Trace, parse
from conformance.schedules.trace import Discard, Materialize, Rest, Save
from conformance.tla.errors import TlaError

FAULTS = ("absent_hidden_is_miss", "drop_aborted_write")
NAMED = {mutant.name: mutant for mutant in MUTANTS}

found = functools.cache(counterexample)


@pytest.mark.tlc
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_counterexample_replays_rightly_on_what_is_right(fault: str) -> None:
    """Reference model, production cache, and its threads in several interleavings."""
    trace = found(fault)
    for driver, seeds in (("reference", 1), ("fast-eager", 1), ("fast-async", 5)):
        for seed in range(seeds):
            assert subject(driver).run(trace, seed=seed).failure is None


@pytest.mark.tlc
@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_counterexample_fails_where_the_fault_is(fault: str) -> None:
    """The reference model with the fault of that name hands over something else than is due."""
    trace, mutant = found(fault), NAMED[fault]
    driver = ReferenceDriver(trace.header, machine=mutant.machine, driver=mutant.driver, checked=False)
    assert run_events(trace, driver).failure is not None


@pytest.mark.tlc
@pytest.mark.timeout(120)
def test_a_counterexample_is_a_whole_trace() -> None:
    """Every step is consumed, everybody finishes, and it can be written and read."""
    trace = found(FAULTS[0])
    saved = [event.label for event in trace.events if isinstance(event, Save)]
    consumed = [event.label for event in trace.events if isinstance(event, (Materialize, Discard))]
    assert sorted(consumed) == saved
    assert isinstance(trace.events[-1], Rest)
    again: Trace = parse(trace.lines())
    assert again == trace


def test_faults_are_known_by_name() -> None:
    """Those of the manifest whose models have rows; another name is answered with theirs."""
    assert set(FAULTS) <= set(row_faults())
    assert "no_join_deadline" not in row_faults()
    with pytest.raises(TlaError, match=r"'no_such_fault'; there are .*skip_version_bump"):
        counterexample("no_such_fault")
