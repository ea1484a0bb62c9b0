"""A consumer whose disk is full, behind a cache that serves random traces: no row is lost, none is wrong."""

from __future__ import annotations

import errno
import itertools
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from conformance.drivers.kept import KeepingDriver, WarmMemory
from conformance.drivers.rows import decode
from conformance.drivers.subjects import run_events
from conformance.faults.sweep import small_traces
from conformance.schedules.trace import Due, Start, Trace
from omni_prefix_fast import StageCacheOutputs
from omni_prefix_fast.vllm.files import DirectorySink, read_request_file, write_whole
from omni_prefix_fast.vllm.sinks import Delivery, Finished


class Disk:
    """Has no room until it is told that it has."""

    full = True

    def __call__(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """See `WriteFile`."""
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_whole(path, tensors, metadata, fsync=False)


class Consuming(KeepingDriver):
    """Gives all that is handed over to a sink, and notes by position what it has to hold."""

    def __init__(self, trace: Trace, sink: DirectorySink) -> None:
        self.sink = sink
        self.steps = itertools.count()
        self.rows: dict[str, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        super().__init__(trace.header, allocate=WarmMemory())

    def due_of(self, outputs: StageCacheOutputs, expected: Due | None = None) -> Due:
        """See `FastDriver`."""
        due = super().due_of(outputs, expected)
        self.sink.receive(Delivery(next(self.steps), tuple(outputs.spans), outputs))
        for key, column in due.rows.items():
            for req, rows in column.items():
                self.rows[req][key].update(enumerate(rows, due.spans[req][0]))
        return due


TRACES = [
    t for t in itertools.islice(small_traces(0), 30) if any(isinstance(e, Start) and e.admitted for e in t.events)
]


@pytest.mark.parametrize("trace", TRACES[:8], ids=lambda trace: f"seed {trace.header.seed}")
def test_a_full_disk_loses_no_row(trace: Trace, tmp_path: Path) -> None:
    """The sink holds rows that it cannot write; the cache goes on; once there is room each file is whole and right."""
    disk = Disk()
    sink = DirectorySink(tmp_path, write=disk)
    driver = Consuming(trace, sink)
    ran = run_events(trace, driver)
    assert ran.failure is None, ran.failure
    sink.receive(Finished(tuple(driver.rows)))
    assert sink.failures().keys() == driver.rows.keys()
    assert all("No space left" in why for why in sink.failures().values())
    disk.full = False
    assert sink.retry() == {}
    for req, by_key in driver.rows.items():
        stored = read_request_file(sink.path_of(req))
        assert {key for key, rows in by_key.items() if rows} == {key for key, p in stored.positions.items() if len(p)}
        for key, rows in by_key.items():
            found = dict(zip(stored.positions[key].tolist(), decode(driver.keys[key], stored.rows[key]), strict=True))
            assert found == rows, f"{key} of {req}"
