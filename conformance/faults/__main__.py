"""`python -m conformance.faults`: every failure of the environment at every place of some small traces."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from conformance.drivers.registry import subject
from conformance.faults.sweep import Totals, small_traces, sweep
from conformance.mutants.fast_runner import quiet
from conformance.schedules.trace import STAGES

SHOWN = 10

Driver = Annotated[
    list[str] | None, typer.Option(help="What is put to the test; both modes of the fast path if left out.")
]
Traces = Annotated[int, typer.Option(min=1, help="How many small traces.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed from which on small traces are looked for.")]


def faults(driver: Driver = None, traces: Traces = 20, seed: Seed = 0) -> None:
    """Each failure at each place where it can occur: an error or full recovery, no wrong row, nothing left behind."""
    console = Console()
    chosen = list(itertools.islice(small_traces(seed), traces))
    table = Table(
        title=f"Injected failures: {traces} traces, seeds {chosen[0].header.seed} to {chosen[-1].header.seed}"
    )
    table.add_column("stage")
    all_totals: dict[str, Totals] = {}
    with quiet(), Progress(console=console, transient=True) as progress:
        for name in driver or ("fast-eager", "fast-async"):
            table.add_column(name, justify="right")
            totals = all_totals[name] = Totals()
            for trace in progress.track(chosen, description=name):
                sweep(subject(name), trace, totals, seed=trace.header.seed)
    for stage in STAGES:
        table.add_row(stage, *(f"{totals.injections[stage]:,}" for totals in all_totals.values()))
    table.add_section()
    table.add_row("in all", *(f"{sum(totals.injections.values()):,}" for totals in all_totals.values()))
    table.add_row("wrong", *(f"{len(totals.wrong):,}" for totals in all_totals.values()))
    console.print(table)
    for name, totals in all_totals.items():
        for wrong in totals.wrong[:SHOWN]:
            console.print(f"[bold red]{name}: {wrong}", highlight=False)
    if any(totals.wrong for totals in all_totals.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(faults)
