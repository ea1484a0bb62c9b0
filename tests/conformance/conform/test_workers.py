import multiprocessing

import pytest

from conformance.conform.plan import PER_PART, Maker, Part, Plan
from conformance.conform.workers import Crew, WorkerError
from tests.conformance.conform import fakes

TRACES = 2 * PER_PART + 5


def parts_of(make: Maker, *, limit_s: float = 60.0, workers: int = 2) -> list[Part]:
    """What a crew makes of some traces."""
    with Crew(Plan(0, ("one", "two"), make), workers, limit_s=limit_s) as crew:
        return [part for part in crew.parts(0, TRACES) if part is not None]


def test_parts_come_in_order() -> None:
    """Every trace is run once on each driver, and parts come in the order of the traces."""
    parts = parts_of(fakes.right)
    assert [(part.first, part.last) for part in parts] == [(0, 25), (25, 50), (50, 55)]
    assert sum(part.coverage.sections["traces"]["two"] for part in parts) == TRACES
    assert not any(part.found for part in parts)


def test_failure_is_found_with_its_trace() -> None:
    """A run that fails is found with its trace and driver; the others go on."""
    found = [found for part in parts_of(fakes.fails) for found in part.found]
    assert [(one.n, one.driver, one.failure.kind) for one in found] == [
        (fakes.BAD, "one", "outcome"),
        (fakes.BAD, "two", "outcome"),
    ]


def test_exception_of_the_harness_is_found() -> None:
    """A subject that raises, which it must not, is that trace's failure and says so."""
    found = [found for part in parts_of(fakes.raises) for found in part.found]
    assert "the harness raised RuntimeError: a fault of the harness" in found[0].failure.what
    assert found[0].n == fakes.BAD


def test_worker_that_dies_is_a_failure() -> None:
    """A process that ends at a trace is that trace's failure, with its exit code; every other trace is run."""
    parts = parts_of(fakes.dies)
    found = [found for part in parts for found in part.found]
    assert [(one.n, one.driver, one.lost) for one in found] == [(fakes.BAD, "one", True), (fakes.BAD, "two", True)]
    assert "exit code 9" in found[0].failure.what
    assert sum(part.coverage.sections["traces"]["one"] for part in parts) == TRACES - 1


def test_worker_that_hangs_is_a_failure() -> None:
    """A trace that does not end within the limit is told as such, and the session goes on."""
    parts = parts_of(fakes.hangs, limit_s=1.5)
    found = [found for part in parts for found in part.found]
    assert [(one.n, one.failure.kind) for one in found] == [(fakes.BAD, "deadlock"), (fakes.BAD, "deadlock")]
    assert parts[-1].last == TRACES


def test_worker_that_cannot_start_ends_the_session() -> None:
    """Workers that end before any trace are not started over and over: the session ends with an error."""
    with pytest.raises(WorkerError, match="before its first trace"):
        parts_of(fakes.absent, workers=1)


def test_worker_that_is_ended_between_two_traces_is_replaced() -> None:
    """No trace is to blame, and none is lost: what it was to do next is done by another."""
    parts = []
    with Crew(Plan(0, ("one", "two"), fakes.right), 1, limit_s=60.0) as crew:
        for part in crew.parts(0, TRACES):
            if part is not None:
                parts.append(part)
                if len(parts) == 1:
                    worker = multiprocessing.active_children()[0]
                    worker.kill()
                    worker.join()
    assert [(part.first, part.last) for part in parts] == [(0, 25), (25, 50), (50, 55)]
    assert not any(part.found for part in parts)
