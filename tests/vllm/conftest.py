"""The real engine: one process for the V1 model runner, and one beside it for V2.

The V2 runner's kernels are interpreted on a CPU, and whether they are is decided when vLLM is imported. So its
workloads run in a process of their own, which is started first and read at the end: both take about as long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.vllm.environment import prepare
from conformance.vllm.run import Comparison
from conformance.vllm.workloads import V2_NAMES

HERE = Path(__file__).parent
START_AND_RUN_S = 240
"""Seconds that a test may take which starts an engine, the first of which imports vLLM."""

prepare("v1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is here, give it time, and let vLLM's and torch's own warnings be."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(START_AND_RUN_S))


@pytest.fixture(scope="session")
def comparison() -> Iterator[Comparison]:
    """Runs workloads on the V1 model runner."""
    with Comparison("v1") as compared:
        yield compared


class V2Process:
    """The workloads of the V2 model runner, in a process of their own. Reports arrive one by one."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "conformance.vllm", "v2", "--json", *V2_NAMES]
        self._errors = (HERE.parents[1] / ".scratch" / "v2-runner.log").absolute()
        self._errors.parent.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("w"),
            cwd=HERE.parents[1],
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            text=True,
        )
        self._reports: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="v2-reports", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                with self._changed:
                    report = json.loads(line)
                    self._reports[report["name"]] = report
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def report(self, name: str, timeout_s: float) -> dict[str, Any]:
        """The report of a workload; waits for it, up to `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._reports or self._ended, timeout_s)
            if name in self._reports:
                return self._reports[name]
        log = self._errors.read_text(encoding="utf-8", errors="replace").splitlines()
        raise AssertionError(f"no report of {name} from the V2 process:\n" + "\n".join(log[-40:]))

    def close(self) -> None:
        """End the process, which has ended by itself if every report was read."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)
        self._reader.join(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="session")
def v2_process(request: pytest.FixtureRequest) -> Iterator[V2Process | None]:
    """The V2 process, if a test of it was selected. `comparison`'s tests ask for it first, so that both run at once."""
    wanted = any("v2_process" in getattr(item, "fixturenames", ()) for item in request.session.items)
    process = V2Process() if wanted else None
    yield process
    if process is not None:
        process.close()


@pytest.fixture(scope="session", autouse=True)
def _v2_runs_beside(v2_process: V2Process | None) -> None:
    """Start it with the first test here."""
