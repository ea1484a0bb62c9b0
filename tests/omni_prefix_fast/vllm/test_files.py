"""The directory sink: names that are never paths, files that are whole or not there, rows merged by position."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from omni_prefix_fast.types import HIDDEN_KEY, StageCacheOutputs
from omni_prefix_fast.vllm.files import (
    SUFFIX,
    UNFINISHED_SUFFIX,
    DirectorySink,
    _Rows,
    file_name,
    read_request_file,
    request_id_of,
    write_whole,
)
from omni_prefix_fast.vllm.sinks import Delivery, Finished


def rows(start: int, end: int, base: float = 0.0) -> torch.Tensor:
    """Rows `(end - start, 2)` that tell their position."""
    return torch.stack([torch.arange(start, end) + base, torch.arange(start, end) * 10.0], dim=1)


def delivery(step: int, spans: dict[str, tuple[int, int]], *, base: float = 0.0, **mm: Any) -> Delivery:
    """A step's rows, hidden states from `rows`; `mm` is `key=({req: payload}, {req: span} or None)`."""
    return Delivery(
        step,
        tuple(spans),
        StageCacheOutputs(
            hidden_states={r: rows(*span, base=base) for r, span in spans.items()},
            mm_outputs={key: payloads for key, (payloads, _) in mm.items()},
            spans=spans,
            mm_spans={key: of for key, (_, of) in mm.items() if of is not None},
        ),
    )


# -------------------------------------------------------------------------------------------------------------- names

AWKWARD = (
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "../../x",
    "a/b",
    "a\\b",
    "a\0b",
    "~",
    "-rf",
    "con",
    "CON",
    "con.safetensors",
    "ÿ漢字🙂",
    "e\u0301",
    "\u00e9",
    "\ud800",
    " ",
    "\n",
    "%41",
    "A",
    "a",
    "%",
    "%~",
    "x" * 5000,
    "ÿ" * 5000,
    "x" * 4999 + "y",
)


@pytest.mark.parametrize("req_id", AWKWARD, ids=range(len(AWKWARD)))
def test_an_awkward_id_makes_a_plain_name_in_the_directory(req_id: str, tmp_path: Path) -> None:
    """Whatever a client chooses, its file lies in the directory, under a name of plain characters, and reads back."""
    sink = DirectorySink(tmp_path / "rows")
    sink.receive(delivery(0, {req_id: (0, 2)}))
    sink.receive(Finished((req_id,)))
    (path,) = list((tmp_path / "rows").iterdir())
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]
    assert path == sink.path_of(req_id)
    assert len(path.name) <= 200
    assert path.name.isascii()
    assert path.name == path.name.lower()
    assert request_id_of(path.name) in {req_id, None}
    assert read_request_file(path).req_id == req_id


@given(st.lists(st.text(st.characters()), unique=True, min_size=2, max_size=8))
def test_no_two_ids_share_a_name(req_ids: list[str]) -> None:
    """Names differ wherever ids do, also where the file system ignores case; each leads back to its id."""
    names = [file_name(r) for r in req_ids]
    assert len({name.lower() for name in names}) == len(req_ids)
    assert [request_id_of(name) for name in names if len(name) < 180] == [
        r for r, name in zip(req_ids, names, strict=True) if len(name) < 180
    ]


# --------------------------------------------------------------------------------------------------------------- rows


def test_a_request_comes_back_as_it_was_handed_over(tmp_path: Path) -> None:
    """Hidden rows, per-token keys of any type and rank with positions, and per-request values of every kind."""
    sink = DirectorySink(tmp_path)
    codes = torch.arange(2 * 2 * 3, dtype=torch.int16).reshape(2, 2, 3)
    half = torch.tensor([[1.5], [2.5], [3.5]], dtype=torch.bfloat16)
    value = {"ref": torch.ones(3, 2), "list": [torch.zeros(1), "text", 7, None], "flag": True}
    sink.receive(
        delivery(
            0,
            {"r": (0, 2)},
            codes=({"r": codes}, {"r": (0, 2)}),
            half=({"r": half}, {"r": (0, 3)}),
            meta=({"r": value}, None),
            other=({"r": object()}, None),
        )
    )
    sink.receive(delivery(1, {"r": (2, 3)}))
    sink.receive(Finished(("r",)))
    stored = read_request_file(sink.path_of("r"))
    assert (stored.req_id, stored.finished) == ("r", True)
    assert torch.equal(stored.rows[HIDDEN_KEY], rows(0, 3))
    assert stored.positions[HIDDEN_KEY].tolist() == [0, 1, 2]
    assert torch.equal(stored.rows["codes"], codes)
    assert torch.equal(stored.rows["half"], half)
    assert stored.positions["half"].tolist() == [0, 1, 2]
    assert torch.equal(stored.values["meta"]["ref"], torch.ones(3, 2))
    assert torch.equal(stored.values["meta"]["list"][0], torch.zeros(1))
    assert stored.values["meta"]["list"][1:] == ["text", 7, None]
    assert stored.values["meta"]["flag"] is True
    assert stored.values["other"] is None


def test_rows_handed_over_again_are_merged_by_position(tmp_path: Path) -> None:
    """A resumed request delivers some positions twice and some out of order: one row each, the later one."""
    sink = DirectorySink(tmp_path)
    for step, (span, base) in enumerate((((0, 4), 0.0), ((2, 5), 100.0), ((8, 10), 0.0), ((3, 4), 200.0))):
        sink.receive(delivery(step, {"r": span}, base=base))
    sink.receive(Finished(("r",)))
    stored = read_request_file(sink.path_of("r"))
    assert stored.positions[HIDDEN_KEY].tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert stored.rows[HIDDEN_KEY][:, 0].tolist() == [0.0, 1.0, 102.0, 203.0, 104.0, 8.0, 9.0]


def test_requests_of_one_step_go_to_their_own_files(tmp_path: Path) -> None:
    """Only what was handed over for a request is in its file, and one that never got a row has none."""
    sink = DirectorySink(tmp_path)
    sink.receive(delivery(0, {"a": (0, 2), "b": (4, 6)}))
    sink.receive(Finished(("b", "never-seen", "a")))
    assert read_request_file(sink.path_of("b")).positions[HIDDEN_KEY].tolist() == [4, 5]
    assert sink.written == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_an_id_used_again_has_the_newer_rows(tmp_path: Path) -> None:
    """The second request of an id replaces the file of the first, and does not mix with it."""
    sink = DirectorySink(tmp_path)
    for base, end in ((0.0, 4), (500.0, 2)):
        sink.receive(delivery(0, {"r": (0, end)}, base=base))
        sink.receive(Finished(("r",)))
    assert torch.equal(read_request_file(sink.path_of("r")).rows[HIDDEN_KEY], rows(0, 2, base=500.0))


def test_unfinished_requests_are_kept_apart_at_shutdown(tmp_path: Path) -> None:
    """Their files have another suffix and say so: nobody takes them for whole ones."""
    sink = DirectorySink(tmp_path)
    sink.receive(delivery(0, {"done": (0, 2), "running": (0, 2)}))
    sink.receive(Finished(("done",)))
    sink.close()
    sink.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"req-done{SUFFIX}", f"req-running{UNFINISHED_SUFFIX}"]
    assert not read_request_file(tmp_path / f"req-running{UNFINISHED_SUFFIX}").finished


def test_a_foreign_file_is_told_apart(tmp_path: Path) -> None:
    """A safetensors file that the sink did not write is refused by name."""
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="no file of a DirectorySink"):
        read_request_file(tmp_path / "x.safetensors")


# ---------------------------------------------------------------------------------------------------- failing writes


class FullDisk:
    """Writes files, except for requests whose name is on the list: there the disk is full."""

    def __init__(self, *full_for: str) -> None:
        self.full_for = set(full_for)

    def __call__(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        if request_id_of(path.name) in self.full_for:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_whole(path, tensors, metadata, fsync=False)


def test_a_full_disk_on_one_request_loses_no_other(tmp_path: Path) -> None:
    """The others are written, the failure is reported, and once there is room the file is there after all."""
    disk = FullDisk("b")
    sink = DirectorySink(tmp_path, write=disk)
    sink.receive(delivery(0, {"a": (0, 2), "b": (0, 2), "c": (0, 2)}))
    sink.receive(Finished(("a", "b", "c")))
    assert list(sink.failures()) == ["b"]
    assert "No space left" in sink.failures()["b"]
    assert not sink.path_of("b").exists()
    assert list(sink.retry()) == ["b"]
    disk.full_for.clear()
    assert sink.retry() == {}
    assert [torch.equal(read_request_file(sink.path_of(r)).rows[HIDDEN_KEY], rows(0, 2)) for r in "abc"] == [True] * 3


def test_failed_files_are_tried_again_after_the_next_success_and_at_shutdown(tmp_path: Path) -> None:
    """Nobody has to ask for it."""
    disk = FullDisk("a", "b")
    sink = DirectorySink(tmp_path, write=disk)
    sink.receive(delivery(0, {"a": (0, 1), "b": (0, 1), "c": (0, 1)}))
    sink.receive(Finished(("a", "b")))
    disk.full_for = {"b"}
    sink.receive(Finished(("c",)))
    assert list(sink.failures()) == ["b"]
    disk.full_for.clear()
    sink.close()
    assert sink.failures() == {}
    assert sink.written == 3


def test_a_failed_request_whose_id_is_used_again_does_not_overwrite_the_newer_one(tmp_path: Path) -> None:
    """The newer request has the name."""
    disk = FullDisk("r")
    sink = DirectorySink(tmp_path, write=disk)
    sink.receive(delivery(0, {"r": (0, 3)}))
    sink.receive(Finished(("r",)))
    disk.full_for.clear()
    sink.receive(delivery(1, {"r": (0, 2)}, base=50.0))
    sink.receive(Finished(("r",)))
    sink.close()
    assert torch.equal(read_request_file(sink.path_of("r")).rows[HIDDEN_KEY], rows(0, 2, base=50.0))


def test_rows_that_do_not_fit_together_are_reported_and_harm_no_other(tmp_path: Path) -> None:
    """A key whose width changed within a request cannot be stored; the others are."""
    sink = DirectorySink(tmp_path)
    sink.receive(delivery(0, {"a": (0, 1), "b": (0, 1)}, k=({"a": torch.ones(1, 2)}, {"a": (0, 1)})))
    sink.receive(delivery(1, {"a": (1, 2)}, k=({"a": torch.ones(1, 3)}, {"a": (1, 2)})))
    sink.receive(Finished(("a", "b")))
    assert list(sink.failures()) == ["a"]
    assert sink.path_of("b").exists()


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 8 KiB: a disk that fills up in the middle of a file.

    Within a test only: between its end and a fixture's, pytest writes to a report that may be such a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_cut_short_leaves_no_trace(tmp_path: Path) -> None:
    """The operating system refuses in the middle of a write: no part of a file stays, under any name."""
    sink = DirectorySink(tmp_path)
    sink.receive(delivery(0, {"big": (0, 5000), "small": (0, 2)}))
    with small_files():
        sink.receive(Finished(("big", "small")))
    assert list(sink.failures()) == ["big"]
    assert [p.name for p in tmp_path.iterdir()] == [sink.path_of("small").name]


def test_the_file_that_was_there_stays_when_its_successor_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing sync, the last moment before the rename, leaves the older file as it was."""
    path = tmp_path / "req-r.safetensors"
    write_whole(path, {"x": torch.zeros(2)}, {"v": "1"})
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "sync failed")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="sync failed"):
        write_whole(path, {"x": torch.ones(2)}, {"v": "2"})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


class FailsOnce:
    """Writes files, except that the first attempt at a request's file raises `error`."""

    def __init__(self, req_id: str, error: BaseException) -> None:
        self.req_id, self.error = req_id, error
        self.left = 1

    def __call__(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        if self.left and request_id_of(path.name) == self.req_id:
            self.left -= 1
            raise self.error
        write_whole(path, tensors, metadata, fsync=False)


@pytest.mark.parametrize(
    "error",
    (
        MemoryError("none"),
        KeyError("k"),
        OverflowError("o"),
        AttributeError("a"),
        RecursionError("r"),
        OSError(5, "io"),
    ),
    ids=lambda error: type(error).__name__,
)
def test_no_kind_of_exception_loses_a_request(error: Exception, tmp_path: Path) -> None:
    """Whatever writing raises: the request is reported, the others are written, and it is written later."""
    sink = DirectorySink(tmp_path, write=FailsOnce("a", error))
    sink.receive(delivery(0, {"a": (0, 3), "b": (0, 3)}))
    sink.receive(Finished(("a",)))
    assert type(error).__name__ in sink.failures()["a"]
    sink.receive(Finished(("b",)))
    assert sink.failures() == {}
    assert [torch.equal(read_request_file(sink.path_of(r)).rows[HIDDEN_KEY], rows(0, 3)) for r in "ab"] == [True] * 2


def test_no_kind_of_exception_at_shutdown_loses_another_request(tmp_path: Path) -> None:
    """One request that cannot be written leaves every other one's file in place, and is reported."""
    sink = DirectorySink(tmp_path, write=FullDisk("gone"))
    sink.receive(
        delivery(0, {"odd": (0, 2), "gone": (0, 2), "good": (0, 2)}, k=({"odd": torch.ones(1)}, {"odd": (0, 1)}))
    )
    sink.receive(delivery(1, {"odd": (2, 3)}, k=({"odd": torch.ones(1, 3)}, {"odd": (1, 2)})))
    sink.close()
    assert [p.name for p in tmp_path.iterdir()] == [f"req-good{UNFINISHED_SUFFIX}"]
    assert sorted(sink.failures()) == ["gone", "odd"]


@pytest.mark.parametrize("at_close", (False, True))
def test_an_interrupt_is_passed_on_and_loses_nothing(at_close: bool, tmp_path: Path) -> None:
    """It is no failure of a file, so it propagates; the same call then does what was left to do."""
    sink = DirectorySink(tmp_path, write=FailsOnce("a", KeyboardInterrupt()))
    sink.receive(delivery(0, {"a": (0, 3), "b": (0, 3)}))
    attempt = sink.close if at_close else lambda: sink.receive(Finished(("a", "b")))
    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert "a" in sink.failures()
    attempt()
    assert sink.failures() == {}
    suffix = UNFINISHED_SUFFIX if at_close else SUFFIX
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"req-a{suffix}", f"req-b{suffix}"]


def test_a_finished_and_a_running_request_of_one_id_are_both_kept(tmp_path: Path) -> None:
    """The disk is full for both at shutdown: both are reported, and both files are there once it is not."""
    disk = FullDisk("r")
    sink = DirectorySink(tmp_path, write=disk)
    sink.receive(delivery(0, {"r": (0, 3)}))
    sink.receive(Finished(("r",)))
    sink.receive(delivery(1, {"r": (0, 5)}, base=50.0))
    sink.close()
    assert sink.failures()["r"].count("No space left") == 2
    disk.full_for.clear()
    assert sink.retry() == {}
    assert torch.equal(read_request_file(sink.path_of("r")).rows[HIDDEN_KEY], rows(0, 3))
    unfinished = read_request_file(tmp_path / f"req-r{UNFINISHED_SUFFIX}")
    assert torch.equal(unfinished.rows[HIDDEN_KEY], rows(0, 5, base=50.0))


def test_two_finished_requests_of_one_id_leave_the_newer_ones_file(tmp_path: Path) -> None:
    """Neither could be written at first; whichever way they are tried again, the newer one has the name."""
    disk = FullDisk("r")
    sink = DirectorySink(tmp_path, write=disk)
    for base in (0.0, 50.0):
        sink.receive(delivery(0, {"r": (0, 3)}, base=base))
        sink.receive(Finished(("r",)))
    disk.full_for.clear()
    assert sink.retry() == {}
    assert torch.equal(read_request_file(sink.path_of("r")).rows[HIDDEN_KEY], rows(0, 3, base=50.0))


@pytest.mark.parametrize("dtype", (torch.complex64, torch.complex128), ids=str)
def test_complex_rows_and_values_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Safetensors has no complex128; such rows are stored as pairs of reals and read back as what they were."""
    sink = DirectorySink(tmp_path)
    waves = torch.complex(rows(0, 3), -rows(0, 3)).to(dtype)
    sink.receive(delivery(0, {"r": (0, 3)}, waves=({"r": waves}, {"r": (0, 3)}), value=({"r": [waves[0]]}, None)))
    sink.receive(Finished(("r",)))
    assert sink.failures() == {}
    stored = read_request_file(sink.path_of("r"))
    assert stored.rows["waves"].dtype == stored.values["value"][0].dtype == dtype
    assert torch.equal(stored.rows["waves"], waves)
    assert torch.equal(stored.values["value"][0], waves[0])


def test_a_gap_between_positions_costs_nothing(tmp_path: Path) -> None:
    """Rows at positions 0 and 2^40 are two rows, in memory as in the file."""
    sink = DirectorySink(tmp_path)
    for step, start in enumerate((2**40, 0)):
        keyed = torch.full((1, 1), float(step))
        sink.receive(delivery(step, {"r": (0, 1)}, k=({"r": keyed}, {"r": (start, start + 1)})))
    sink.receive(Finished(("r",)))
    stored = read_request_file(sink.path_of("r"))
    assert stored.positions["k"].tolist() == [0, 2**40]
    assert stored.rows["k"].flatten().tolist() == [1.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=8))
def test_merging_is_that_of_a_dictionary(spans: list[tuple[int, int]]) -> None:
    """For any overlaps and gaps: rising positions, of each the row that came last."""
    gathered, expected = _Rows(), {}
    for i, (start, length) in enumerate(spans):
        gathered.add(start, torch.arange(length) + 100 * i)
        expected.update({start + k: 100 * i + k for k in range(length)})
    merged, positions = gathered.assemble()
    assert positions.tolist() == sorted(expected)
    assert merged.tolist() == [expected[p] for p in sorted(expected)]


def test_a_running_request_holds_no_memory_of_others(tmp_path: Path) -> None:
    """What is handed over may be a view of a whole step's tensor; what is kept, values included, is not."""
    sink = DirectorySink(tmp_path)
    whole = torch.zeros(1000, 2)
    tracker = weakref.ref(whole.untyped_storage())
    value = {"list": [whole[1:2]]}
    sink.receive(delivery(0, {"r": (0, 1)}, k=({"r": whole[:1]}, {"r": (0, 1)}), v=({"r": value}, None)))
    del whole, value
    gc.collect()
    assert tracker() is None
    sink.receive(Finished(("r",)))
    assert read_request_file(sink.path_of("r")).values["v"]["list"][0].shape == (1, 2)


def test_a_value_that_contains_itself_is_reported_and_harms_no_other(tmp_path: Path) -> None:
    """It has no end that a file could hold; its request is kept, and the others are written."""
    sink = DirectorySink(tmp_path)
    value: dict[str, Any] = {}
    value["itself"] = value
    sink.receive(delivery(0, {"a": (0, 1), "b": (0, 1)}, v=({"a": value}, None)))
    sink.receive(Finished(("a", "b")))
    assert list(sink.failures()) == ["a"]
    assert sink.path_of("b").exists()
