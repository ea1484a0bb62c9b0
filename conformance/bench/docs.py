"""`docs/benchmark.md`: the page of figures, written from a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from conformance.bench.contenders import ASYNC, COPY, EAGER, OMNI, PLAIN
from conformance.bench.report import Report, duration, verdict_rows

HEAD = """# Benchmark

What the cache costs the engine, beside two other implementations of the same thing and a plain copy of the same bytes.
This page was written by

```sh
{command}
```

All contenders run in one process, a short burst each in turn; every row handed over is compared with the expected one,
outside the clock. Given are medians. Rows are bfloat16, blocks have 16 slots; width is 2,048 if not said otherwise.

- **eager**, **async**: this cache, writing inline, and on threads of its own. The host is the only device here, so
  what a copy engine would do beside the forward is done by the same processors.
- **straightforward**: [`StraightforwardCache`](../conformance/bench/baseline.py), one task a request and plain loops.
- **vllm-omni**: the prefix cache of vllm-omni 0.30.0, from its wheel, in the mode that it chooses on a CPU.
- **copy**: for a decode step the step's bytes three times (to a page, to the pool, to the consumer), for a hit the
  hit's bytes once, all into warm memory.
"""


BOUNDS = """## What bounds it

- A step has a fixed part, most of the figure at batch 1: some fifty small array operations for the layout and its
  checks, the tables, the page, the task and the counters. `StraightforwardCache` has none of these, no bound on
  memory and no answer to a failure either, and is cheaper up to some batch size. Less of it needs a compiled
  extension.
- From there on a decode step costs its copies, and one view a request for the consumer. The rows go to as many places
  of the pool as there are requests, none of which is in the processor's cache; the plain copy has its bytes in one
  piece, and two of its three copies find them there.
- A hit is gathered out of a pool that no cache holds, beside a plain copy of one piece that a cache does hold. At 512
  rows that is the difference; at 16,384 rows both wait for memory and a hit costs what a copy does, so that no hit
  can be faster than vllm-omni by more than a copy is.
- On threads of its own the cache shares two processors and the interpreter's lock with the engine thread. That is
  what `async` measures here; beside a device with copy engines it is meant to take work off the engine thread.
"""


def write_page(report: Report, page: Path, picture: Path) -> None:
    """Write the page; `picture` is where the plot is."""
    parts = [HEAD.format(command=report.command)]
    parts += [_table(("", ""), report.environment().items())]
    parts += ["## Aims\n", _table(("work", "mode", "aim", "measured", ""), verdict_rows(report.verdicts))]
    parts += [BOUNDS]
    if picture.exists():
        parts += [f"## Cost\n\n![Cost against batch size, hit length and number of blocks]({_link(page, picture)})\n"]
    parts += ["## Figures\n"]
    for result in report.results:
        names = [name for name in (EAGER, ASYNC, PLAIN, OMNI, COPY) if name in result.figures] or list(result.figures)
        rows = list(dict.fromkeys(part for name in names for part in result.figures[name]))
        cells = (
            (part, *(duration(of[part].median) if part in (of := result.figures[name]) else "" for name in names))
            for part in rows
        )
        parts += [f"### {result.title}\n", _table(("", *names), cells)]
    page.write_text("\n".join(parts), encoding="utf-8")


def _link(page: Path, picture: Path) -> str:
    return picture.relative_to(page.parent).as_posix()


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"
