"""How many random traces until a fault of the production package is caught, for each fault and several seeds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from conformance.drivers.registry import subject
from conformance.drivers.subject import Failure, Run
from conformance.mutants.fast_edit import FastMutant
from conformance.mutants.fast_table import FAST_MUTANTS
from conformance.mutants.runner import SEEDS, STRIDE
from conformance.schedules import Trace, generate

LIMIT = 3000
"""Most traces of one hunt: a fraction of what `omni-prefix conform` runs on each driver."""


@dataclass(frozen=True)
class Caught:
    """A fault was caught: at which trace of the hunt, as what, and on which trace exactly."""

    traces: int
    failure: Failure
    trace_seed: int


@dataclass(frozen=True)
class FastVerdict:
    """One fault under every seed."""

    mutant: FastMutant
    caught: tuple[Caught | None, ...]

    @property
    def killed(self) -> bool:
        """Whether every seed caught it."""
        return None not in self.caught

    @property
    def median(self) -> float | None:
        """Traces until caught, the median of the seeds; None if most seeds did not catch it."""
        middle = median(float("inf") if one is None else one.traces for one in self.caught)
        return None if middle == float("inf") else middle


@cache
def _trace(seed: int) -> Trace:
    return generate(seed).trace


@contextmanager
def quiet() -> Iterator[None]:
    """Without the production package's warnings, of which a faulty one has many."""
    logger = logging.getLogger("omni_prefix_fast")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def run_once(mutant: FastMutant, trace_seed: int) -> Run:
    """Run one trace with the fault in place, threads interleaved by the trace's seed."""
    with quiet(), mutant.applied():
        return subject(mutant.subject).run(_trace(trace_seed), seed=trace_seed)


def hunt(mutant: FastMutant, seed: int, *, limit: int = LIMIT) -> Caught | None:
    """Run traces until the fault is caught, or `limit` of them."""
    for n in range(limit):
        ran = run_once(mutant, seed * STRIDE + n)
        if ran.failure is not None:
            return Caught(n + 1, ran.failure, seed * STRIDE + n)
    return None


def report(console: Console, mutants: Sequence[FastMutant] = FAST_MUTANTS, *, limit: int = LIMIT) -> bool:
    """Run every fault and print the table. Returns whether all were caught, five seeds of five."""
    table = Table(title=f"Seeded faults of the production package: random traces until caught, seeds {SEEDS}")
    table.add_column("fault", no_wrap=True)
    table.add_column("breaks", no_wrap=True)
    table.add_column("instead")
    table.add_column("driver", no_wrap=True)
    table.add_column("traces", justify="right", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("caught by")
    survivors: list[str] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("faults of the production package", total=len(mutants) * len(SEEDS))
        for mutant in mutants:
            caught: list[Caught | None] = []
            for seed in SEEDS:
                caught.append(hunt(mutant, seed, limit=limit))
                progress.advance(task)
            verdict = FastVerdict(mutant, tuple(caught))
            _add(table, verdict)
            if not verdict.killed:
                survivors.append(mutant.name)
    console.print(table)
    if survivors:
        console.print(f"[bold red]not caught within {limit} traces: {', '.join(survivors)}")
    else:
        console.print(f"all {len(mutants)} caught, {len(SEEDS)} seeds of {len(SEEDS)}")
    return not survivors


def _add(table: Table, verdict: FastVerdict) -> None:
    by = Counter(caught.failure.kind for caught in verdict.caught if caught is not None)
    table.add_row(
        verdict.mutant.name,
        verdict.mutant.rule,
        escape(verdict.mutant.wrote),
        verdict.mutant.subject.removeprefix("fast-"),
        " ".join("–" if one is None else str(one.traces) for one in verdict.caught),
        "–" if verdict.median is None else f"{verdict.median:g}",
        ", ".join(f"{kind} ×{count}" for kind, count in by.most_common(2)),
    )
