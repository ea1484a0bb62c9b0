"""Every case, on every driver; and the page that lists them is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.cases import CASES
from conformance.cases.plans import PLANS
from conformance.drivers.registry import missing, names, subject
from conformance.schedules import parse
from conformance.schedules.trace import Fail, Materialize, Save

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "conformance" / "cases" / "README.md"
INTERLEAVINGS = 6
"""Of a case; of one in which writes and reads overlap, `MORE`."""
MORE = 25
DRIVERS = [*names(), "module:omni_prefix_fast"]


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", CASES)
def test_every_driver_is_right(name: str, driver: str) -> None:
    """Each outcome is the one due; where threads interleave, for several seeds."""
    if (why := missing(driver)) is not None:
        pytest.skip(why)
    found, trace = subject(driver), CASES[name].make()
    many = MORE if name in PLANS.cases else INTERLEAVINGS
    for seed in range(many if found.interleaves else 1):
        ran = found.run(trace, seed=seed)
        assert ran.failure is None, f"{name} on {driver}, interleaving {seed}: {ran.failure}"
        assert ran.events == len(trace.events)


@pytest.mark.parametrize("name", CASES)
def test_a_case_hands_rows_over_and_is_the_same_each_time(name: str) -> None:
    """There is something in it that can be wrong, and it is a trace that can be written and read."""
    trace = CASES[name].make()
    assert any(isinstance(event, Materialize) and event.due and event.due.rows for event in trace.events)
    assert any(isinstance(event, Save) and event.rows for event in trace.events)
    assert trace == CASES[name].make()
    assert parse(trace.lines()) == trace


def test_a_write_that_fails_is_part_of_some_cases() -> None:
    """Copies and pool writes both."""
    stages = {event.stage for case in CASES.values() for event in case.make().events if isinstance(event, Fail)}
    assert stages >= {"copy", "write"}


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\b[EDN]\d+\b", text))


def test_the_page_lists_every_case_where_it_is() -> None:
    """Numbers in the first table are those of the traces, part by part; files in the second one name the case."""
    first, second = README.read_text(encoding="utf-8").split("## What a trace cannot say")
    for part, told in re.findall(r"^\| `(\w+)\.py` \| (.*) \|$", first, re.MULTILINE):
        made = {name.split("-")[0] for name, case in CASES.items() if case.make.__module__.endswith(f".{part}")}
        assert made == _numbers(told), part
    assert _numbers(first.split("| part |")[1]) == {name.split("-")[0] for name in CASES}
    rows = re.findall(r"^\| ([ED]\d+) \| .* \| `(.*)` \|$", second, re.MULTILINE)
    assert len(rows) > 10
    for number, test in rows:
        assert re.search(rf"def test_{number}_", (ROOT / test).read_text(encoding="utf-8")), (number, test)
