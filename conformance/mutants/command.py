"""`omni-prefix mutants`: the tables of seeded faults and how soon each is caught."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import typer
from rich.console import Console

from conformance.mutants import fast_runner, runner
from conformance.mutants.fast_table import FAST_MUTANTS
from conformance.mutants.table import MUTANTS, Mutant

WIDTH = 210
"""Columns of the table where the output has no width of its own, as in a log."""

Names = Annotated[list[str] | None, typer.Argument(help="Faults to run; all if none is named.", show_default=False)]
Of = Annotated[
    Literal["reference", "fast", "both"],
    typer.Option(help="Faults of the reference model, of the production package, or of both."),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, help=f"Most random traces a seed; {runner.LIMIT} and {fast_runner.LIMIT} if not given."),
]


def mutants(names: Names = None, of: Of = "both", limit: Limit = None) -> None:
    """Seeded faults: how many random traces until each is caught, five seeds each."""
    reference = {m.name: m for m in MUTANTS} if of != "fast" else {}
    fast = {m.name: m for m in FAST_MUTANTS} if of != "reference" else {}
    known = [*reference, *(name for name in fast if name not in reference)]
    if unknown := [name for name in names or () if name not in known]:
        raise typer.BadParameter(f"unknown faults {unknown}; known are {', '.join(known)}")
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    caught = True
    of_reference: Sequence[Mutant] = [mutant for name, mutant in reference.items() if not names or name in names]
    if of_reference:
        # The very table where it is whole: what the specification alone has is told with it.
        of_reference = MUTANTS if len(of_reference) == len(MUTANTS) else of_reference
        caught &= runner.report(console, of_reference, limit=limit or runner.LIMIT)
    if of_fast := [mutant for name, mutant in fast.items() if not names or name in names]:
        caught &= fast_runner.report(console, of_fast, limit=limit or fast_runner.LIMIT)
    if not caught:
        raise typer.Exit(1)
