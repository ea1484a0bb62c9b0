"""The benchmark runs, in tiny sizes, and every row is right. Nothing here looks at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.bench.contenders import COPY, OURS, PLAIN
from conformance.bench.decode import LOCKED, LOCKED_ONCE, STEP
from conformance.bench.docs import write_page
from conformance.bench.hits import WITH, WITHOUT
from conformance.bench.pending import ELSEWHERE, HERE, NONE
from conformance.bench.plot import draw
from conformance.bench.report import Report
from conformance.bench.run import FULL, QUICK, Work, run

PARTS = {"start", "save", "materialize"}


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """A benchmark fixes the number of threads; other tests have their own."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def quick(*works: Work) -> Report:
    """A report of some works, in tiny sizes."""
    return run(replace(QUICK, works=works), "omni-prefix bench --quick", lambda _: None, lambda _: None)


def test_decode_measures_every_contender_with_and_without_a_deferred_key() -> None:
    """This cache in both modes, the straightforward one and the copy; ours tells how long it held its lock."""
    report = quick(Work.DECODE)
    assert [dict(result.parameters) for result in report.results] == [
        {"batch": batch, "deferred": deferred} for deferred in (0, 16) for batch in QUICK.batches
    ]
    for result in report.results:
        assert {*OURS, PLAIN, COPY} <= result.figures.keys()
        for mode in OURS:
            assert result.figures[mode].keys() == PARTS | {STEP, LOCKED, LOCKED_ONCE}
        assert result.figures[PLAIN].keys() == PARTS | {STEP}
        assert result.figures[COPY].keys() == {STEP}


def test_hits_measure_the_step_with_and_without() -> None:
    """So that what the hit adds can be told apart."""
    (result,) = quick(Work.HIT).results
    for mode in (*OURS, PLAIN):
        assert result.figures[mode].keys() == PARTS | {WITH, WITHOUT}
    assert result.figures[COPY].keys() == {WITH, WITHOUT}


def test_pending_reads_measure_three_saves() -> None:
    """None pending, pending elsewhere, pending here; the readers get the rows from before the claim each time."""
    (result,) = quick(Work.PENDING).results
    for mode in (*OURS, PLAIN):
        assert result.figures[mode].keys() == {NONE, ELSEWHERE, HERE}


def test_blocks_measure_the_same_step_in_caches_of_different_sizes() -> None:
    """Both modes."""
    results = quick(Work.BLOCKS).results
    assert [result.work for result in results] == [f"blocks, {mode}" for mode in OURS]
    assert all(list(result.figures) == [str(count) for count in QUICK.blocks] for result in results)


def test_the_long_run_meets_what_it_is_there_for() -> None:
    """Hits, aborts and discards occur, rows are checked, and no container is larger at the end."""
    report = quick(Work.LONG)
    assert list(report.endured) == list(OURS)
    for endured in report.endured.values():
        assert endured.steps >= QUICK.long_run.steps
        assert min(endured.hits, endured.aborts, endured.discarded, endured.rows_checked) > 0
        assert len(endured.resident) == len(endured.at) == QUICK.long_run.looks
        assert endured.grown == {}


def test_a_report_is_written_in_every_form(tmp_path: Path) -> None:
    """JSON that is read back, a small picture with text, a page whose link leads to it."""
    report = quick(Work.DECODE, Work.HIT, Work.BLOCKS)
    report.write_json(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [result["work"] for result in written["results"]] == [result.work for result in report.results]
    assert written["environment"]["threads of torch"] == "1"
    assert len(written["aims"]) == len(report.verdicts)
    picture, page = tmp_path / "bench" / "cost.svg", tmp_path / "benchmark.md"
    draw(report, picture)
    assert picture.stat().st_size < 60_000
    assert "hit adds" in picture.read_text(encoding="utf-8")
    write_page(report, page, picture)
    text = page.read_text(encoding="utf-8")
    assert "(bench/cost.svg)" in text
    assert report.command in text
    for line in text.splitlines():
        assert not re.search(r"\|\s*\|\s*\|\s*\|\s*\|$", line), f"an empty row: {line}"


def test_the_full_plan_is_that_of_the_aims() -> None:
    """Sizes of the aims are measured, the largest hit and the largest batch among them."""
    assert set(FULL.batches) == {256, 64, 8, 1}
    assert {512, 16_384} <= set(FULL.hits)
    assert (FULL.pending.claim, FULL.pending.readers) == (4096, 64)
    assert (min(FULL.blocks), max(FULL.blocks)) == (1_000, 1_000_000)
    assert FULL.long_run.steps == 200_000
    assert FULL.width == 2048
    assert FULL.works == tuple(Work)
