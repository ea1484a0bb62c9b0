"""`omni-prefix page`: a trace, run on one driver and drawn."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from conformance.conform.subjects import make_subject
from conformance.drivers.shrink import shrink
from conformance.drivers.sources import HELP, take
from conformance.page.browser import screenshot as draw
from conformance.page.render import write_page

Source = Annotated[str, typer.Argument(metavar="TRACE", help=HELP)]
Target = Annotated[Path, typer.Argument(metavar="OUT.html", help="The page to write.", dir_okay=False)]
Driver = Annotated[str, typer.Option(help="What to run it on.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the interleaving, where the trace holds none.")]
Mutant = Annotated[str | None, typer.Option(help="With a seeded fault of the production package.", show_default=False)]
Small = Annotated[bool, typer.Option("--small", help="If it fails, make the trace small first.")]
Screenshot = Annotated[
    Path | None, typer.Option(help="Draw the page into a PNG file, too; needs chromium.", dir_okay=False)
]


def page(
    source: Source,
    out: Target = Path(".scratch/page.html"),
    driver: Driver = "fast-async",
    seed: Seed = 0,
    mutant: Mutant = None,
    small: Small = False,
    screenshot: Screenshot = None,
) -> None:
    """Run a trace on one driver, and draw what happened as one HTML file that opens by a double click."""
    logging.getLogger("omni_prefix_fast").setLevel(logging.CRITICAL)
    try:
        trace = take(source)
        subject = make_subject(driver, mutant=mutant)
    except (ValueError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    run = subject.run(trace, seed=seed, interleaving=trace.interleaving if subject.interleaves else None, record=True)
    if small and run.failure is not None:
        made = shrink(subject, trace, run, seed=seed)
        trace, run = made.trace, made.run
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_page(out, trace, run, driver=driver, command=_again(source, driver, seed, mutant, small=small))
        if screenshot is not None:
            draw(out, screenshot)
    except (OSError, RuntimeError) as error:
        raise typer.BadParameter(f"{out}: {error}") from error
    typer.echo(f"{out}: {len(run.moments)} moments; " + ("all is right" if run.failure is None else str(run.failure)))


def _again(source: str, driver: str, seed: int, mutant: str | None, *, small: bool) -> str:
    options = [f"--driver {driver}", f"--seed {seed}" * (seed != 0), f"--mutant {mutant}" * (mutant is not None)]
    words = ["omni-prefix page", source, *options, "--small" * small]
    return " ".join(word for word in words if word)
