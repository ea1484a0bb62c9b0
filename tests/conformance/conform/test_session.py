import io
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from conformance.conform import checkpoint
from conformance.conform.plan import PER_PART, Maker, Part, Plan
from conformance.conform.report import report
from conformance.conform.session import Budget, Session
from tests.conformance.conform import fakes

TRACES = 3 * PER_PART + 3


def plan_of(make: Maker = fakes.right, seed: int = 0) -> Plan:
    """A plan with two drivers."""
    return Plan(seed, ("one", "two"), make)


def run(plan: Plan, workers: int, path: Path | None = None, tell: Callable[[Part], None] | None = None) -> Session:
    """A session run to its end, or to the interruption."""
    session = Session.begin(plan, path)
    session.run(Budget(TRACES), workers, path, tell)
    return session


def told(session: Session) -> str:
    """Its report."""
    text = io.StringIO()
    report(Console(file=text), session)
    return text.getvalue()


def interrupt_after(traces: int) -> Callable[[Part], None]:
    """Presses Ctrl-C once so many traces are done."""

    def tell(done: Part) -> None:
        if done.last >= traces:
            signal.raise_signal(signal.SIGINT)

    return tell


def test_report_does_not_depend_on_workers() -> None:
    """The same traces give the same report, byte for byte, on one worker and on three."""
    one, three = told(run(plan_of(), 1)), told(run(plan_of(), 3))
    assert one == three
    assert f"{TRACES} traces of seed 0: {TRACES} on one, {TRACES} on two" in one
    assert one != told(run(plan_of(seed=1), 2))


def test_interrupted_session_resumes_exactly(tmp_path: Path) -> None:
    """Ctrl-C ends a session with whole parts and a checkpoint; going on from it gives the report of an unbroken one."""
    path = tmp_path / "checkpoint.json"
    broken = run(plan_of(), 2, path, interrupt_after(PER_PART))
    assert broken.interrupted
    assert broken.done.last == PER_PART
    assert checkpoint.load(path, plan_of()).last == PER_PART
    resumed = run(plan_of(), 2, path)
    assert not resumed.interrupted
    assert told(resumed) == told(run(plan_of(), 1))


def test_finished_session_does_nothing_more(tmp_path: Path) -> None:
    """Going on from a checkpoint whose budget is spent runs no trace."""
    path = tmp_path / "checkpoint.json"
    run(plan_of(), 2, path)
    parts: list[Part] = []
    again = run(plan_of(), 2, path, parts.append)
    assert not parts
    assert again.done.last == TRACES


def test_checkpoint_of_another_session_is_refused(tmp_path: Path) -> None:
    """A checkpoint is taken up with the same seed, drivers and fault only, and what is no checkpoint is told."""
    path = tmp_path / "checkpoint.json"
    checkpoint.save(path, plan_of(), Session.begin(plan_of(), None).done)
    with pytest.raises(ValueError, match="--seed 0"):
        Session.begin(plan_of(seed=3), path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no checkpoint"):
        Session.begin(plan_of(), path)


def test_checkpoint_of_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces that were right before a change say nothing of the code after it."""
    path = tmp_path / "checkpoint.json"
    checkpoint.save(path, plan_of(), Session.begin(plan_of(), None).done)
    assert checkpoint.load(path, plan_of()).last == 0
    monkeypatch.setattr(checkpoint, "digest_of_sources", lambda: "another")
    with pytest.raises(ValueError, match="other sources"):
        checkpoint.load(path, plan_of())


WHOLE = {
    "version": checkpoint.VERSION,
    "options": {},
    "sources": "",
    "done": 1,
    "coverage": {"sections": {}, "orders": {}},
    "found": [],
}
"""A checkpoint of other options."""


@pytest.mark.parametrize(
    "told",
    [
        "[]",
        '{"version": 2}',
        json.dumps(WHOLE | {"sources": None}),
        json.dumps(WHOLE),
        json.dumps(WHOLE | {"done": -1}),
        json.dumps(WHOLE | {"coverage": {"sections": {"a": 1}, "orders": {}}}),
        json.dumps(WHOLE | {"found": [{"n": 1}]}),
    ],
)
def test_damaged_checkpoint_is_told(told: str, tmp_path: Path) -> None:
    """Whatever is wrong in a checkpoint, it is refused by its name."""
    path = tmp_path / "checkpoint.json"
    path.write_text(told, encoding="utf-8")
    with pytest.raises(ValueError, match="checkpoint"):
        checkpoint.load(path, plan_of())


def test_full_disk_costs_the_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a checkpoint cannot be written any more, the session goes on, and tells so at its end."""
    path, written = tmp_path / "checkpoint.json", []

    def save(*_: object) -> None:
        written.append(True)
        if len(written) > 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", save)
    session = run(plan_of(), 1, path)
    assert session.done.last == TRACES
    assert session.unsaved is not None


def test_checkpoint_is_never_half_written(tmp_path: Path) -> None:
    """A checkpoint that cannot be written leaves the one before it whole."""
    path = tmp_path / "checkpoint.json"
    checkpoint.save(path, plan_of(), Session.begin(plan_of(), None).done)
    before = path.read_text()
    broken = Part(0, 5, Session.begin(plan_of(), None).done.coverage, [])
    broken.coverage.sections["odd"]["\ud800"] = 1
    path.with_name(f"{path.name}.new").mkdir()
    with pytest.raises(IsADirectoryError):
        checkpoint.save(path, plan_of(), broken)
    assert path.read_text() == before


def test_minutes_end_a_session() -> None:
    """No part is begun once the time is spent; what was done counts."""
    session = Session.begin(plan_of(), None)
    session.run(Budget(None, 0.0), 1)
    assert session.done.last <= PER_PART


def test_parts_follow_each_other() -> None:
    """A part that is not the next one is refused: coverage would count traces twice, or leave some out."""
    first, later = (Part(a, b, Session.begin(plan_of(), None).done.coverage, []) for a, b in ((0, 5), (6, 9)))
    with pytest.raises(ValueError, match="followed by 5"):
        first.merge(later)


def test_seeds_do_not_overlap() -> None:
    """A seed has a million traces; the trace behind the last would be the next seed's first."""
    assert plan_of(seed=2).trace_seed(5) == 2_000_005
    with pytest.raises(ValueError, match="next --seed"):
        plan_of().trace_seed(1_000_000)
