"""A failing trace, told: its events in words, where it went wrong, and how to run it again."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.conform.coverage import HARNESS
from conformance.drivers.subject import Run
from conformance.page.actions import moment_words
from conformance.page.words import FailureWords, event_words, failure_words, key_name
from conformance.schedules.trace import Trace

SHOWN = 12
"""Rows that are wrong, and last moments of threads, that are told."""
LONGEST = 2000
"""Characters of a failure that is told in its own words."""


def story(trace: Trace, run: Run) -> Iterator[str]:
    """Lines about a run that failed; the last moments too, if it was recorded and had threads."""
    failure = run.failure
    assert failure is not None, "a story is told of a run that failed"
    for index, event in enumerate(trace.events[: max(run.events, failure.index + 1)]):
        mark = "✗" if index == failure.index else " "
        yield f"{mark} {index:3}  {event_words(event)}"
    words = failure_words(trace, failure)
    yield f"✗ {failure.kind}: {words.headline}"
    yield from _found(words)
    moments = [moment for moment in run.moments if moment.action not in HARNESS]
    if len({moment.thread for moment in moments}) > 1:
        yield "the last that threads did:"
        for moment in moments[-SHOWN:]:
            where = f"event {moment.event}" if moment.event >= 0 else ""
            yield f"      {moment.thread:10} {where:9} {moment_words(moment, trace, failure)}"


def _found(words: FailureWords) -> Iterator[str]:
    for one in words.differences[:SHOWN]:
        where = f" at {one.position}" if one.position >= 0 else ""
        key = f", {key_name(one.key)}" if one.key else ""
        yield f"      {one.req}{key}{where}: expected {one.expected}, found {one.found}"
    if len(words.differences) > SHOWN:
        yield f"      and {len(words.differences) - SHOWN} more"
    if words.expected:
        yield f"      expected {words.expected}"
    if words.found:
        more = " …" if len(words.found) > LONGEST else ""
        yield "\n".join(f"      {line}" for line in f"{words.found[:LONGEST]}{more}".splitlines())
