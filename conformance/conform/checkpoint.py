"""How far a session came, in a file that is always whole: written beside, then moved into place."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from conformance.conform.coverage import Coverage
from conformance.conform.plan import Found, Part, Plan

VERSION = 2
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("omni_prefix_fast", "omni_prefix_ref", "conformance")


@cache
def digest_of_sources() -> str:
    """What the traces ran on: a trace that was right with other code says nothing of this one."""
    digest = hashlib.sha256()
    for path in sorted(path for package in SOURCES for path in (ROOT / package).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def save(path: Path, plan: Plan, part: Part) -> None:
    """Write what the session has done so far."""
    told = {
        "version": VERSION,
        "options": plan.options(),
        "sources": digest_of_sources(),
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
        ValueError: the file is no checkpoint, or one of a session with other options or of other code.
    """
    try:
        told = _Told.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0][:200]
        raise ValueError(f"{path} is no checkpoint of a session ({first}); name another file, or remove it") from error
    if told.version != VERSION:
        raise ValueError(f"{path} is a checkpoint of version {told.version}; this is version {VERSION}")
    due = plan.options()
    if told.options != due:
        differing = [f"--{name} {told.options.get(name)}" for name in due if told.options.get(name) != due[name]]
        raise ValueError(f"{path} is the checkpoint of a session with {', '.join(differing)}; run with that, or anew")
    if told.sources != digest_of_sources():
        raise ValueError(f"{path} is the checkpoint of a session that ran on other sources; remove it, and run anew")
    return Part(0, told.done, Coverage.from_json(told.coverage.model_dump()), told.found)


class _Orders(BaseModel):
    hashes: list[int]
    full: bool


class _Coverage(BaseModel):
    sections: dict[str, dict[str, int]]
    orders: dict[str, _Orders]


class _Told(BaseModel):
    """What a checkpoint holds, so that anything else is refused as a whole."""

    version: int
    options: dict[str, Any]
    sources: str
    done: int = Field(ge=0)
    coverage: _Coverage
    found: list[Found]
