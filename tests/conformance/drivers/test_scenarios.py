"""Every interleaving of the scenarios comes to what is due; races planted in the real cache do not."""

from __future__ import annotations

import pytest

from conformance.drivers.asynchronous import QUIET
from conformance.drivers.reference import ReferenceDriver
from conformance.drivers.scenarios import SCENARIOS
from conformance.interleave import Pct, Replay
from conformance.interleave.explore import run_once
from conformance.mutants.fast_table import FAST_MUTANTS
from conformance.schedules import replay

FEWEST = 80
"""Interleavings that each scenario has at least: with fewer, its threads do not meet."""
RUNS = 300
"""Runs within which PCT finds each planted race."""
RACES = {
    "gather_without_pins": ("claim against a planned read", True),
    "fetch_before_done": ("materialize against commit", True),
    "page_freed_before_merge": ("full staging pool with builder", True),
    "wake_before_record": ("failing copy with a joiner", True),
    # Between the section and the pop there is a point only behind the release.
    "pop_outside_section": ("shutdown against materialize", False),
}
"""Faults of threads: the scenario that shows each, and whether points before operations are enough."""
FAULTS = {fault.name: fault for fault in FAST_MUTANTS}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving_is_right(name: str) -> None:
    """Nothing goes wrong within two preemptions, or as many as the scenario affords."""
    explored = SCENARIOS[name].explore()
    print(f"{name}: {explored}")
    assert explored.error is None, f"{explored}\n{explored.error}"
    assert explored.runs >= FEWEST


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.preemptions == 2])
def test_every_point_is_right_for_one_preemption(name: str) -> None:
    """Nor does it within one, with the points behind operations, too."""
    explored = SCENARIOS[name].explore(preemptions=1, coarse=False)
    print(f"{name}: {explored}")
    assert explored.error is None, f"{explored}\n{explored.error}"


@pytest.mark.parametrize("fault", RACES)
def test_a_race_planted_in_the_cache_is_found(fault: str) -> None:
    """Exhaustive search within two preemptions finds each, and what it tells replays, ten times of ten."""
    name, coarse = RACES[fault]
    scenario = SCENARIOS[name]
    with FAULTS[fault].applied():
        found = scenario.explore(preemptions=2, coarse=coarse)
        print(f"{fault} in {name}: {found}")
        assert found.error is not None, found
        for _ in range(10):
            runtime, error = run_once(scenario.program, Replay(found.switches), quiet=QUIET, coarse=coarse)
            assert str(error) == str(found.error)
            assert tuple(runtime.switches) == found.switches


@pytest.mark.parametrize("fault", RACES)
def test_a_race_planted_in_the_cache_is_found_by_priorities(fault: str) -> None:
    """PCT of depth 3 finds each within 300 runs."""
    name, _ = RACES[fault]
    with FAULTS[fault].applied():
        found = SCENARIOS[name].sample(Pct(n, depth=3, points=120) for n in range(RUNS))
    print(f"{fault} in {name}: {found}")
    assert found.error is not None, found


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_reference_model_comes_to_the_same(name: str) -> None:
    """What a scenario says is due, the reference model does."""
    trace = SCENARIOS[name].trace
    assert replay(trace, ReferenceDriver(trace.header)) is None
