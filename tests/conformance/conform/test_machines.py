import logging

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from conformance.conform.machines import CacheMachine
from conformance.mutants.fast_table import FAST_MUTANTS

SHORT = settings(
    max_examples=25,
    stateful_step_count=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="omni_prefix_fast")


def test_cache_agrees_with_the_reference_model() -> None:
    """Whatever hypothesis does to an engine, the cache hands over cache-off rows and keeps the reference's tables."""
    run_state_machine_as_test(CacheMachine, settings=SHORT)


def test_fault_is_found() -> None:
    """The machine is no check that cannot fail: it finds a seeded fault of the package."""
    mutant = next(mutant for mutant in FAST_MUTANTS if mutant.name == "skip_version_bump")
    unshrunk = settings(SHORT, phases=[Phase.generate])
    with mutant.applied(), pytest.raises(AssertionError, match=r"version|rows|reference"):
        run_state_machine_as_test(CacheMachine, settings=unshrunk)
