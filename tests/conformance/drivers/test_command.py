"""The commands: a table and exit code 0 where both agree; the seed, a file and exit code 1 where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from conformance.drivers import command
from conformance.drivers.agree import Compared, Disagreement
from conformance.drivers.registry import missing, names
from conformance.schedules import generate, read
from conformance.schedules.trace import Due, Materialize, Rest

app = typer.Typer()
app.command()(command.agree)
app.command()(command.replay)
app.command()(command.trace)


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
    result = CliRunner().invoke(app, ["replay", str(file), "--driver", "reference", "--driver", "fast-eager"])
    assert result.exit_code == 0, result.output
    assert result.output.count("every outcome is the one due") == 2


def test_replay_takes_every_driver_that_runs_here() -> None:
    """Left out, it is all of them; one that cannot run here is skipped with the reason, and is no failure."""
    result = CliRunner().invoke(app, ["replay", "seed:5"])
    assert result.exit_code == 0, result.output
    for name in names():
        why = missing(name)
        assert (f"{name}: skipped, {why}" if why else f"{name}: {len(generate(5).trace.events)} of ") in result.output


def test_a_wrong_outcome_is_told_and_is_exit_code_1(tmp_path: Path) -> None:
    """Event, what was due, what was found; the other driver runs nevertheless."""
    trace = generate(5).trace
    at = next(i for i, e in enumerate(trace.events) if isinstance(e, Materialize) and e.due)
    wrong = trace.events[at].model_copy(update={"due": Due(rows={}, spans={"nobody": (0, 1)})})
    file = tmp_path / "wrong.jsonl"
    trace.model_copy(update={"events": [*trace.events[:at], wrong, *trace.events[at + 1 :]]}).write(file)
    result = CliRunner().invoke(app, ["replay", str(file), "--driver", "reference", "--driver", "fast-eager"])
    assert result.exit_code == 1
    assert result.output.count(f"event {at} (materialize): outcome: expected") == 2
    assert "nobody" in result.output


def test_a_seed_is_written_to_a_file_and_replays(tmp_path: Path) -> None:
    """`trace` writes what the generator draws."""
    file = tmp_path / "seven.jsonl"
    result = CliRunner().invoke(app, ["trace", "seed:7", str(file)])
    assert result.exit_code == 0, result.output
    assert read(file) == generate(7).trace


def test_an_interleaving_is_saved_and_replays(tmp_path: Path) -> None:
    """`--save` keeps how the threads ran; the file says so, and its replay is interleaved as saved."""
    file = tmp_path / "interleaved.jsonl"
    result = CliRunner().invoke(app, ["replay", "case:E16-running", "--driver", "fast-async", "--save", str(file)])
    assert result.exit_code == 0, result.output
    saved = read(file)
    assert saved.interleaving is not None
    result = CliRunner().invoke(app, ["replay", str(file), "--driver", "fast-async", "--driver", "reference"])
    assert result.exit_code == 0, result.output
    assert "interleaved as saved" in result.output


@pytest.mark.parametrize(
    ("content", "arguments", "what"),
    [
        (b"{}\n", (), "line 1"),
        (b"\xff\xfe", (), "not a text file"),
        (b"", (), "the trace is empty"),
        (None, (), "no such file"),
        (None, ("seed:x",), "whole number"),
        (None, ("seed:1", "--driver", "quick"), "no driver is called 'quick'"),
        (None, ("case:E999",), "no such case; there are E01"),
        (None, ("fault:sloth",), "'sloth'; there are skip_version_bump"),
        (None, ("seed:1", "--driver", "reference", "--save", "kept.jsonl"), "add --driver fast-async"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(
    content: bytes | None, arguments: tuple[str, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad file, seed or driver: exit code 2 and what is wrong with it, the line where there is one."""
    monkeypatch.setenv("COLUMNS", "400")
    file = tmp_path / "trace.jsonl"
    if content is not None:
        file.write_bytes(content)
    result = CliRunner().invoke(app, ["replay", *(arguments or (str(file),))])
    assert result.exit_code == 2
    assert what in result.output
