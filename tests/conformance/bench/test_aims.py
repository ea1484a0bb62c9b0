"""Aims are judged as they are written."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from conformance.bench.aims import judge
from conformance.bench.contenders import COPY, EAGER, OMNI
from conformance.bench.decode import LOCKED, LOCKED_ONCE, STEP
from conformance.bench.endurance import Endured
from conformance.bench.hits import WITH, WITHOUT
from conformance.bench.measure import Figure
from conformance.bench.pending import ELSEWHERE, HERE, NONE
from conformance.bench.report import Report, Result


def parts(**us: float) -> Mapping[str, Figure]:
    """Figures in microseconds."""
    return {name: Figure(value * 1e-6, value * 1e-6, value * 1e-6, 1) for name, value in us.items()}


def decode(batch: int, deferred: int, ours: float, other: float | None, copy: float, lock: float = 1) -> Result:
    """A decode step."""
    figures = {EAGER: parts(**{STEP: ours, LOCKED: lock, LOCKED_ONCE: lock}), COPY: parts(**{STEP: copy})}
    if other is not None:
        figures[OMNI] = parts(**{STEP: other})
    return Result("decode", {"batch": batch, "deferred": deferred}, figures)


def hit(rows: int, with_it: float, without: float, other: float, copy: float) -> Result:
    """A step with a hit, and without."""
    return Result(
        "hit",
        {"rows": rows},
        {
            EAGER: parts(**{WITH: with_it, WITHOUT: without}),
            OMNI: parts(**{WITH: other, WITHOUT: 0}),
            COPY: parts(**{WITH: copy, WITHOUT: 0}),
        },
    )


def verdicts(*results: Result) -> list[bool | None]:
    """What the aims say of some results, in order."""
    return [verdict.met for verdict in judge(Report("", 1, "", results=list(results)))]


@pytest.mark.parametrize(
    ("results", "met"),
    [
        ([decode(256, 0, 300, 18_000, 120)], [True, True, True]),
        ([decode(256, 0, 301, 18_000, 120)], [False, False, True]),
        ([decode(256, 0, 300, None, 120, lock=151)], [None, True, False]),
        ([decode(1, 0, 100, 149, 1)], [False]),
        ([decode(8, 0, 100, 800, 1), decode(8, 16, 160, 800, 1)], [True, True]),
        ([decode(8, 0, 100, 800, 1), decode(8, 16, 161, 800, 1)], [True, False]),
        ([hit(16_384, 4100, 100, 72_000, 3200)], [True, True]),
        ([hit(16_384, 4101, 100, 72_000, 3200)], [False, False]),
        ([hit(512, 300, 100, 200, 100)], [True, True]),
        ([hit(512, 301, 100, 200, 100)], [False, False]),
        ([hit(128, 1, 0, 1, 1)], []),
    ],
)
def test_speed_is_a_ratio_of_medians(results: list[Result], met: list[bool | None]) -> None:
    """Exactly at the limit is met; without the other implementation nothing is said."""
    assert verdicts(*results) == met


def test_independence_is_a_ratio_within_one_contender() -> None:
    """Pending reads elsewhere, and the number of blocks; what is pending here is only told."""
    pending = Result("pending", {"claim": 4096, "readers": 64}, {EAGER: parts(**{NONE: 10, ELSEWHERE: 11, HERE: 50})})
    blocks = Result("blocks, eager", {}, {"1000": parts(**{STEP: 10}), "10000": parts(**{STEP: 13})})
    assert verdicts(pending, blocks) == [True, None, False]


def test_the_long_run_is_judged_by_memory_and_by_containers() -> None:
    """The first look does not count: the process is still warming up."""
    flat = Endured(resident=[0, 100, 100 + (4 << 20)])
    grown = Endured(resident=[0, 100, 101 + (4 << 20)], grown={".steps": (0, 7)})
    report = Report("", 1, "", endured={"eager": flat, "async": grown})
    assert [verdict.met for verdict in judge(report)] == [True, True, False, False]
    assert ".steps: 0 -> 7" in judge(report)[-1].measured
