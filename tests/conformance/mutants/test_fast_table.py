"""The table of seeded faults of the production package: each finds its place, and none is there twice."""

from __future__ import annotations

import pytest

from conformance.mutants.fast_edit import FastMutant
from conformance.mutants.fast_table import EQUIVALENT, FAST_MUTANTS
from tests.conformance.mutants.test_table import CASES


def test_faults_have_names_of_their_own() -> None:
    """No name twice, and no two faults that change the same."""
    assert len({mutant.name for mutant in FAST_MUTANTS}) == len(FAST_MUTANTS)
    assert len({mutant.changes for mutant in FAST_MUTANTS}) == len(FAST_MUTANTS)


@pytest.mark.parametrize("mutant", FAST_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_finds_its_place_in_the_production_package(mutant: FastMutant) -> None:
    """Functions and words that a fault changes are there. Where they are not, the fault needs a new place."""
    with mutant.applied():
        assert mutant.wrote


def test_reported_cases_are_known_and_most_have_a_fault() -> None:
    """A fault names reported cases that exist."""
    named = {case for mutant in FAST_MUTANTS for case in mutant.cases}
    assert named <= set(CASES)
    assert len(named) >= 20
    assert all(EQUIVALENT.values())
