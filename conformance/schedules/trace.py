"""A trace: what an engine asks of the cache, event by event, with the outcome due. JSON lines, one event a line.

The first line is the header; an interleaving may follow. Rows are numbers that stand for a row's content (see
`content`); each driver makes of them what its cache stores. A step is named by a *label*, the ordinal of its save;
drivers map labels to step ids. Unknown fields and other versions are refused, so that an old trace never means
something new.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

CONTRACT = "OmniPrefixCacheContractError"
ROW = "OmniPrefixCacheRowError"
WRITE = "OmniPrefixCacheWriteError"
TIMEOUT = "OmniPrefixCacheStagingTimeoutError"
MEMORY = "MemoryError"
CLOSED = "OmniPrefixCacheClosedError"
MOST_SLOTS = 1 << 26
"""Slots of a cache that a trace may ask for: more than any engine has, and tables of it fit into memory."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class KeySetting(_Record):
    """One per-token output. `width` lanes of `item_bytes` bytes each."""

    name: str
    width: NonNegativeInt
    item_bytes: PositiveInt
    deferred: bool = False

    @property
    def row_bytes(self) -> int:
        return self.width * self.item_bytes


class Header(_Record):
    """Sizes and bounds of the cache that the trace is for, and where the trace came from."""

    event: Literal["header"] = "header"
    version: Literal[1, 2] = 2
    """1 had no interleaving."""
    seed: int
    block_size: PositiveInt
    num_blocks: PositiveInt
    keys: list[KeySetting]
    staging_depth: PositiveInt
    page_rows: PositiveInt
    budget_bytes: NonNegativeInt

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.block_size * self.num_blocks > MOST_SLOTS:
            raise ValueError(f"block_size * num_blocks is beyond {MOST_SLOTS:,}, the most slots that a trace may have")
        names = [key.name for key in self.keys]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"keys holds {', '.join(map(repr, sorted(repeated)))} twice")
        return self


class Interleaving(_Record):
    """Which thread ran when. At each *point* where threads may change, numbered from 0, the running one goes on.

    `switches` are the exceptions: at that point the thread of that name takes over. A switch to a thread that cannot go
    on is passed over, so that a part of an interleaving is one too. Where the running thread stops, the first that can
    go on takes over, in the order in which threads were started.
    """

    event: Literal["interleaving"] = "interleaving"
    device_seed: int
    """Decides how the simulated device cuts its copies and when each piece lands."""
    switches: list[tuple[int, str]]


class Admission(_Record):
    """A request placed in the batch with its whole block table; `resumed` says how the engine tells it."""

    req: str
    computed: int
    blocks: list[int] | None
    resumed: bool = False


class Start(_Record):
    """A step starts. `running` gives the computed tokens of scheduled requests that are not admitted anew."""

    event: Literal["start"] = "start"
    finished: list[str] = []
    admitted: list[Admission] = []
    running: dict[str, int] = {}
    scheduled: dict[str, int] = {}
    error: str | None = None


class Part(_Record):
    """One request's part of a step: the first position that it computes, and the slots of all."""

    req: str
    start: int
    slots: list[int]


class Save(_Record):
    """A step is saved under a label.

    `widths` overrides the width of a key, to ask for a refusal. `clone_fails`: the device has no room for the clone of
    the deferred rows, although the budget has.
    """

    event: Literal["save"] = "save"
    label: int
    batch: list[Part]
    padded: int
    rows: dict[str, list[int]]
    widths: dict[str, int] = {}
    clone_fails: bool = False
    error: str | None = None


class Unsaved(_Record):
    """The engine computed a step, and the cache is never given its rows."""

    event: Literal["unsaved"] = "unsaved"
    batch: list[Part]


class Due(_Record):
    """What a step has to hand over: rows by key and request, spans by request."""

    rows: dict[str, dict[str, list[int]]]
    spans: dict[str, tuple[int, int]]


class Materialize(_Record):
    """A step's rows of some requests are asked for."""

    event: Literal["materialize"] = "materialize"
    label: int
    reqs: list[str]
    due: Due | None = None
    error: str | None = None


class Discard(_Record):
    """A step is consumed without handing anything over."""

    event: Literal["discard"] = "discard"
    label: int
    error: str | None = None


Stage: TypeAlias = Literal[
    "copy",
    "write",
    "wait",
    "gather_to_host",
    "launch",
    "clone",
    "rows_to_host",
    "outputs",
    "keys",
    "interrupt",
    "clock",
]
"""What can fail; `STAGES` lists them.

Of a write, on the committer: `copy` and `write` (rows have been copied, or written), `wait` (for copies of a step) and
`gather_to_host` (of deferred rows). In a call of the engine or of a builder: `launch`, `clone` and `rows_to_host` of
the device, host memory for `outputs`, host memory for `keys` seen first. `interrupt` is a KeyboardInterrupt at an
action of the machine; `clock` is no failure, but a clock that jumps an hour at one.
"""


STAGES: tuple[Stage, ...] = get_args(Stage)


class Fail(_Record):
    """The next thing of a stage fails, or the one behind `after` others.

    From here on each call is right, or raises the write's error; once one has raised it, all do. Where the stage is not
    one of a write, a call may raise the failure itself, once: a start or a save is then made again and is right, or
    raises the write's error; a materialize or discard has consumed its step. A driver that cannot have the failure
    passes the event over.
    """

    event: Literal["fail"] = "fail"
    stage: Stage
    after: NonNegativeInt = 0


class Rest(_Record):
    """Every request has finished and every step is consumed: nothing may be left behind."""

    event: Literal["rest"] = "rest"


class Shutdown(_Record):
    event: Literal["shutdown"] = "shutdown"


Event: TypeAlias = Start | Save | Unsaved | Materialize | Discard | Fail | Rest | Shutdown
_LINE: TypeAdapter[Header | Interleaving | Event] = TypeAdapter(
    Annotated[Header | Interleaving | Event, Field(discriminator="event")]
)


class Trace(_Record):
    """A header and its events; and how the threads were interleaved, where that matters."""

    header: Header
    events: list[Event]
    interleaving: Interleaving | None = None

    def lines(self) -> Iterator[str]:
        """The trace as JSON lines."""
        second = () if self.interleaving is None else (self.interleaving,)
        for record in (self.header, *second, *self.events):
            # Defaults stay out; the discriminator and the version are told always.
            told = record.model_dump(exclude_defaults=True) | {"event": record.event}
            if isinstance(record, Header):
                told["version"] = record.version
            yield json.dumps(dict(sorted(told.items(), key=lambda item: item[0] != "event")))

    def write(self, path: Path) -> None:
        """Write the trace to a file, whole."""
        path.write_text("".join(f"{line}\n" for line in self.lines()), encoding="utf-8")


def parse(lines: Iterable[str]) -> Trace:
    """Read a trace. Raises `ValueError` with the line number of what cannot be read."""
    header: Header | None = None
    interleaving: Interleaving | None = None
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _LINE.validate_json(line)
        except ValidationError as error:
            raise ValueError(f"line {number} of the trace: {_told(error)}") from error
        if isinstance(record, Header) != (header is None):
            raise ValueError(f"line {number} of the trace: the first line is the header, and no other is")
        if isinstance(record, Header):
            header = record
        elif isinstance(record, Interleaving):
            if interleaving is not None or events:
                raise ValueError(f"line {number} of the trace: an interleaving stands behind the header, and once")
            interleaving = record
        else:
            events.append(record)
    if header is None:
        raise ValueError("the trace is empty")
    return Trace(header=header, events=events, interleaving=interleaving)


def _told(error: ValidationError) -> str:
    """What is wrong with a line, by field."""
    found = []
    for one in error.errors(include_url=False, include_input=False, include_context=False):
        where = ".".join(str(part) for part in one["loc"])
        found.append(f"{where}: {one['msg']}" if where else one["msg"])
    return "; ".join(found)


def read(path: Path) -> Trace:
    """Read a trace from a file."""
    with path.open(encoding="utf-8") as file:
        return parse(file)
