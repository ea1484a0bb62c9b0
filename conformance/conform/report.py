"""The report of a session. The same traces give the same report, byte for byte: it tells no times and no machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from conformance.conform.coverage import DRAWN, EVENT_PAIRS, EVENTS, TRACES, Coverage
from conformance.conform.goals import GOALS
from conformance.conform.pairs import EVENTS as EVENT_LIST
from conformance.conform.pairs import known
from conformance.conform.session import Session

RARE = 8
"""Pairs that are listed: the rarest, and those that did not occur."""
WIDTH = 120
"""Columns, whatever the terminal: reports are compared."""


def missed_goals(coverage: Coverage, drivers: Sequence[str]) -> list[str]:
    """Goals that no driver came to, of those that one of them could."""
    threads = any(driver in coverage.orders for driver in drivers)
    reached = _goals(coverage, drivers)
    return [goal.name for goal in GOALS if (threads or not goal.threads) and not any(reached[goal.name])]


def report(console: Console, session: Session) -> None:
    """Print what was covered and how many traces failed."""
    console.width = WIDTH
    coverage, drivers = session.done.coverage, session.plan.drivers
    ran = ", ".join(f"{coverage.sections[TRACES][driver]:,} on {driver}" for driver in drivers)
    console.print(f"{session.done.last:,} traces of seed {session.plan.seed}: {ran}", highlight=False)
    _counts(console, "events", coverage.sections[EVENTS])
    _counts(console, "what the traces hold", coverage.sections[DRAWN])
    for driver in drivers:
        _counts(
            console, f"faults of the environment that occurred on {driver}", coverage.sections[f"faults of {driver}"]
        )
    _actions(console, coverage, drivers)
    _print_goals(console, coverage, drivers)
    _pairs(console, "pairs of consecutive events", coverage.sections[EVENT_PAIRS], known(EVENT_LIST))
    for driver in drivers:
        title = f"{driver}: pairs of consecutive actions of one thread"
        _pairs(console, title, coverage.sections[f"pairs in a thread of {driver}"], known(driver))
        _threads(console, coverage, driver)


def _counts(console: Console, title: str, counts: Counter[str]) -> None:
    if not counts:
        return
    told = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    console.print(f"\n[bold]{title}[/]")
    console.print("  " + ", ".join(f"{name} {count:,}" for name, count in told), highlight=False)


def _actions(console: Console, coverage: Coverage, drivers: Sequence[str]) -> None:
    columns = [coverage.sections[f"actions of {driver}"] for driver in drivers]
    if not any(columns):
        return
    table = Table("action", *drivers, title="actions of the machine", title_justify="left", title_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in sorted({name for column in columns for name in column}):
        table.add_row(name, *(f"{column[name]:,}" for column in columns))
    console.print()
    console.print(table)


def _goals(coverage: Coverage, drivers: Sequence[str]) -> dict[str, list[int]]:
    return {goal.name: [coverage.sections[f"goals of {driver}"][goal.name] for driver in drivers] for goal in GOALS}


def _print_goals(console: Console, coverage: Coverage, drivers: Sequence[str]) -> None:
    missed = missed_goals(coverage, drivers)
    table = Table("goal", *drivers, title="situations that runs came to", title_justify="left", title_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, counts in _goals(coverage, drivers).items():
        table.add_row(name, *(f"{count:,}" for count in counts), style="bold red" if name in missed else "")
    console.print()
    console.print(table)


def _pairs(console: Console, title: str, counts: Counter[str], listed: frozenset[str]) -> None:
    """How many of the known pairs occurred, the rarest of them, those that did not, and those beyond the list."""
    if not counts:
        return
    seen = [pair for pair in counts if pair in listed]
    rarest = sorted(seen, key=lambda pair: (counts[pair], pair))[:RARE]
    console.print(f"\n[bold]{title}[/]: {len(seen)} of the {len(listed)} known ones", highlight=False)
    _list(console, "rarest", [f"{pair} ({counts[pair]:,})" for pair in rarest])
    _list(console, "none of", sorted(listed - counts.keys()))
    _list(console, "not in the list (conformance/conform/pairs.toml)", sorted(counts.keys() - listed))


def _list(console: Console, what: str, names: Sequence[str]) -> None:
    if names:
        more = f", and {len(names) - RARE} more" if len(names) > RARE else ""
        console.print(f"  {what}: {'; '.join(names[:RARE])}{more}", highlight=False, markup=False)


def _threads(console: Console, coverage: Coverage, driver: str) -> None:
    counts = coverage.sections[f"threads of {driver}"]
    if not counts:
        return
    beside = coverage.sections[f"threads' pairs of {driver}"]
    console.print(
        f"\n[bold]{driver}: interleavings[/]: {counts['interleavings']:,} run, with {coverage.orders[driver].told()} "
        f"distinct orders of what threads did; {counts['points']:,} points at which threads might change, "
        f"{counts['switches']:,} switches; {len(beside)} pairs of an action of one thread and the next of another",
        highlight=False,
    )
    rarest = sorted(beside, key=lambda pair: (beside[pair], pair))[:RARE]
    _list(console, "rarest", [f"{pair} ({beside[pair]:,})" for pair in rarest])
