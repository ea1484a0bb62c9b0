"""`omni-prefix agree`, `omni-prefix replay` and `omni-prefix trace`: random traces, saved ones, and how to save one."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from conformance.drivers.agree import Compared, agree_on_seeds
from conformance.drivers.registry import missing, names, subject
from conformance.drivers.sources import HELP, take
from conformance.drivers.subject import Run, Subject
from conformance.schedules import Trace, generate
from conformance.schedules.trace import Interleaving

SHOWN = 10
"""Disagreements that are told in full."""

Traces = Annotated[int, typer.Option(min=1, help="How many random traces.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the first trace; the next has the next seed.")]
Save = Annotated[Path | None, typer.Option(help="Folder for the traces that disagree.", file_okay=False)]
Rules = Annotated[bool, typer.Option(help="Check the reference model's rules after every action, too.")]
Source = Annotated[str, typer.Argument(metavar="TRACE", help=HELP)]
Target = Annotated[Path, typer.Argument(help="The file to write.", dir_okay=False)]
Drivers = Annotated[
    list[str] | None,
    typer.Option(
        "--driver",
        help=f"What to run it on: {', '.join(names())}, or module:NAME. Several times; all that run here if left out.",
    ),
]
Kept = Annotated[
    Path | None,
    typer.Option("--save", dir_okay=False, help="Write the trace with the interleaving that ran, to replay that one."),
]
ThreadSeed = Annotated[int, typer.Option("--seed", min=0, help="Of the interleaving, where the trace holds none.")]


def agree(traces: Traces = 500, seed: Seed = 0, save: Save = None, rules: Rules = False) -> None:
    """Random traces: reference model and production cache agree on outputs, errors and tables after every event."""
    console = Console()
    _quiet()
    counts: Counter[str] = Counter()
    bad: list[Compared] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("traces", total=traces)
        for compared in agree_on_seeds(seed, traces, checked=rules):
            counts.update(compared.counts)
            counts["events"] += compared.events
            if compared.disagreement is not None:
                bad.append(compared)
                _tell(console, compared, len(bad), save)
            progress.advance(task)
    table = Table(title=f"{traces} random traces, seeds {seed} to {seed + traces - 1}")
    table.add_column("what occurred")
    table.add_column("count", justify="right")
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(name, f"{count:,}")
    table.add_row("traces with a disagreement", f"{len(bad):,}", style="bold red" if bad else "bold green")
    console.print(table)
    raise typer.Exit(1 if bad else 0)


def replay(source: Source, driver: Drivers = None, seed: ThreadSeed = 0, save: Kept = None) -> None:
    """Run a saved trace on one driver after another, and judge every outcome."""
    console = Console(soft_wrap=True)
    _quiet()
    trace = _taken(source)
    what = f"{source}: {len(trace.events)} events"
    if trace.interleaving is not None:
        what += f", with an interleaving of {len(trace.interleaving.switches)} switches"
    console.print(what, highlight=False)
    failed = False
    interleaving: Interleaving | None = None
    for each in driver or names():
        if (why := missing(each)) is not None:
            console.print(f"[yellow]{each}: skipped, {why}", highlight=False)
            continue
        ran = _run(console, _subject(each), trace, seed)
        failed = failed or ran.failure is not None
        interleaving = ran.interleaving or interleaving
    if save is not None:
        _save(trace, interleaving, save)
    raise typer.Exit(1 if failed else 0)


def trace(source: Source, file: Target) -> None:
    """Write a trace to a file, one event a line."""
    _write(_taken(source), file)


def _save(trace: Trace, interleaving: Interleaving | None, file: Path) -> None:
    if interleaving is None:
        raise typer.BadParameter("--save: no driver that ran interleaves threads; add --driver fast-async")
    _write(trace.model_copy(update={"interleaving": interleaving}), file)


def _write(trace: Trace, file: Path) -> None:
    try:
        trace.write(file)
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error.strerror}") from error
    typer.echo(f"{file}: {len(trace.events)} events")


def _taken(source: str) -> Trace:
    try:
        return take(source)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _subject(name: str) -> Subject:
    try:
        return subject(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _run(console: Console, found: Subject, trace: Trace, seed: int) -> Run:
    began = perf_counter()
    ran = found.run(trace, seed=seed, interleaving=trace.interleaving if found.interleaves else None)
    told = f"{found.name}: {ran.events} of {len(trace.events)} events in {perf_counter() - began:.2f} s"
    if found.interleaves:
        told += ", interleaved as saved" if trace.interleaving is not None else f", interleaved by seed {seed}"
    style, end = (
        ("bold red", str(ran.failure)) if ran.failure is not None else ("green", "every outcome is the one due")
    )
    console.print(f"{told}: {end}", style=style, highlight=False, markup=False)
    return ran


def write_trace(seed: int, folder: Path) -> Path:
    """Write a seed's trace into a folder; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trace-{seed}.jsonl"
    generate(seed).trace.write(path)
    return path


def _tell(console: Console, compared: Compared, nth: int, save: Path | None) -> None:
    if nth <= SHOWN:
        console.print(f"[bold red]seed {compared.seed}, {compared.disagreement}", highlight=False)
    if save is not None:
        console.print(f"  the trace is {write_trace(compared.seed, save)}")


def _quiet() -> None:
    """Steps that are never saved are part of the traces; their warnings would bury the table."""
    logging.getLogger("omni_prefix_fast").setLevel(logging.ERROR)
