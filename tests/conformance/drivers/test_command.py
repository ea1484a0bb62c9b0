"""The commands: a table and exit code 0 where both agree; the seed, a file and exit code 1 where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from conformance.drivers import command
from conformance.drivers.agree import Compared, Disagreement
from conformance.schedules import generate
from conformance.schedules.trace import Rest

app = typer.Typer()
app.command()(command.agree)
app.command()(command.replay)


def test_agree_reports_what_occurred() -> None:
    """Counts of events, and no disagreement."""
    result = CliRunner().invoke(app, ["agree", "--traces", "3", "--seed", "2"])
    assert result.exit_code == 0, result.output
    assert "seeds 2 to 4" in result.output
    assert "traces with a disagreement" in result.output


def test_disagreement_names_its_seed_and_saves_its_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trace of a seed that disagrees is written, and replays from its file."""
    drawn = generate(7)
    bad = Compared(7, drawn.counts, len(drawn.trace.events), Disagreement(0, Rest(), "made up"))
    monkeypatch.setattr(command, "agree_on_seeds", lambda *_, **__: iter([bad]))
    result = CliRunner().invoke(app, ["agree", "--traces", "1", "--seed", "7", "--save", str(tmp_path)])
    assert result.exit_code == 1
    assert "seed 7, event 0 (rest): made up" in result.output
    (file,) = tmp_path.iterdir()
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 0, result.output
    assert "both agree" in result.output


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    """The line is named."""
    file = tmp_path / "trace.jsonl"
    file.write_text("{}\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 2
    assert "line 1" in result.output
