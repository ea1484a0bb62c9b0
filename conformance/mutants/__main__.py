"""`python -m conformance.mutants`."""

import typer

from conformance.mutants.command import mutants

typer.run(mutants)
