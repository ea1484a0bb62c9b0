from pathlib import Path

import pytest
from typer.testing import CliRunner

from conformance.cli import app
from conformance.drivers.registry import missing
from conformance.page.browser import find_browser
from conformance.schedules import generate, read

runner = CliRunner()


def test_failure_is_small_told_and_drawn(tmp_path: Path) -> None:
    """A seeded fault fails the session: its trace is made small, saved, told with what was due, and drawn."""
    arguments = ["conform", "--traces", "25", "--workers", "1", "--drivers", "fast-eager", "--save", str(tmp_path)]
    done = runner.invoke(app, [*arguments, "--mutant", "plan_same_step_once"])
    assert done.exit_code == 1, done.output
    assert "materialize step 1 for" in done.stdout
    assert "expected r0's 2 (step 1), found zeros" in done.stdout
    file = tmp_path / "fast-eager-1.jsonl"
    small, whole = read(file), generate(1).trace
    assert 0 < len(small.events) < len(whole.events) / 2
    assert f"{len(small.events)} of the trace's {len(whole.events)} events are left" in done.stdout
    assert "rows wrong" in file.with_suffix(".html").read_text(encoding="utf-8")
    again = runner.invoke(
        app,
        ["page", str(file), str(tmp_path / "p.html"), "--driver", "fast-eager", "--mutant", "plan_same_step_once"],
    )
    assert again.exit_code == 0
    assert "materialize" in again.stdout


def test_right_session_reports_coverage(tmp_path: Path) -> None:
    """Without a fault a session on both modes succeeds, and a goal that was not come to fails it only if asked to."""
    checkpoint = str(tmp_path / "checkpoint.json")
    arguments = ["conform", "--traces", "25", "--workers", "1", "--resume", checkpoint]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    for said in ("all 25 traces are right on fast-eager, fast-async", "same-step hit", "interleavings", "known ones"):
        assert said in done.stdout
    strict = runner.invoke(app, [*arguments, "--all-goals"])
    assert strict.exit_code == 1
    assert "no run came to" in strict.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["conform", "--drivers", "nobody"], "no driver is called 'nobody'"),
        (["conform", "--drivers", ","], "names no driver"),
        (
            ["conform", "--drivers", "fast-eager", "--save", "/dev/null/folder"],
            "--save /dev/null/folder cannot be made",
        ),
        (["conform", "--drivers", "fast-eager", "--resume", "/dev/null/file"], "/dev/null/file"),
        (["conform", "--mutant", "nothing"], "no fault of the production package is called 'nothing'"),
        (["conform", "--mutant", "two_writers", "--drivers", "reference"], "leave it out"),
        pytest.param(
            ["conform", "--drivers", "cuda"],
            "the driver cuda cannot run here",
            marks=pytest.mark.skipif(missing("cuda") is None, reason="there is a CUDA device"),
        ),
        (["conform", "--traces", "1000001"], "next --seed"),
        (["page", "no-such-file", "x.html"], "no such file"),
    ],
)
def test_wrong_options_are_told(arguments: list[str], said: str) -> None:
    """An option that cannot be followed is told with what to write instead, before anything runs."""
    done = runner.invoke(app, arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


@pytest.mark.skipif(find_browser() is None, reason="no chromium is installed")
@pytest.mark.timeout(240)
def test_page_is_drawn_into_a_picture(tmp_path: Path) -> None:
    """`page --screenshot` writes the page and a picture of it."""
    png = tmp_path / "page.png"
    done = runner.invoke(
        app, ["page", "seed:2", str(tmp_path / "page.html"), "--driver", "fast-eager", "--screenshot", str(png)]
    )
    assert done.exit_code == 0, done.output
    assert png.read_bytes().startswith(b"\x89PNG")
