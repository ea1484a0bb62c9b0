"""How far a session came, in a file that is always whole: written beside, then moved into place."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from conformance.conform.coverage import Coverage
from conformance.conform.plan import Found, Part, Plan
from conformance.drivers.subject import Failure

VERSION = 1


def save(path: Path, plan: Plan, part: Part) -> None:
    """Write what the session has done so far."""
    told = {
        "version": VERSION,
        "options": plan.options(),
        "done": part.last,
        "coverage": part.coverage.to_json(),
        "found": [asdict(found) for found in part.found],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(told, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def load(path: Path, plan: Plan) -> Part:
    """What the session had done.

    Raises:
        ValueError: the file is no checkpoint, or one of a session with other options.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        version, options = told["version"], told["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no checkpoint of a session: {error!r}") from error
    if version != VERSION:
        raise ValueError(f"{path} is a checkpoint of version {version}; this is version {VERSION}")
    if options != plan.options():
        differing = [f"--{name} {options[name]}" for name, value in plan.options().items() if options[name] != value]
        raise ValueError(f"{path} is the checkpoint of a session with {', '.join(differing)}; run with that, or anew")
    found = [Found(**{**f, "failure": Failure(**f["failure"])}) for f in told["found"]]
    return Part(0, told["done"], Coverage.from_json(told["coverage"]), found)
