"""Trace files: read back as written, and refused with a line number where they are not what they claim to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.schedules import generate, parse, read


@given(seed=st.integers(min_value=0, max_value=1 << 40))
@settings(max_examples=20, deadline=None)
def test_a_trace_reads_back_as_written(seed: int) -> None:
    """Lines and records are the same trace."""
    trace = generate(seed).trace
    assert parse(trace.lines()) == trace


def test_a_trace_file_replays_without_its_generator(tmp_path: Path) -> None:
    """What a file holds is the whole trace, its seed included."""
    trace = generate(5).trace
    trace.write(tmp_path / "trace.jsonl")
    found = read(tmp_path / "trace.jsonl")
    assert found == trace
    assert found.header.seed == 5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"version": 3}, 1),
        ({"event": "start"}, 1),
        ({"staging_depth": "2"}, 1),
        ({"colour": "red"}, 1),
        ({"block_size": 0}, 1),
        ({"num_blocks": -1}, 1),
        ({"num_blocks": 10**30}, 1),
        ({"keys": [{"name": "a", "width": 1, "item_bytes": 8}] * 2}, 1),
        ({"keys": [{"name": "a", "width": -1, "item_bytes": 8}]}, 1),
    ],
)
def test_a_header_that_is_not_of_this_version_is_refused(change: dict[str, object], line: int) -> None:
    """Another version, another first event, a wrong type or an unknown field: an error that names the line."""
    first, *rest = generate(1).trace.lines()
    altered = json.dumps(json.loads(first) | change)
    with pytest.raises(ValueError, match=f"line {line} "):
        parse([altered, *rest])


def test_broken_lines_are_named() -> None:
    """A line that is no event, a second header and an empty file are refused."""
    first, second, *rest = generate(1).trace.lines()
    with pytest.raises(ValueError, match="line 2 "):
        parse([first, second[:-2], *rest])
    with pytest.raises(ValueError, match="line 2 "):
        parse([first, first, *rest])
    with pytest.raises(ValueError, match="line 1 "):
        parse([second, *rest])
    with pytest.raises(ValueError, match="empty"):
        parse([])
