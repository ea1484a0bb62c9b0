"""The command `omni-prefix bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from conformance.bench.docs import write_page
from conformance.bench.other import ROOT
from conformance.bench.plot import draw
from conformance.bench.report import Report, show_result, show_verdicts
from conformance.bench.run import FULL, QUICK, Work, run
from conformance.cli.app import needs

PAGE = ROOT / "docs" / "benchmark.md"
PICTURE = ROOT / "docs" / "bench" / "cost.svg"


def bench(  # noqa: PLR0913, PLR0917 - one for each option
    only: Annotated[list[Work] | None, typer.Option(help="Pieces of work; all if none is named.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads that torch may use.")] = 1,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of interleaved repeats; 30 if not given.")] = None,
    steps: Annotated[int | None, typer.Option(min=100, help="Steps of the long run; 200,000 if not given.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Everything once, in tiny sizes: does it run?")] = False,
    download: Annotated[bool, typer.Option(help="Whether vllm-omni's wheel may be downloaded.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures to this SVG file (extra `bench`).")] = None,
    write_docs: Annotated[bool, typer.Option("--write-docs", help="Write docs/benchmark.md and its picture.")] = False,
) -> None:
    """What the cache costs, beside other implementations and a plain copy of the same bytes."""
    plan = QUICK if quick else FULL
    plan = replace(plan, works=tuple(only or Work), threads=threads, download=download and plan.download)
    if rounds is not None:
        plan = replace(plan, pace=replace(plan.pace, rounds=rounds))
    if steps is not None:
        plan = replace(plan, long_run=replace(plan.long_run, steps=steps))
    console = Console()
    report = run(
        plan,
        _command(only, threads=threads, rounds=rounds, steps=steps, quick=quick),
        lambda result: show_result(console, result),
        lambda work: console.print(f"[dim]measuring: {work}[/dim]"),
    )
    show_verdicts(console, report.verdicts)
    _write(report, json, plot, write_docs=write_docs)
    if report.load > 1:
        console.print(f"[yellow]other processes were running (load {report.load:.1f}): times are too long[/yellow]")


def _write(report: Report, json: Path | None, plot: Path | None, *, write_docs: bool) -> None:
    if json is not None:
        report.write_json(json)
    if write_docs:
        plot = PICTURE
    if plot is not None:
        with needs("bench"):
            draw(report, plot)
    if write_docs:
        write_page(report, PAGE, PICTURE)


def _command(only: list[Work] | None, *, threads: int, rounds: int | None, steps: int | None, quick: bool) -> str:
    """The command line that measures the same again."""
    words = [f"--only {work}" for work in only or ()]
    words += [f"--threads {threads}"] if threads != 1 else []
    words += [f"--rounds {rounds}"] if rounds is not None else []
    words += [f"--steps {steps}"] if steps is not None else []
    words += ["--quick"] if quick else []
    return f'make bench BENCH="{" ".join([*words, "--write-docs"])}"'
