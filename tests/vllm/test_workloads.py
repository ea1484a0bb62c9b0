"""Cache on against cache off on a real engine: every row of every request, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conformance.vllm.run import Comparison, Report
from conformance.vllm.workloads import ASYNCHRONOUS, V2_NAMES, WORKLOADS, Workload

if TYPE_CHECKING:
    from tests.vllm.conftest import V2Process

V2_WAIT_S = 230.0


def check(report: Report) -> None:
    """Print what happened, and fail with what went wrong."""
    print(f"\n  {report.line()}")
    assert report.ok, report.text()
    assert report.rows_served > 0, "no row came from the cache: nothing was compared that matters"
    assert report.rows_compared > 0


@pytest.mark.parametrize("workload", (*WORKLOADS, *ASYNCHRONOUS), ids=lambda w: w.name)
def test_v1_rows_are_the_same_with_the_cache_and_without(workload: Workload, comparison: Comparison) -> None:
    """V1 model runner, eager and asynchronous: no row differs, none is missing, what the workload is for did happen."""
    check(comparison.run(workload))


@pytest.mark.parametrize("name", V2_NAMES)
def test_v2_rows_are_the_same_with_the_cache_and_without(name: str, v2_process: V2Process) -> None:
    """V2 model runner: the same claim."""
    check(Report(**v2_process.report(name, V2_WAIT_S)))
