"""The command ``omni-prefix model-check``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from conformance.tla.check import Outcome, Task, check_all, check_manifest
from conformance.tla.errors import TlaError
from conformance.tla.manifest import SPEC, record
from conformance.tla.story import tell
from conformance.tla.trace import save_trace

WIDTH_OF_A_FILE = 120
"""Columns, where the output is no terminal."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _mode(task: Task) -> str:
    return task.model.mode if task.kind == "model" else task.kind


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title=None, header_style="bold", pad_edge=False)
    for column in ("model", "mode", "result"):
        table.add_column(column, overflow="fold")
    for column in ("distinct", "states", "depth", "seconds"):
        table.add_column(column, justify="right")
    order = {"model": 0, "fault": 1, "goal": 2}
    for outcome in sorted(outcomes, key=lambda o: (order[o.task.kind], o.task.model.name, o.task.name)):
        result = outcome.result
        depth = "" if result is None else result.depth or (len(result.violation.behaviour) if result.violation else 0)
        table.add_row(
            outcome.task.name if outcome.task.kind != "fault" else f"{outcome.task.name} in {outcome.task.model.name}",
            _mode(outcome.task),
            outcome.verdict if not outcome.problem else f"[red]{outcome.verdict}[/red]",
            f"{result.distinct:,}" if result else "",
            f"{result.generated:,}" if result else "",
            str(depth),
            f"{result.seconds:.1f}" if result else "",
        )
    return table


def _run(console: Console, chosen: list[Task], at_once: int) -> list[Outcome]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    outcomes: list[Outcome] = []
    with Progress(*columns, console=console, transient=True) as progress:
        line = progress.add_task("model-check", total=len(chosen))
        for outcome in check_all(
            chosen,
            at_once=at_once,
            on_progress=lambda task, p: progress.update(
                line, description=f"{task.name}: {p.distinct:,} states, depth {p.depth}, {p.left:,} left"
            ),
        ):
            outcomes.append(outcome)
            progress.advance(line)
    return outcomes


def _show(console: Console, outcome: Outcome, scratch: Path) -> None:
    """The counterexample as a story, and as a file that replays."""
    if outcome.result is None or outcome.result.violation is None:
        return
    violation, task = outcome.result.violation, outcome.task
    path = scratch / f"{task.name.replace(':', '-')}.json"
    broken = violation.check or task.must_break or ""
    save_trace(path, task.model.name, task.config.constants, violation.behaviour, broken)
    console.print(f"\n[bold]{task.name}[/bold]: {outcome.verdict}")
    for text in tell(violation.behaviour, violation.back_to):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"saved as {path}", markup=False)


@app.command("model-check")
def model_check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Models, faults or goals of spec/manifest.toml.", show_default=False),
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="The nightly lane too.")] = False,
    story: Annotated[bool, typer.Option("--story", help="Print the counterexample of faults and goals too.")] = False,
    at_once: Annotated[int, typer.Option(min=1, help="Runs of TLC at a time.")] = min(2, os.cpu_count() or 1),
    save_to: Annotated[Path, typer.Option(help="Where counterexamples are saved.")] = Path(".scratch/traces"),
    measure: Annotated[bool, typer.Option("--record", help="Write measured figures into the manifest.")] = False,
    spec: Annotated[Path, typer.Option(help="The folder of the specification.")] = SPEC,
) -> None:
    """TLC on the models, seeded faults and goals of the specification, compared with the manifest."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_OF_A_FILE
    try:
        chosen = check_manifest(names or (), "deep" if deep else "ci", spec)
        outcomes = _run(console, chosen, at_once)
    except TlaError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if measure:
        record(spec, {(o.task.kind, o.task.name): o.figures for o in outcomes if o.figures})
    for outcome in outcomes:
        expected = outcome.task.kind != "model" and not outcome.problem
        if story or not expected:
            _show(console, outcome, save_to)
    console.print(_table(outcomes))
    wrong = [o for o in outcomes if o.problem and not (measure and o.figures)]
    for outcome in wrong:
        typer.echo(f"{outcome.task.name}: {outcome.problem}", err=True)
    raise typer.Exit(1 if wrong else 0)
