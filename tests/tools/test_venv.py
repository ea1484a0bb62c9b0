"""`tools/venv.sh`: what a newcomer is told when the machine lacks something."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "venv.sh"


def _run(tmp_path: Path, python: str, lock: str = "lock.txt") -> subprocess.CompletedProcess[str]:
    (tmp_path / "lock.txt").write_text("nothing==1\n")
    return subprocess.run(
        [str(SCRIPT), str(tmp_path / "env"), str(tmp_path / lock), "a test"],
        env=os.environ | {"PYTHON": python},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    """The message says which command was not found and how to name another."""
    result = _run(tmp_path, "no-such-python")
    assert result.returncode == 1
    assert "'no-such-python' was not found" in result.stderr
    assert "make PYTHON=" in result.stderr


def test_an_old_interpreter_is_refused_with_its_version(tmp_path: Path) -> None:
    """The message says what is needed and what was found; nothing is made."""
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\ncase "$1" in -V) echo Python 3.8.1 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    result = _run(tmp_path, str(old))
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed" in result.stderr
    assert "Python 3.8.1" in result.stderr
    assert not (tmp_path / "env").exists()


def test_a_missing_lock_file_is_named(tmp_path: Path) -> None:
    """Nothing is made for an environment whose packages are not known."""
    result = _run(tmp_path, "python3", lock="absent.txt")
    assert result.returncode == 1
    assert "absent.txt is missing" in result.stderr
    assert not (tmp_path / "env").exists()
