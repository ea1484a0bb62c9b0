"""The check of a device, on the simulated one: every line, what it says when rows are wrong, how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conformance.device import Fault
from conformance.device.backends import SimulatedBackend
from conformance.device.check import FULL, PARTS, QUICK, Line, main, run_parts, table_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_figures_and_no_complaint(part: str) -> None:
    """On a device that keeps its promises nothing is wrong, and every value is filled in."""
    lines = run_parts(SimulatedBackend(), QUICK, 60.0, [part])
    assert len(lines) >= 2
    assert {line.part for line in lines} == {part}
    assert [line for line in lines if line.right is False or not line.value] == []


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.name)
def test_rows_that_are_wrong_are_counted(fault: Fault) -> None:
    """A device that breaks a promise hands over wrong rows, and the table says so."""
    lines = {line.what: line for line in run_parts(SimulatedBackend([fault]), QUICK, 60.0, ["rows"])}
    assert lines["wrong"].right is False
    assert int(lines["wrong"].value.replace(",", "")) > 0


def test_a_part_that_raises_is_wrong_and_the_others_go_on() -> None:
    """The error stands in the table."""

    class Broken(SimulatedBackend):
        def host(self, rows: int, width: int) -> torch.Tensor:
            raise MemoryError(f"no {rows} rows of {width}")

    lines = run_parts(Broken(), QUICK, 60.0, ["copies", "engine thread"])
    assert lines[0] == Line("copies", "failed", "MemoryError", lines[0].beside, right=False)
    assert "no " in lines[0].beside
    assert lines[-1].part == "engine thread"
    assert lines[-1].right is None


def test_without_time_parts_are_skipped() -> None:
    """Nothing is started after the limit; the table says what is missing."""
    lines = run_parts(SimulatedBackend(), QUICK, -1.0)
    assert [(line.part, line.what) for line in lines] == [(part, "skipped") for part in PARTS]


def test_the_table_marks_what_is_wrong() -> None:
    """Right and wrong are words, not colours only."""
    table = table_of(SimulatedBackend(), [Line("a", "b", "1", right=True), Line("a", "c", "2", right=False)])
    shown = Console(width=120)
    with shown.capture() as text:
        shown.print(table)
    assert "right" in text.get()
    assert "WRONG" in text.get()
    assert "mean" in text.get()


def test_the_command_prints_and_writes_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One table, the same as JSON, exit status 0."""
    path = tmp_path / "lines.json"
    assert main(["--device", "cpu-simulated", "--part", "rows", "--json", str(path)]) == 0
    assert "compared, bit for bit" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert written["device"] == SimulatedBackend.name
    assert {line["part"] for line in written["lines"]} == {"rows"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a device checks it")
def test_without_a_device_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and the option that works anywhere."""
    assert main([]) == 2
    assert "--device cpu-simulated" in capsys.readouterr().err


def test_the_script_starts_the_command_from_anywhere(tmp_path: Path) -> None:
    """`scripts/device-check --help` works outside the repository's root."""
    script = str(ROOT / "scripts" / "device-check")
    done = subprocess.run(
        [script, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--limit-s" in done.stdout


def test_the_full_check_fits_a_small_gpu() -> None:
    """Pools, pages and the largest plain copy stay below 2 GiB of host memory and 1 GiB of device memory."""
    row = 2 * FULL.width + 8 * 16
    decode = max(FULL.batches) * -(-(FULL.steps + 21) // 16) * 16
    prefill = 2 * FULL.documents * (FULL.tokens + 48)
    assert max(decode, prefill) * row + FULL.limit_bytes < 2 << 30
    assert 3 * FULL.limit_bytes + 2 * 2 * FULL.matrix**2 < 1 << 30
