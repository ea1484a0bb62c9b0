"""The closing table of a demo, and the verdict that goes with it."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

MUST_OCCUR = ("hits", "same-step hits", "preemptions", "aborts", "rows served from the cache", "rows compared")
MUST_NOT_OCCUR = ("positions missing", "differences")


def failures(counts: Mapping[str, int]) -> list[str]:
    """Why these counts show less than they should: whatever the run is for must have occurred, faults must not."""
    idle = [f"{name}: 0, so this run shows nothing about them" for name in MUST_OCCUR if not counts[name]]
    return idle + [f"{name}: {counts[name]:,}" for name in MUST_NOT_OCCUR if counts[name]]


def print_report(console: Console, title: str, counts: Mapping[str, int], notes: Sequence[str] = ()) -> bool:
    """Print the table, then what went wrong if anything did; return whether all is well."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, min_width=48)
    table.add_column(style="cyan")
    table.add_column(justify="right")
    for name, count in counts.items():
        bad = name in MUST_NOT_OCCUR and count
        idle = name in MUST_OCCUR and not count
        table.add_row(
            name, f"{count:,}", style="bold red" if bad or idle else None, end_section=name == "rows compared"
        )
    console.print(table)
    wrong = failures(counts)
    for note in (*notes, *wrong):
        console.print(f"  {note}", style="red", markup=False, highlight=False)
    return not wrong
