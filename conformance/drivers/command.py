"""`omni-prefix agree` and `omni-prefix replay`: reference model and production cache on the same traces."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from conformance.drivers.agree import Compared, agree_on_seeds
from conformance.drivers.agree import agree as agree_on_trace
from conformance.schedules import Trace, generate, read

SHOWN = 10
"""Disagreements that are told in full."""

Traces = Annotated[int, typer.Option(min=1, help="How many random traces.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the first trace; the next has the next seed.")]
Save = Annotated[Path | None, typer.Option(help="Folder for the traces that disagree.", file_okay=False)]
Rules = Annotated[bool, typer.Option(help="Check the reference model's rules after every action, too.")]
File = Annotated[Path, typer.Argument(help="A trace file.", exists=True, dir_okay=False)]


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


def replay(file: File) -> None:
    """A trace from a file, on the reference model and the production cache, side by side."""
    console = Console()
    _quiet()
    try:
        trace = read(file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    disagreement = agree_on_trace(trace)
    if disagreement is None:
        console.print(f"{len(trace.events)} events of the trace of seed {trace.header.seed}: both agree")
        return
    console.print(f"[bold red]seed {trace.header.seed}, {disagreement}", highlight=False)
    raise typer.Exit(1)


def write_trace(seed: int, folder: Path) -> Path:
    """Write a seed's trace into a folder; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    trace: Trace = generate(seed).trace
    path = folder / f"trace-{seed}.jsonl"
    trace.write(path)
    return path


def _tell(console: Console, compared: Compared, nth: int, save: Path | None) -> None:
    if nth <= SHOWN:
        console.print(f"[bold red]seed {compared.seed}, {compared.disagreement}", highlight=False)
    if save is not None:
        console.print(f"  the trace is {write_trace(compared.seed, save)}")


def _quiet() -> None:
    """Steps that are never saved are part of the traces; their warnings would bury the table."""
    logging.getLogger("omni_prefix_fast").setLevel(logging.ERROR)
