"""What each thread of a run does, in words: for the errors that end it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from conformance.interleave.tasks import Task

_HERE = str(Path(__file__).parent)
_THREADING = threading.__file__
DEEPEST = 12
"""Frames told of each thread, the innermost ones."""


def told(tasks: Iterable[Task], running: Task) -> str:
    """One paragraph a thread that has not ended, and a line for each that ended with locks in its hands."""
    frames = sys._current_frames()  # noqa: SLF001 - the only way to another thread's stack
    lines: list[str] = []
    for task in tasks:
        holds = f"; holds {', '.join(task.holds)}" if task.holds else ""
        if task.done:
            if holds:
                lines.append(f"thread {task.name!r} has ended{holds}")
            continue
        does = "runs" if task is running and task.waits is None else "can go on"
        if task.waits is not None and not task.ready:
            limit = "" if task.limit is None else f", until {task.limit:g} s"
            does = f"waits for {task.waits.told()}{limit}"
        lines.append(f"thread {task.name!r} {does}{holds}")
        frame = frames.get(task.ident) if task.ident is not None else None
        lines += _stack(frame) if frame is not None else ["    not begun"]
    return "\n".join(lines)


def _stack(frame: FrameType) -> list[str]:
    """The frames of a thread that are not the scheduler's own, outermost first."""
    own = [
        part
        for part in traceback.extract_stack(frame)
        if not part.filename.startswith(_HERE) and part.filename != _THREADING
    ]
    return [f"    {Path(p.filename).name}:{p.lineno} {p.name}: {p.line}" for p in own[-DEEPEST:]]
