"""What the benchmark found: figures, the aims they are held against, and the forms in which they are written down."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from conformance.bench.measure import Figure, Figures


@dataclass(frozen=True, slots=True)
class Result:
    """One piece of work, measured."""

    work: str
    """Its family: decode, hit, pending, blocks."""
    parameters: Mapping[str, int]
    figures: Figures
    """By contender, or by variant of the work; then by part."""

    @property
    def title(self) -> str:
        """Family and parameters."""
        return f"{self.work} " + ", ".join(f"{name} {value:,}" for name, value in self.parameters.items())


@dataclass(frozen=True, slots=True)
class Verdict:
    """An aim, and what was measured."""

    work: str
    mode: str
    aim: str
    measured: str
    met: bool | None
    """None: what it is compared with is not here."""


@dataclass(slots=True)
class Report:
    """All of it."""

    command: str
    threads: int
    other: str
    """What is known of the other implementation."""
    results: list[Result] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    endured: dict[str, Any] = field(default_factory=dict)
    """The long runs, by mode."""
    load: float = 0.0
    """Processes that wanted to run, on average of the last minute, when the benchmark began."""

    def environment(self) -> dict[str, str]:
        """What the figures depend on."""
        return {
            "processors": str(os.cpu_count()),
            "processor": _processor(),
            "threads of torch": str(self.threads),
            "load at the start": f"{self.load:.1f}",
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "other implementation": self.other,
        }

    def result(self, work: str, **parameters: int) -> Result | None:
        """The result of a piece of work, if it was measured."""
        return next((r for r in self.results if r.work == work and dict(r.parameters) == parameters), None)

    def write_json(self, path: Path) -> None:
        """Write everything."""
        written = {
            "command": self.command,
            "environment": self.environment(),
            "results": [asdict(result) for result in self.results],
            "aims": [asdict(verdict) for verdict in self.verdicts],
            "long run": {mode: asdict(endured) for mode, endured in self.endured.items()},
        }
        path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def duration(seconds: float) -> str:
    """Microseconds, or milliseconds from ten on."""
    return f"{seconds * 1e3:,.1f} ms" if abs(seconds) >= 0.01 else f"{seconds * 1e6:,.0f} us"


def figure_rows(result: Result) -> list[tuple[str, str, str, str]]:
    """Contender, part, median, quartiles."""
    return [
        (name, part, duration(figure.median), f"{duration(figure.low)} .. {duration(figure.high)}")
        for name, parts in result.figures.items()
        for part, figure in parts.items()
    ]


def verdict_rows(verdicts: Sequence[Verdict]) -> list[tuple[str, str, str, str, str]]:
    """Work, mode, aim, measured, met or not."""
    words = {True: "met", False: "not met", None: "-"}
    return [(v.work, v.mode, v.aim, v.measured, words[v.met]) for v in verdicts]


def show_result(console: Console, result: Result) -> None:
    """Print the figures of one piece of work: a line a contender, a column a part."""
    parts = list(dict.fromkeys(part for of_one in result.figures.values() for part in of_one))
    table = Table("", *(f"{part}" for part in parts), title=result.title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, of_one in result.figures.items():
        table.add_row(name, *(_cell(of_one.get(part)) for part in parts))
    console.print(table)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    return f"{duration(figure.median)}\n[dim]{duration(figure.low)} .. {duration(figure.high)}[/dim]"


def show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Print the aims."""
    table = Table("work", "mode", "aim", "measured", "", title="Aims", title_justify="left")
    colours = {"met": "green", "not met": "red", "-": "dim"}
    last = ""
    for work, mode, aim, measured, met in verdict_rows(verdicts):
        if last and work != last:
            table.add_section()
        last = work
        table.add_row(work, mode, aim, measured, f"[{colours[met]}]{met}[/]")
    console.print(table)
