"""`omni-prefix mutants`: the table of seeded faults and how soon each is caught."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from conformance.mutants.runner import LIMIT, report
from conformance.mutants.table import MUTANTS

WIDTH = 210
"""Columns of the table where the output has no width of its own, as in a log."""

Names = Annotated[list[str] | None, typer.Argument(help="Faults to run; all if none is named.", show_default=False)]
Limit = Annotated[int, typer.Option(min=1, help="Most random traces a seed.")]


def mutants(names: Names = None, limit: Limit = LIMIT) -> None:
    """Seeded faults of the reference model: how many random traces until each is caught, five seeds each."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in names or () if name not in known]:
        raise typer.BadParameter(f"unknown faults {unknown}; known are {', '.join(known)}")
    chosen = [known[name] for name in names] if names else MUTANTS
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    if not report(console, chosen, limit=limit):
        raise typer.Exit(1)
