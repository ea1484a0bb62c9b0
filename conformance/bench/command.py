"""The command `omni-prefix bench`."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from conformance.bench import other
from conformance.bench.contenders import contenders
from conformance.bench.decode import Decode, measure_decode
from conformance.bench.measure import Pace


def bench(console: Console, *, threads: int, rounds: int) -> None:
    """Measure decode steps and print them."""
    torch.set_num_threads(threads)
    wheel = other.find_wheel()
    everybody = contenders(None if wheel is None else other.load(wheel))
    table = Table("work", "contender", "start us", "save us", "materialize us", "save + materialize us", "quartiles")
    for deferred in (0, 16):
        for batch in (256, 64, 8, 1):
            figures = measure_decode(Decode(batch=batch, deferred=deferred), everybody, Pace(rounds=rounds))
            for name, parts in figures.items():
                cells = [
                    f"{parts[p].median * 1e6:,.0f}" if p in parts else "" for p in ("start", "save", "materialize")
                ]
                step = parts["step"]
                table.add_row(
                    f"decode {batch}" + (", deferred key" if deferred else ""),
                    name,
                    *cells,
                    f"{step.median * 1e6:,.0f}",
                    f"{step.low * 1e6:,.0f}..{step.high * 1e6:,.0f}",
                )
            table.add_section()
    console.print(table)
