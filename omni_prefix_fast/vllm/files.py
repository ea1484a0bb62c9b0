"""A directory of safetensors files, one a request.

What a file holds, for a request with id `r`:

- `rows/KEY`: the rows of one per-token key, `(n, *feature)`, the key `__hidden_states__` for hidden states;
- `positions/KEY`: their absolute token positions, int64 `(n,)`, rising;
- `values/N`: tensors inside per-request values;
- metadata `omni_prefix`: JSON with the format's number, the request id, whether the request finished, where in the
  per-request values each tensor belongs, and under `complex` the names of tensors of a complex type that safetensors
  does not have (complex128, complex32): those are stored as pairs of reals, in a last dimension of two.

Guarantees:

- A file is there whole or not at all: it is written under another name, synced, and renamed. Another process that
  lists the directory never sees a part of one.
- A request id comes from a client and is never a path: every byte but `a-z 0-9 - _` is escaped, the escape is
  reversible, and no two ids share a name, not even where case does not count.
- A file that cannot be written loses nothing, whatever the exception: its request keeps its rows in memory, is
  reported by `failures()` and the log, and is tried again after the next success, by `retry()` and by `close()`. Other
  requests are unaffected, another one of the same id included. What is no `Exception` (an interrupt) is passed on;
  the request that it struck counts as failed.
- Rows handed over twice (a request resumed after preemption) are merged by position; the later ones count.
- Memory is that of the rows that were handed over: no gap between positions and no other request's rows are held.

Threads: `receive` and `close` come from one thread at a time, `failures` and `retry` from any; one lock covers all,
held while a file is written. Nothing here imports vLLM.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from omni_prefix_fast.types import HIDDEN_KEY, Key, ReqId
from omni_prefix_fast.vllm.sinks import Delivery, Finished, Message

SUFFIX = ".safetensors"
UNFINISHED_SUFFIX = ".safetensors.unfinished"
"""Of the files of requests that were still running when the engine shut down."""

METADATA_KEY = "omni_prefix"
FORMAT = 1

_PREFIX = "req-"
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
_LONGEST = 180
_HASHED = "%~"
_STORED_AS_PAIRS = frozenset((torch.complex32, torch.complex128))
_log = logging.getLogger(__name__)


# -------------------------------------------------------------------------------------------------------- file names


def file_name(req_id: ReqId) -> str:
    """The name, without a directory, of the file of a request. Plain ASCII, at most 200 characters."""
    escaped = "".join(chr(b) if b in _PLAIN else f"%{b:02x}" for b in req_id.encode("utf-8", "surrogatepass"))
    if len(escaped) > _LONGEST:
        digest = hashlib.sha256(req_id.encode("utf-8", "surrogatepass")).hexdigest()
        escaped = f"{escaped[:100]}{_HASHED}{digest}"
    return f"{_PREFIX}{escaped}{SUFFIX}"


def request_id_of(name: str) -> ReqId | None:
    """The request id behind a file name, or None where only the file's metadata tells (a very long id)."""
    escaped = name.removeprefix(_PREFIX).removesuffix(UNFINISHED_SUFFIX).removesuffix(SUFFIX)
    if _HASHED in escaped:
        return None
    raw = bytearray()
    i = 0
    while i < len(escaped):
        if escaped[i] == "%":
            raw.append(int(escaped[i + 1 : i + 3], 16))
            i += 3
        else:
            raw.append(ord(escaped[i]))
            i += 1
    return raw.decode("utf-8", "surrogatepass")


# ---------------------------------------------------------------------------------------- rows gathered for a request


@dataclass(slots=True)
class _Rows:
    """Rows of one key, in the order in which they came, each piece with its first position."""

    pieces: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def add(self, start: int, rows: torch.Tensor) -> None:
        if rows.shape[0]:
            self.pieces.append((start, rows))

    def assemble(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows in rising order of position, and the positions. Where pieces overlap the later one counts."""
        if not self.pieces:
            return torch.empty(0), torch.empty(0, dtype=torch.int64)
        positions = np.concatenate([np.arange(start, start + len(rows)) for start, rows in self.pieces])
        # Of equal positions `unique` names the first, so the order is reversed to get the last one.
        there, at = np.unique(positions[::-1], return_index=True)
        stacked = torch.cat([rows for _, rows in self.pieces])
        return stacked[torch.from_numpy(len(positions) - 1 - at)].contiguous(), torch.from_numpy(there)


@dataclass(slots=True)
class _Request:
    rows: dict[Key, _Rows] = field(default_factory=dict)
    values: dict[Key, Any] = field(default_factory=dict)
    finished: bool = False

    def take(self, req_id: ReqId, delivery: Delivery) -> None:
        outputs = delivery.outputs
        if outputs.hidden_states is not None and req_id in outputs.hidden_states:
            self._add(HIDDEN_KEY, outputs.spans[req_id][0], outputs.hidden_states[req_id])
        for key, payloads in outputs.mm_outputs.items():
            if req_id not in payloads:
                continue
            spans = outputs.mm_spans.get(key, {})
            if req_id in spans:
                self._add(key, spans[req_id][0], payloads[req_id])
            else:
                self.values[key] = _own(payloads[req_id])

    def _add(self, key: Key, start: int, rows: torch.Tensor) -> None:
        self.rows.setdefault(key, _Rows()).add(start, rows.detach().clone())


def _own(value: Any) -> Any:
    """A value whose tensors share no memory with what was handed over: that may be the whole step's."""
    try:
        return _copied(value)
    except RecursionError:  # a value inside itself; writing it fails, and says so
        return value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value


# ------------------------------------------------------------------------------------------------ the file's contents


def _pack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Describe a per-request value in JSON, moving its tensors into `tensors`."""
    if isinstance(value, torch.Tensor):
        name = f"values/{len(tensors)}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, list | tuple):
        return {"list": [_pack(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[str(name), _pack(item, tensors)] for name, item in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    return {"omitted": type(value).__name__}


def _unpack(described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    if "tensor" in described:
        return tensors[described["tensor"]]
    if "list" in described:
        return [_unpack(item, tensors) for item in described["list"]]
    if "dict" in described:
        return {name: _unpack(item, tensors) for name, item in described["dict"]}
    return described.get("plain")


def _contents(req_id: ReqId, request: _Request) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors: dict[str, torch.Tensor] = {}
    values = {key: _pack(value, tensors) for key, value in request.values.items()}
    for key, rows in request.rows.items():
        tensors[f"rows/{key}"], tensors[f"positions/{key}"] = rows.assemble()
    paired = [name for name, tensor in tensors.items() if tensor.dtype in _STORED_AS_PAIRS]
    for name in paired:
        tensors[name] = torch.view_as_real(tensors[name])
    described = {
        "format": FORMAT,
        "request_id": req_id,
        "finished": request.finished,
        "values": values,
        "complex": paired,
    }
    return tensors, {METADATA_KEY: json.dumps(described, allow_nan=True)}


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """One file, read back.

    Attributes:
        req_id: the request's id, as the engine knew it.
        finished: False for a request that was still running when the engine shut down.
        rows: `{key: (n, *feature)}`; hidden states under `HIDDEN_KEY`.
        positions: `{key: int64 (n,)}`, the absolute token positions of these rows, rising.
        values: per-request values; what safetensors and JSON cannot hold is None.
    """

    req_id: ReqId
    finished: bool
    rows: Mapping[Key, torch.Tensor]
    positions: Mapping[Key, torch.Tensor]
    values: Mapping[Key, Any]


def read_request_file(path: Path) -> StoredRequest:
    """Read a file of a `DirectorySink`. Raises `ValueError` for a safetensors file that is none."""
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
        if METADATA_KEY not in metadata:
            raise ValueError(f"{path} is no file of a DirectorySink: it has no {METADATA_KEY!r} metadata")
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    described = json.loads(metadata[METADATA_KEY])
    for name in described.get("complex", ()):
        tensors[name] = torch.view_as_complex(tensors[name])
    by_kind: dict[str, dict[Key, torch.Tensor]] = {"rows": {}, "positions": {}, "values": {}}
    for name, tensor in tensors.items():
        kind, _, key = name.partition("/")
        by_kind[kind][key] = tensor
    return StoredRequest(
        req_id=described["request_id"],
        finished=described["finished"],
        rows=by_kind["rows"],
        positions=by_kind["positions"],
        values={key: _unpack(value, tensors) for key, value in described["values"].items()},
    )


class WriteFile(Protocol):
    """Puts a file in place, whole or not at all."""

    def __call__(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write `path`. Raises any exception and leaves no trace if it cannot."""
        ...


def write_whole(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, fsync: bool = True
) -> None:
    """Write a safetensors file under another name, sync it, and rename it to `path`.

    Raises:
        OSError: the file could not be written; `path` is as it was before. So it is after any other exception.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-", suffix=".tmp")
    try:
        save_file(dict(tensors), name, dict(metadata))
        if fsync:
            _sync(Path(name))
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    if fsync:
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until what was written under `path`, a file or a directory, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --------------------------------------------------------------------------------------------------------- the sink


@dataclass(slots=True)
class _Pending:
    """A request whose file is not there yet, and why. Its place in the list tells it from others of the same id."""

    req_id: ReqId
    request: _Request
    path: Path
    reason: str = "writing it was interrupted"


class DirectorySink:
    """Writes one file for each finished request. See the module for what it guarantees."""

    def __init__(self, directory: Path, *, fsync: bool = True, write: WriteFile | None = None) -> None:
        """Make the directory. `write` replaces the way in which a file is put in place."""
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write: Callable[..., None] = write or (lambda p, t, m: write_whole(p, t, m, fsync=fsync))
        self._lock = threading.Lock()
        self._open: dict[ReqId, _Request] = {}
        self._failed: list[_Pending] = []  # oldest first
        self._written = 0

    @property
    def written(self) -> int:
        """Files put in place so far."""
        return self._written

    def path_of(self, req_id: ReqId) -> Path:
        """Where the file of a finished request is, or will be."""
        return self.directory / file_name(req_id)

    def failures(self) -> dict[ReqId, str]:
        """Requests whose file could not be written yet, and why: all reasons, where several have the same id."""
        with self._lock:
            reasons: dict[ReqId, str] = {}
            for one in self._failed:
                before = reasons.get(one.req_id)
                reasons[one.req_id] = one.reason if before is None else f"{before}; {one.reason}"
            return reasons

    def retry(self) -> dict[ReqId, str]:
        """Try the failed files again. Returns what still fails, as `failures()` does."""
        with self._lock:
            self._retry()
        return self.failures()

    def receive(self, message: Message) -> None:
        """See `Sink`. Never raises for a file that cannot be written; see `failures()`."""
        with self._lock:
            if isinstance(message, Finished):
                for req_id in message.req_ids:
                    self._finish(req_id)
            else:
                for req_id in message.req_ids:
                    self._open.setdefault(req_id, _Request()).take(req_id, message)

    def close(self) -> None:
        """Try the failed files once more, and write the rows of requests that never finished under their own suffix."""
        with self._lock:
            for req_id in list(self._open):
                self._wait_for_its_file(req_id)
            self._retry()
            if self._failed:
                names = sorted(one.path.name for one in self._failed)
                _log.error("rows of %d requests were never written: %s", len(names), names)

    def _finish(self, req_id: ReqId) -> None:
        if req_id in self._open:
            self._open[req_id].finished = True
            if self._put(self._wait_for_its_file(req_id)):
                self._retry()

    def _wait_for_its_file(self, req_id: ReqId) -> _Pending:
        """Count an open request as failed until its file is there, so that nothing which happens meanwhile loses it."""
        request = self._open[req_id]
        path = self.path_of(req_id)
        if not request.finished:
            path = path.with_name(path.name.removesuffix(SUFFIX) + UNFINISHED_SUFFIX)
        pending = _Pending(req_id, request, path)
        self._failed.append(pending)
        del self._open[req_id]
        return pending

    def _retry(self) -> None:
        for pending in list(self._failed):
            if any(pending is one for one in self._failed):
                self._put(pending)

    def _put(self, pending: _Pending) -> bool:
        try:
            self._write(pending.path, *_contents(pending.req_id, pending.request))
        except Exception as error:  # noqa: BLE001 - whatever it is, neither this request nor another one may be lost
            pending.reason = f"{type(error).__name__}: {error}"
            _log.error("could not write %s, will try again: %s", pending.path, pending.reason)
            return False
        # An id used again: the newer request has the name, so an older one must not overwrite it later.
        at = next(i for i, one in enumerate(self._failed) if one is pending)
        self._failed = [one for i, one in enumerate(self._failed) if i > at or (i < at and one.path != pending.path)]
        self._written += 1
        return True
