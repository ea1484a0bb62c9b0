"""Thousands of random requests on the built-in engine, with a progress bar and a closing table."""

from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from conformance.demo.report import print_report
from conformance.onoff import CacheFactory, Tally, draw_round, run_round
from conformance.onoff.run import make_cache

ROUND_SIZE = 200


def run_requests(console: Console, *, seed: int, requests: int, cache_factory: CacheFactory = make_cache) -> bool:
    """Run so many requests, in rounds; return whether all rows were right and whatever is to be shown occurred."""
    console.rule("[bold]Random requests, cache on against cache off", align="left")
    console.print(
        "The built-in engine follows vLLM's scheduling rules; a row is a function of the token prefix. Every request "
        "runs twice, with prefix caching on and off. Rows are written inline or on threads of the cache; steps are "
        "handed over at once, late, out of order, from a thread, in part, or discarded.",
        highlight=False,
    )
    tally, notes = Tally(), []
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rows]:,} rows compared, {task.fields[bad]:,} differences"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("requests", total=requests, rows=0, bad=0)
        for round_seed, count in _rounds(seed, requests):
            result = run_round(
                draw_round(round_seed, count),
                cache_factory=cache_factory,
                on_progress=lambda done: progress.advance(task, done),
            )
            tally.add(result.tally)
            notes += [f"round {round_seed}: {note}" for note in result.notes]
            progress.update(task, rows=tally.rows_compared, bad=tally.differences + tally.missing)
    return print_report(console, f"Built-in engine, seed {seed}", counts_of(tally), notes[:10])


def counts_of(tally: Tally) -> dict[str, int]:
    """The table's lines."""
    return {
        "requests": tally.requests,
        "engine steps": tally.steps,
        "  of them with writes on other threads": tally.asynchronous_steps,
        "admissions, resumes included": tally.admissions,
        "hits": tally.hits,
        "same-step hits": tally.same_step_hits,
        "  of them on a recycled block": tally.recycled_same_step_hits,
        "preemptions": tally.preemptions,
        "resumed with more hit than was handed over": tally.resumed_gaps,
        "aborts": tally.aborts,
        "steps handed over late or out of order": tally.late,
        "steps handed over from a thread": tally.threaded,
        "steps discarded, or handed over in part": tally.discarded + tally.partial,
        "rows served from the cache": tally.rows_from_cache,
        "rows compared again after the run": tally.rows_kept,
        "rows compared": tally.rows_compared,
        "positions missing": tally.missing,
        "differences": tally.differences,
    }


def _rounds(seed: int, requests: int) -> Iterator[tuple[int, int]]:
    """Seeds and sizes of the rounds."""
    for index, start in enumerate(range(0, requests, ROUND_SIZE)):
        yield seed * 100_000 + index, min(ROUND_SIZE, requests - start)
