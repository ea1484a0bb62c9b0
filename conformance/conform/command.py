"""`omni-prefix conform`: random traces on the drivers, for so many traces or minutes; coverage, and what failed."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from conformance.conform.failures import present
from conformance.conform.plan import Part, Plan
from conformance.conform.report import missed_goals, report
from conformance.conform.session import Budget, Session
from conformance.conform.subjects import make_subject
from conformance.conform.workers import WorkerError
from conformance.mutants.runner import STRIDE

TRACES = 2000
"""Traces of a session that is given no budget."""
INTERRUPTED = 130

Traces = Annotated[int | None, typer.Option(min=1, help=f"How many traces; {TRACES:,} if no budget is given.")]
Minutes = Annotated[float | None, typer.Option(min=0.01, help="Begin no trace after so many minutes.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides every trace and interleaving.")]
Drivers = Annotated[str, typer.Option(help="Drivers, separated by commas; module:NAME is any module's.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; one a core if left out.", show_default=False)]
Save = Annotated[Path, typer.Option(help="Folder for what failed.", file_okay=False)]
Resume = Annotated[
    Path | None, typer.Option(help="Checkpoint: go on from it if it is there, and keep it up to date.", dir_okay=False)
]
Mutant = Annotated[str | None, typer.Option(help="A seeded fault, to see it fail.", show_default=False)]
AllGoals = Annotated[bool, typer.Option("--all-goals", help="Fail if one of the situations was never come to.")]


def conform(  # noqa: PLR0913, PLR0917 - one for each option
    traces: Traces = None,
    minutes: Minutes = None,
    seed: Seed = 0,
    drivers: Drivers = "fast-eager,fast-async",
    workers: Workers = None,
    save: Save = Path(".scratch/conform"),
    resume: Resume = None,
    mutant: Mutant = None,
    all_goals: AllGoals = False,
) -> None:
    """Random traces on the drivers: rows, errors and tables equal to the reference model's and to cache-off rows."""
    out, err = Console(), Console(stderr=True)
    names = tuple(dict.fromkeys(name.strip() for name in drivers.split(",") if name.strip()))
    if not names:
        raise typer.BadParameter(f"--drivers {drivers!r} names no driver; leave it out for the usual ones")
    plan = Plan(seed, names, partial(make_subject, mutant=mutant), mutant)
    if traces is not None and traces > STRIDE:
        raise typer.BadParameter(f"a seed has {STRIDE:,} traces; for more, run the next --seed too")
    try:
        plan.subjects()  # a name that nothing has is told before any process starts
        session = Session.begin(plan, resume)
    except (ValueError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    budget = Budget(TRACES if traces is None and minutes is None else traces, None if minutes is None else minutes * 60)
    try:
        save.mkdir(parents=True, exist_ok=True)  # before anything runs: what fails hours later has to go somewhere
    except OSError as error:
        raise typer.BadParameter(f"--save {save} cannot be made: {error.strerror}") from error
    try:
        _run(err, session, budget, workers or os.cpu_count() or 1, resume)
    except WorkerError as error:
        err.print(f"[bold red]error: {error}", highlight=False)
        raise typer.Exit(2) from error
    except OSError as error:
        raise typer.BadParameter(f"--resume {resume} cannot be written: {error.strerror}") from error
    if session.unsaved is not None:
        err.print(f"[bold red]{resume} is not up to date: {session.unsaved}", highlight=False)
    report(out, session)
    try:
        raise typer.Exit(_verdict(out, session, save, all_goals=all_goals))
    except OSError as error:
        err.print(f"[bold red]error: what failed cannot be written to --save {save}: {error}", highlight=False)
        raise typer.Exit(1) from error


SAY_S = 30.0
"""Where there is no terminal to draw on: how often, in seconds, a line says how far it is."""


def _run(err: Console, session: Session, budget: Budget, workers: int, path: Path | None) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("traces"))
    rate = TextColumn("{task.fields[rate]}")
    with Progress(*columns, rate, TimeElapsedColumn(), console=err, transient=True) as progress:
        before = session.done.last
        task = progress.add_task("", total=budget.traces, completed=before, rate="")
        said = 0.0

        def tell(done: Part) -> None:
            nonlocal said
            elapsed = progress.tasks[0].elapsed or 1.0
            failed = f"[red]{len(done.found)} failed[/]" if done.found else "none failed"
            told = f"{(done.last - before) / elapsed:.0f}/s, {failed}"
            progress.update(task, completed=done.last, rate=told)
            if not err.is_terminal and elapsed - said >= SAY_S:
                said = elapsed
                err.print(f"{done.last:,} traces, {told}", highlight=False)

        session.run(budget, workers, path, tell)
        elapsed = progress.tasks[0].elapsed or 0.0
    err.print(f"{session.done.last - before:,} traces in {elapsed:.1f} s, {workers} workers", highlight=False)


def _verdict(out: Console, session: Session, save: Path, *, all_goals: bool) -> int:
    """Print what it comes to; the exit status."""
    out.print()
    if session.interrupted:
        out.print("[bold yellow]interrupted: the above is what was covered until then")
    if session.done.found:
        present(out, session, save)
        return 1
    if session.interrupted:
        return INTERRUPTED
    missed = missed_goals(session.done.coverage, session.plan.drivers)
    if missed and all_goals:
        out.print(f"[bold red]no run came to: {'; '.join(missed)}", highlight=False)
        return 1
    if not session.done.last:
        out.print("[bold red]no trace was run: give more --minutes")
        return 1
    out.print(f"[bold green]all {session.done.last:,} traces are right on {', '.join(session.plan.drivers)}")
    return 0
