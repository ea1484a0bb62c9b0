"""Which events, and which actions of one thread, are known to follow each other: `pairs.toml`, kept by hand.

The list says what runs have come to so far, so a lane is measured against it. A pair beyond it is told: either the
machine has changed, or something rare has happened for the first time and belongs into the list.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from conformance.conform.coverage import ARROW

LIST = Path(__file__).with_name("pairs.toml")
EVENTS = "events"


@cache
def known(of: str) -> frozenset[str]:
    """Pairs of `EVENTS`, or of the actions of a driver, as `Coverage` names them. None for a driver without a list."""
    table = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return frozenset(f"{first}{ARROW}{after}" for first, afters in table.get(of, {}).items() for after in afters)
