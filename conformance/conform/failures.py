"""What failed: run again, made small, saved, told and drawn."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from conformance.conform.plan import Found
from conformance.conform.session import Session
from conformance.conform.story import story
from conformance.drivers.shrink import Shrunk, shrink
from conformance.drivers.subject import Run
from conformance.page.render import write_page
from conformance.schedules import Trace, generate

TOLD = 3
"""Failures that are made small and told whole."""
NAMED = 10
"""Failures behind those that are named, in a line each."""
SHRINK_S = 90.0
"""Most seconds that are spent on making a failure small; what was reached by then is told."""


def present(out: Console, session: Session, folder: Path) -> None:
    """Tell the first failures, and write a trace and a page of each into the folder."""
    logging.getLogger("omni_prefix_fast").setLevel(logging.CRITICAL)
    found = session.done.found
    for nth, one in enumerate(found[:TOLD], 1):
        trace = generate(session.plan.trace_seed(one.n)).trace
        out.print(f"\n[bold red]failure {nth}[/]: trace {one.n} of seed {session.plan.seed} on {one.driver}")
        _present(out, session, one, trace, folder)
    for one in found[TOLD : TOLD + NAMED]:
        seed = session.plan.trace_seed(one.n)
        first = str(one.failure).splitlines()[0]
        _print(out, f"seed:{seed} on {one.driver}: {first if len(first) < 100 else first[:100] + ' …'}")
    if len(found) > TOLD + NAMED:
        out.print(f"and {len(found) - TOLD - NAMED} more")
    out.print(f"\n[bold red]{len(found)} failures in {session.done.last:,} traces")


def replay_command(file: Path | str, driver: str, mutant: str | None) -> str:
    """What runs a saved trace again. A faulty package is run by `page` alone."""
    if mutant is None:
        return f"omni-prefix replay {file} --driver {driver}"
    return f"omni-prefix page {file} --driver {driver} --mutant {mutant}"


def _present(out: Console, session: Session, one: Found, trace: Trace, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    seed = session.plan.trace_seed(one.n)
    file = folder / f"{one.driver.replace(':', '-')}-{seed}.jsonl"
    if one.lost:
        trace.write(file)
        _print(out, f"{one.failure}\nthe trace is {file}; it is not run again here, since it took its process with it")
        return
    subject = session.plan.make(one.driver)
    run = subject.run(trace, seed=seed)
    if run.failure is None:
        trace.write(file)
        _print(out, f"{one.failure}\nit does not fail when it runs alone: something outlived a trace; it is {file}")
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        progress.add_task("making it small", total=None)
        small = shrink(subject, trace, run, seed=seed, seconds=SHRINK_S)
    small.trace.write(file)
    page = file.with_suffix(".html")
    command = replay_command(file, one.driver, session.plan.mutant)
    write_page(page, small.trace, small.run, driver=one.driver, command=command)
    for line in story(small.trace, small.run):
        _print(out, line)
    _print(out, f"{len(small.trace.events)} of the trace's {len(trace.events)} events are left{_left(small, run)}")
    _print(out, f"run it again: {command}\nits page:     {page}")


def _left(small: Shrunk, before: Run) -> str:
    if small.trace.interleaving is None or before.interleaving is None:
        return ""
    return f", and {len(small.trace.interleaving.switches)} of {len(before.interleaving.switches)} switches"


def _print(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)
