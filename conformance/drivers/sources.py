"""Where a command takes a trace from: a file, `seed:7` (the generator), `case:E01`, or `fault:no_preserve` (TLC)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from conformance.cases import CASES
from conformance.drivers.counterexamples import counterexample
from conformance.schedules import Trace, generate, read
from conformance.tla.errors import TlaError


def _of_seed(seed: str) -> Trace:
    if not seed.isdecimal():
        raise ValueError(f"seed:{seed}: a seed is a whole number from 0 on")
    return generate(int(seed)).trace


def _of_case(name: str) -> Trace:
    if name not in CASES:
        raise ValueError(f"case:{name}: no such case; there are {', '.join(CASES)}")
    return CASES[name].make()


def _of_fault(name: str) -> Trace:
    try:
        return counterexample(name)
    except TlaError as error:
        raise ValueError(f"fault:{name}: {error}") from error


MAKERS: dict[str, Callable[[str], Trace]] = {"seed": _of_seed, "case": _of_case, "fault": _of_fault}
"""By what stands before the colon."""

HELP = (
    "A trace file, seed:N for the random trace of a seed, case:NAME for a trace of conformance/cases, or fault:NAME "
    "for TLC's counterexample of a fault of spec/manifest.toml."
)


def take(source: str) -> Trace:
    """The trace that `source` names.

    Raises:
        ValueError: there is no such file, seed or name, or the file is no trace; the message says which line.
    """
    kind, colon, name = source.partition(":")
    if colon and kind in MAKERS:
        return MAKERS[kind](name)
    path = Path(source)
    if not path.is_file():
        others = ", ".join(f"{kind}:..." for kind in MAKERS)
        raise ValueError(f"{source}: no such file; a trace is a file, or {others}")
    try:
        return read(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not a text file ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
