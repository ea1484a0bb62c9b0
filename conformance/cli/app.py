"""The commands of ``omni-prefix``."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console

DISTRIBUTION = "omni-prefix-cache"

app = typer.Typer(
    name="omni-prefix",
    help="Show and check the prefix cache of per-token stage outputs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SeedOption = Annotated[int, typer.Option(min=0, help="Decides everything that is drawn.")]


@contextmanager
def needs(extra: str, *, target: str = "venv") -> Iterator[None]:
    """Turn a missing package into one sentence that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in {"conformance", "omni_prefix_fast", "omni_prefix_ref"}:
            raise
        typer.echo(
            f"error: this command needs the package {error.name!r}, which is not installed here; run `make {target}`, "
            f"or install '{DISTRIBUTION}[{extra}]'",
            err=True,
        )
        raise typer.Exit(2) from error


def _print_version(asked: bool) -> None:
    if asked:
        try:
            typer.echo(f"{DISTRIBUTION} {version(DISTRIBUTION)}")
        except PackageNotFoundError:
            typer.echo(f"{DISTRIBUTION} (not installed; running from the source tree)")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def demo(
    seed: SeedOption = 0,
    requests: Annotated[int, typer.Option(min=1, help="How many random requests to run.")] = 3000,
) -> None:
    """The worked example, then random requests on the built-in engine: cache on against cache off."""
    with needs("conformance"):
        from conformance.demo.example import run_example
        from conformance.demo.requests import run_requests
    console = Console()
    shown = run_example(console)
    console.print()
    agreed = run_requests(console, seed=seed, requests=requests)
    raise typer.Exit(0 if shown and agreed else 1)
