"""`conformance.demo`: what it prints, and when it fails."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from conformance.demo.example import run_example
from conformance.demo.report import MUST_NOT_OCCUR, MUST_OCCUR, failures, print_report
from conformance.demo.requests import run_requests
from conformance.onoff import Round, Tally
from conformance.onoff.run import make_cache


def _console() -> tuple[Console, StringIO]:
    text = StringIO()
    return Console(file=text, width=120, color_system=None), text


def _counts(**changes: int) -> dict[str, int]:
    return dict.fromkeys(MUST_OCCUR, 5) | dict.fromkeys(MUST_NOT_OCCUR, 0) | changes


def test_the_worked_example_is_drawn_and_agrees() -> None:
    """The second request hits block 0; cached rows and its own together equal a forward over its whole prompt."""
    console, text = _console()
    assert run_example(console)
    shown = text.getvalue()
    assert "0: [ The quick brown fox  ] < already in the cache" in shown
    assert "3: [ jumped over the dog  ] < added by the second request" in shown
    assert (shown.count(" the cache "), shown.count(" this step ")) == (4, 5)
    assert shown.count("equal") == 9


def test_random_requests_end_in_a_table_without_differences() -> None:
    """The whole of the second part, with fewer requests."""
    console, text = _console()
    assert run_requests(console, seed=0, requests=400)
    assert "differences" in text.getvalue()
    assert "400" in text.getvalue()


def test_a_wrong_row_fails_the_demo() -> None:
    """A cache that serves wrong rows ends in a non-zero count and in notes that say where."""

    def faulty(setup: Round, view: Any) -> Any:
        cache = make_cache(setup, view)
        materialize = cache.materialize

        class Faulty:
            def __getattr__(self, name: str) -> Any:
                return getattr(cache, name)

            def materialize(self, step_id: int, req_ids: list[str]) -> Any:
                outs = materialize(step_id, req_ids)
                for rows in outs.mm_outputs["codes"].values():
                    rows.add_(1)
                return outs

        return Faulty()

    console, text = _console()
    assert not run_requests(console, seed=0, requests=20, cache_factory=faulty)
    assert "codes differs at positions" in text.getvalue()


@pytest.mark.parametrize("name", MUST_OCCUR)
def test_a_run_that_shows_nothing_fails(name: str) -> None:
    """A counter that has to be above zero and is not makes the demo fail, by name."""
    assert failures(_counts()) == []
    (reason,) = failures(_counts(**{name: 0}))
    assert reason.startswith(name)


@pytest.mark.parametrize("name", MUST_NOT_OCCUR)
def test_a_fault_fails_the_report(name: str) -> None:
    """Differences and missing positions are failures, and are printed."""
    console, text = _console()
    assert not print_report(console, "t", _counts(**{name: 3}), ["r1: wrong"])
    assert "r1: wrong" in text.getvalue()


def test_tallies_add_up() -> None:
    """Counters of rounds are summed field by field."""
    total = Tally(hits=1)
    total.add(Tally(hits=2, aborts=3))
    assert (total.hits, total.aborts) == (3, 3)
