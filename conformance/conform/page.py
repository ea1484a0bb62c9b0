"""`omni-prefix page`: a trace, run on one driver and drawn."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from conformance.conform.failures import replay_command
from conformance.conform.subjects import make_subject
from conformance.drivers.sources import HELP, take
from conformance.page.render import write_page

Source = Annotated[str, typer.Argument(metavar="TRACE", help=HELP)]
Target = Annotated[Path, typer.Argument(metavar="OUT.html", help="The page to write.", dir_okay=False)]
Driver = Annotated[str, typer.Option(help="What to run it on.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the interleaving, where the trace holds none.")]
Mutant = Annotated[str | None, typer.Option(help="With a seeded fault of the production package.", show_default=False)]


def page(source: Source, out: Target, driver: Driver = "fast-async", seed: Seed = 0, mutant: Mutant = None) -> None:
    """Run a trace on one driver, and draw what happened as one HTML file that opens by a double click."""
    logging.getLogger("omni_prefix_fast").setLevel(logging.CRITICAL)
    try:
        trace = take(source)
        subject = make_subject(driver, mutant=mutant)
    except (ValueError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    run = subject.run(trace, seed=seed, interleaving=trace.interleaving if subject.interleaves else None, record=True)
    try:
        write_page(out, trace, run, driver=driver, command=replay_command(source, driver, mutant))
    except OSError as error:
        raise typer.BadParameter(f"{out} cannot be written: {error.strerror}") from error
    typer.echo(f"{out}: {len(run.moments)} moments; " + ("all is right" if run.failure is None else str(run.failure)))
