"""Where a command takes a trace from: a file, or `seed:7`, the generator's trace of a seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from conformance.schedules import Trace, generate, read


def _of_seed(seed: str) -> Trace:
    if not seed.isdecimal():
        raise ValueError(f"seed:{seed}: a seed is a whole number from 0 on")
    return generate(int(seed)).trace


MAKERS: dict[str, Callable[[str], Trace]] = {"seed": _of_seed}
"""By what stands before the colon."""

HELP = "A trace file, or seed:N for the random trace of a seed."


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
