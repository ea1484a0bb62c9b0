"""Any module that keeps the contract is driven by its exported names alone, and judged by what it exports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import omni_prefix_fast
from conformance.drivers.module import EXPORTED, ModuleDriver, ModuleSubject
from conformance.drivers.subject import Failure
from conformance.drivers.subjects import run_events
from conformance.schedules import generate
from conformance.schedules.trace import Discard, Fail, Save, Trace


@pytest.mark.parametrize("seed", range(12))
def test_the_production_package_keeps_the_contract(seed: int) -> None:
    """Through its public names alone, outcomes are the ones due."""
    assert ModuleSubject("omni_prefix_fast").run(generate(seed).trace).failure is None


def _older(**changed: Any) -> Any:
    """The production package as a module with fewer names."""
    return SimpleNamespace(**{name: getattr(omni_prefix_fast, name) for name in EXPORTED} | changed)


@pytest.mark.parametrize("seed", range(6))
def test_a_module_with_fewer_error_classes_is_held_to_those(seed: int) -> None:
    """Where only the base class is exported, any error of it is the one due."""
    trace = generate(seed).trace
    driver = ModuleDriver(_older(), trace.header)
    try:
        assert run_events(trace, driver).failure is None
    finally:
        driver.close()


def _failure_of(module: Any, trace: Trace) -> Failure | None:
    driver = ModuleDriver(module, trace.header)
    try:
        return run_events(trace, driver).failure
    finally:
        driver.close()


def test_an_error_that_is_not_due_is_a_failure() -> None:
    """A module's one error class stands for the one that is due only where one is due."""
    trace = generate(1).trace
    at = next(i for i, e in enumerate(trace.events) if isinstance(e, Save) and not e.error)
    events = [*trace.events[: at + 1], Discard(label=0), Discard(label=0)]
    failure = _failure_of(_older(), trace.model_copy(update={"events": events}))
    assert failure is not None
    assert (failure.index, failure.kind) == (at + 2, "outcome")


def test_a_wrong_row_is_a_failure() -> None:
    """A row that differs is told at the event that hands it over."""

    class Off(omni_prefix_fast.OmniPrefixCacheManager):
        def materialize(self, *args: Any) -> Any:
            outputs = super().materialize(*args)
            for rows in (outputs.hidden_states or {}).values():
                rows.fill_(5)
            return outputs

    failure = _failure_of(_older(OmniPrefixCacheManager=Off), generate(0).trace)
    assert failure is not None
    assert failure.event == "materialize"


def test_what_the_contract_cannot_bring_about_is_left_out() -> None:
    """A write that is to fail, and a clone that is to find no room, are not applied."""
    trace = generate(0).trace
    driver = ModuleDriver(_older(), trace.header)
    try:
        assert driver.apply(Fail(stage="copy")) is None
        assert driver.apply(Save(label=0, batch=[], padded=0, rows={}, clone_fails=True)) is None
    finally:
        driver.close()
