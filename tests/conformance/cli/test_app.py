"""`conformance.cli`: the command line as a person uses it."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from conformance.cli import app
from conformance.cli.app import FORWARDED, needs

RUNNER = CliRunner()


def test_the_version_is_that_of_the_distribution() -> None:
    """``--version`` prints name and version, and nothing else happens."""
    result = RUNNER.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("omni-prefix-cache ")


def test_help_lists_the_commands() -> None:
    """Without arguments the commands are shown."""
    result = RUNNER.invoke(app, [])
    assert "demo" in result.output


@pytest.mark.parametrize("arguments", [["demo", "--requests", "0"], ["demo", "--seed", "-1"], ["nothing"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    """The usual exit status for wrong usage."""
    assert RUNNER.invoke(app, arguments).exit_code == 2


def test_the_demo_runs_and_too_few_requests_are_a_failure() -> None:
    """A run in which nothing is preempted shows nothing, and says so."""
    result = RUNNER.invoke(app, ["demo", "--requests", "3"])
    assert result.exit_code == 1
    assert "shows nothing about them" in result.output


def test_a_missing_package_is_one_sentence_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever lacks torch or vLLM is told which extra to install, without a traceback."""
    with pytest.raises(typer.Exit), needs("vllm", target="venv-vllm"):
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    message = capsys.readouterr().err
    assert "'vllm'" in message
    assert "make venv-vllm" in message


def test_a_fault_of_our_own_is_not_taken_for_a_missing_package() -> None:
    """A module of this project that is not there is a fault, with its traceback."""
    with pytest.raises(ModuleNotFoundError), needs("conformance"):
        raise ModuleNotFoundError("No module named 'conformance.nothing'", name="conformance.nothing")


@pytest.mark.parametrize("name", [name for name, *_ in FORWARDED])
def test_a_forwarded_command_has_its_own_help(name: str) -> None:
    """The command's part is there, and its options are told by it."""
    result = RUNNER.invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert f"omni-prefix {name}" in result.output


def test_a_forwarded_command_gets_its_arguments() -> None:
    """What stands behind the name reaches the command, and its exit status comes back."""
    result = RUNNER.invoke(app, ["agree", "--traces", "2", "--seed", "1"])
    assert result.exit_code == 0
    assert "2 random traces" in result.output
    assert RUNNER.invoke(app, ["mutants", "no-such-fault"]).exit_code == 2


def test_help_needs_no_torch() -> None:
    """Commands import their own part only when they run."""
    code = "import sys; import conformance.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_demo_without_torch_says_so() -> None:
    """Exit status 2 and one sentence, where torch is not installed."""
    code = "import sys; sys.modules['torch'] = None; from conformance.cli import app; app(['demo'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "needs the package 'torch'" in result.stderr
    assert "Traceback" not in result.stderr
