"""Run TLC and read what it says.

Every run has a scratch folder of its own (two runs in one second would share TLC's own), one worker (so that state
counts, depths and counterexamples are the same each time) and a deadline.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any, ClassVar

from conformance.tla.errors import DeadlineError, TlcError
from conformance.tla.toolchain import Toolchain, find_toolchain
from conformance.tla.values import parse_value


@dataclass(frozen=True)
class State:
    """One state of a behaviour: the action that led to it, and the value of each variable."""

    action: str
    variables: Mapping[str, Any]


@dataclass(frozen=True)
class Violation:
    """What TLC found broken, and the behaviour that shows it."""

    check: str
    """The invariant or property; empty for a temporal property, which TLC does not name."""
    behaviour: tuple[State, ...]
    back_to: int | None = None
    """For a liveness violation, the position (from 1) that the behaviour goes back to, or that it stutters at."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    generated: int
    distinct: int
    left: int
    depth: int


@dataclass(frozen=True)
class Result:
    """A finished run."""

    generated: int
    distinct: int
    depth: int
    seconds: float
    violation: Violation | None = None
    coverage: Mapping[str, int] = field(default_factory=dict)
    """By action, how often it was taken; empty unless asked for."""
    printed: tuple[str, ...] = ()
    """What the specification printed, line by line; also what TLC says of reading modules."""


@dataclass(frozen=True)
class Job:
    """What to run: a module, the text of its configuration, and how."""

    module: Path
    config: str
    deadline: float
    coverage: bool = False
    simulate: int = 0
    """Behaviours to draw at random; 0 means: explore all states."""
    simulate_depth: int = 100
    simulate_file: Path | None = None
    """Where to write the behaviours: a prefix, to which TLC adds numbers."""
    seed: int = 1
    dump: Path | None = None
    """Where to write the state graph, in the dot format."""
    library: Path | None = None
    """Where modules are that do not stand beside the module."""
    depth_first: int = 0
    """If positive, search depth-first, deepening up to this."""
    heap_mb: int = 3000
    short: bool = True
    """Compile lightly: halves the time of runs of a few seconds, and would slow down long ones."""
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Message:
    """One message of TLC: its number, class and text. A line outside any message has the number 0."""

    code: int
    kind: int
    text: str


_START = re.compile(r"@!@!@STARTMSG (\d+):(\d+) @!@!@$")
_END = re.compile(r"@!@!@ENDMSG (\d+) @!@!@$")


def messages(lines: Iterator[str]) -> Iterator[Message]:
    """Split TLC's tool output into messages. They nest only when TLC breaks off; the inner one is then given alone."""
    code, kind, text = 0, 0, list[str]()
    for raw in lines:
        line = raw.rstrip("\n")
        if start := _START.match(line):
            if code and text:
                yield Message(code, kind, "\n".join(text))
            code, kind, text = int(start[1]), int(start[2]), []
        elif _END.match(line):
            yield Message(code, kind, "\n".join(text))
            code, kind, text = 0, 0, []
        elif code:
            text.append(line)
        else:
            yield Message(0, 0, line)
    if code:
        yield Message(code, kind, "\n".join(text))


def _number(text: str) -> int:
    return int(text.replace(",", ""))


_VARIABLE = re.compile(r"^(?:/\\ )?(\w+) = ", re.MULTILINE)


def parse_state(text: str) -> dict[str, Any]:
    """The variables of a state as TLC prints it."""
    starts = [m for m in _VARIABLE.finditer(text) if m.start() == 0 or text.startswith("/\\ ", m.start())]
    ends = [m.start() for m in starts[1:]] + [len(text)]
    return {m[1]: parse_value(text[m.end() : end]) for m, end in zip(starts, ends, strict=True)}


_STATE_HEAD = re.compile(r"(\d+): <(\w+)[^>]*>\n")
_BROKEN = {
    2107: re.compile(r"Invariant (\w+) is violated"),
    2110: re.compile(r"Invariant (\w+) is violated"),
    2112: re.compile(r"Action property (\w+) is violated"),
    2116: re.compile(r"Temporal properties were violated"),
}
_STATISTICS = re.compile(
    r"([\d,]+) states generated.*?, ([\d,]+) distinct states found.*?, ([\d,]+) states left", re.DOTALL
)
_PROGRESS = re.compile(
    r"Progress\((\d+)\).*?: ([\d,]+) states generated.*?, ([\d,]+) distinct.*?, ([\d,]+) states left"
)
_COVERAGE = re.compile(r"<(\w+) line [^>]*>: (\d+):(\d+)")
# Of class "error" too, but only a heading: "The behavior up to this point is:", "The following behavior ...".
_HEADINGS = frozenset((2121, 2264))
_PROGRESS_CODE = 2200
_INITIAL_STATE_CODE = 2107
"""An initial state that breaks an invariant is printed within the message that says so."""
_ERROR_CLASSES = frozenset((1, 2))
"""TLC's classes of messages: 0 none, 1 error, 2 bug, 3 warning, 4 state."""


class _Report:
    """What has been read of a run so far."""

    def __init__(self) -> None:
        self.generated = self.distinct = self.depth = 0
        self.broken: str | None = None
        self.states: list[State] = []
        self.back_to: int | None = None
        self.coverage: dict[str, int] = {}
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.finished = False

    def read(self, message: Message) -> Progress | None:
        """Take in one message."""
        code, text = message.code, message.text
        if code == _PROGRESS_CODE:
            match = _PROGRESS.search(text)
            return Progress(_number(match[2]), _number(match[3]), _number(match[4]), int(match[1])) if match else None
        if code == 0:
            self.outside.append(text)
        elif code in _BROKEN:
            self._broken(code, text)
        elif code in self._readers:
            self._readers[code](self, text)
        elif message.kind in _ERROR_CLASSES and code not in _HEADINGS:
            self.errors.append(text)
        return None

    def _broken(self, code: int, text: str) -> None:
        match = _BROKEN[code].search(text)
        self.broken = match[1] if match is not None and match.groups() else ""
        if code == _INITIAL_STATE_CODE:
            self.states.append(State("Init", parse_state(text.partition("\n")[2])))

    def _state(self, text: str) -> None:
        head = _STATE_HEAD.match(text)
        name = "Init" if head is None or head[2] == "Initial" else head[2]
        self.states.append(State(name, parse_state(text[head.end() :] if head else text)))

    def _stuttering(self, text: str) -> None:  # "n: Stuttering"
        self.back_to = int(text.partition(":")[0]) - 1

    def _loop(self, text: str) -> None:  # "n: Back to state ..."
        found = re.search(r"[Bb]ack to state:? *(\d+)|(\d+)", text)
        self.back_to = int(next(group for group in found.groups() if group)) if found else None

    def _statistics(self, text: str) -> None:
        if match := _STATISTICS.search(text):
            self.generated, self.distinct = _number(match[1]), _number(match[2])

    def _depth(self, text: str) -> None:
        if match := re.search(r"search is (\d+)", text):
            self.depth = int(match[1])

    def _coverage(self, text: str) -> None:
        if match := _COVERAGE.match(text):
            self.coverage[match[1]] = self.coverage.get(match[1], 0) + int(match[3])

    def _simulated(self, text: str) -> None:  # "Progress(-1) ...: n states generated, ..."
        if match := re.search(r"([\d,]+) states generated", text):
            self.generated = _number(match[1])

    def _finished(self, _: str) -> None:
        self.finished = True

    _readers: ClassVar[Mapping[int, Callable[[_Report, str], None]]] = {
        2217: _state,
        2218: _stuttering,
        2122: _loop,
        2199: _statistics,
        2194: _depth,
        2772: _coverage,
        2209: _simulated,
        2186: _finished,
    }


def command(job: Job, config: Path, scratch: Path, toolchain: Toolchain) -> list[str]:
    """The command line of a run."""
    java = [
        str(toolchain.java),
        "-XX:+UseSerialGC",
        *(["-XX:TieredStopAtLevel=1"] if job.short else []),
        f"-Xmx{job.heap_mb}m",
        f"-Djava.io.tmpdir={scratch}",
        "-cp",
        str(toolchain.jar),
        "tlc2.TLC",
    ]
    tlc = ["-tool", "-deadlock", "-workers", "1", "-metadir", "states", "-config", config.name]
    tlc += ["-coverage", "1"] if job.coverage else []
    tlc += ["-dump", "dot,actionlabels", str(job.dump)] if job.dump is not None else []
    tlc += ["-dfid", str(job.depth_first)] if job.depth_first else []
    if job.simulate:
        kept = f",file={job.simulate_file}" if job.simulate_file is not None else ""
        tlc += ["-simulate", f"num={job.simulate}{kept}", "-depth", str(job.simulate_depth), "-seed", str(job.seed)]
    else:
        tlc += ["-fp", "0", "-seed", str(job.seed)]
    return [*java, *tlc, *job.extra, job.module.name]


def run(job: Job, on_progress: Callable[[Progress], None] | None = None, toolchain: Toolchain | None = None) -> Result:
    """Run TLC to its end. Raises `TlcError` if it rejects the specification, `DeadlineError` if it takes too long."""
    toolchain = toolchain or find_toolchain()
    report = _Report()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlc-") as folder:
        scratch = Path(folder)
        # TLC finds modules beside the one it is given, so they are all put side by side.
        for source in {job.module.parent, job.library or job.module.parent}:
            for module in source.glob("*.tla"):
                (scratch / module.name).symlink_to(module.resolve())
        config = scratch / f"{job.module.stem}.cfg"
        config.write_text(job.config)
        expired: list[bool] = []
        with subprocess.Popen(
            command(job, config, scratch, toolchain),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=scratch,
        ) as process:

            def expire() -> None:
                expired.append(True)
                process.kill()

            timer = Timer(job.deadline, expire)
            timer.start()
            try:
                assert process.stdout is not None
                for message in messages(iter(process.stdout)):
                    progress = report.read(message)
                    if progress is not None and on_progress is not None:
                        on_progress(progress)
                process.wait()
            except BaseException:
                process.kill()
                raise
            finally:
                timer.cancel()
    seconds = time.monotonic() - started
    if expired:
        raise DeadlineError(f"TLC was ended after {job.deadline:g} s on {job.module.name}")
    if report.errors or not report.finished:
        raise TlcError(f"TLC did not check {job.module.name}", _explain(report))
    violation = None
    if report.broken is not None:
        violation = Violation(report.broken, tuple(report.states), report.back_to)
    printed = tuple(report.outside)
    return Result(report.generated, report.distinct, report.depth, seconds, violation, report.coverage, printed)


def _explain(report: _Report) -> str:
    """TLC's own words, less what it says of every run."""
    noise = re.compile(r"^(Parsing file|Semantic processing of module|\s*$)")
    said = [line for line in report.outside if not noise.match(line)]
    return "\n".join([*said, *report.errors])
