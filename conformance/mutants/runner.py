"""How many random traces until a fault is caught, for each fault and several seeds."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from conformance.drivers.reference import ReferenceDriver
from conformance.mutants.table import MUTANTS, Mutant
from conformance.schedules import Trace, generate, replay
from omni_prefix_ref.errors import NotEnabled, RuleBroken

MANIFEST = Path(__file__).resolve().parents[2] / "spec" / "manifest.toml"
STRIDE = 1_000_000
"""Distance between the first traces of two seeds: `seed * STRIDE + n` is the seed of a run's trace n."""
SEEDS = (0, 1, 2, 3, 4)
LIMIT = 600
"""Most traces of one run. A trace counts once, though it is run twice: eagerly, and with threads that lag."""
ALONE = 60
"""Most traces of a run without the rules: some faults leave every outcome right."""


@dataclass(frozen=True)
class Caught:
    """A fault was caught: at which trace of the run, how, and on which trace exactly."""

    traces: int
    by: str
    trace_seed: int
    lagging: bool


@dataclass(frozen=True)
class Verdict:
    """One fault under every seed. `checked` with the rules watching; `alone` by outcomes only."""

    mutant: Mutant
    checked: tuple[Caught | None, ...]
    alone: tuple[Caught | None, ...]

    @property
    def killed(self) -> bool:
        """Whether every seed caught it."""
        return None not in self.checked


@cache
def _trace(seed: int) -> Trace:
    return generate(seed).trace


def run_once(mutant: Mutant, trace: Trace, *, lag: int | None, checked: bool) -> str | None:
    """Run one trace; say what caught the fault, or None."""
    subject = ReferenceDriver(trace.header, lag=lag, machine=mutant.machine, driver=mutant.driver, checked=checked)
    try:
        mismatch = replay(trace, subject)
    except RuleBroken as broken:
        return broken.rule if checked or broken.rule == "at_rest" else None
    except NotEnabled:
        return "stuck"
    except (LookupError, StopIteration, RuntimeError) as error:
        return f"crash ({type(error).__name__})"
    return None if mismatch is None else f"outcome of {mismatch.event.event}"


def hunt(mutant: Mutant, seed: int, *, checked: bool, limit: int = LIMIT) -> Caught | None:
    """Run traces until the fault is caught, or `limit` of them."""
    for n in range(limit):
        trace_seed = seed * STRIDE + n
        for lag in (None, trace_seed):
            by = run_once(mutant, _trace(trace_seed), lag=lag, checked=checked)
            if by is not None:
                return Caught(n + 1, by, trace_seed, lag is not None)
    return None


def judge(mutant: Mutant, seeds: Sequence[int] = SEEDS, *, limit: int = LIMIT) -> Verdict:
    """One fault under every seed, with the rules and without."""
    return Verdict(
        mutant,
        tuple(hunt(mutant, seed, checked=True, limit=limit) for seed in seeds),
        tuple(hunt(mutant, seed, checked=False, limit=min(limit, ALONE)) for seed in seeds),
    )


def judge_all(
    mutants: Sequence[Mutant] = MUTANTS, seeds: Sequence[int] = SEEDS, *, limit: int = LIMIT
) -> Iterator[Verdict]:
    """Every fault, one after another."""
    for mutant in mutants:
        yield judge(mutant, seeds, limit=limit)


def report(console: Console, mutants: Sequence[Mutant] = MUTANTS, *, limit: int = LIMIT) -> bool:
    """Run every fault and print the table. Returns whether all were caught, five seeds of five."""
    table = Table(title=f"Seeded faults of the reference model: random traces until caught, seeds {SEEDS}")
    table.add_column("fault", no_wrap=True)
    table.add_column("breaks", no_wrap=True)
    table.add_column("traces until caught", justify="right")
    table.add_column("caught by")
    table.add_column("by outcomes alone", justify="right")
    table.add_column("TLC: model, rule, steps")
    in_spec = spec_faults()
    survivors: list[str] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("faults", total=len(mutants))
        for verdict in judge_all(mutants, limit=limit):
            by = Counter(caught.by for caught in verdict.checked if caught is not None)
            table.add_row(
                verdict.mutant.name,
                verdict.mutant.rule,
                _counts(verdict.checked),
                ", ".join(f"{name} ×{n}" for name, n in by.most_common(2)),
                _counts(verdict.alone),
                in_spec.pop(verdict.mutant.name, "not in the spec"),
            )
            if not verdict.killed:
                survivors.append(verdict.mutant.name)
            progress.advance(task)
    console.print(table)
    if survivors:
        console.print(f"[bold red]not caught within {limit} traces: {', '.join(survivors)}")
    else:
        console.print(f"all {len(mutants)} caught, {len(SEEDS)} seeds of {len(SEEDS)}")
    console.print(f"– by outcomes alone: not within {ALONE} traces; the rules see it, or more traces would")
    if mutants is MUTANTS:
        _print_spec_only(console, in_spec)
    return not survivors


def spec_faults(manifest: Path = MANIFEST) -> dict[str, str]:
    """By name, the faults of the specification: model and rule that break, and the length of the counterexample.

    `omni-prefix model-check` measures these figures, and fails where one of them is not what TLC finds.
    """
    faults = tomllib.loads(manifest.read_text(encoding="utf-8"))["fault"]
    return {f["name"]: f"{f['model']}, {f['violates']}, {f['length']}" for f in faults}


def _print_spec_only(console: Console, in_spec: dict[str, str]) -> None:
    table = Table(title="Seeded faults of the specification alone")
    table.add_column("fault", no_wrap=True)
    table.add_column("TLC: model, rule, steps")
    for name, figures in in_spec.items():
        table.add_row(name, figures)
    console.print(table)


def _counts(caught: Sequence[Caught | None]) -> str:
    return " ".join("–" if one is None else str(one.traces) for one in caught)
