"""Are recorded traces behaviours of the specification? TLC takes their events one by one, or says where it cannot.

Events are those of spec/README.md. An event may leave fields out; then they may be anything.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.tla.config import Config
from conformance.tla.manifest import SPEC
from conformance.tla.tlc import Job, Result, run
from conformance.tla.trace import trace_module
from conformance.tla.values import Function, function

_MODULE = "TraceRun"
_TAKEN = re.compile(r'<<"taken", (\d+), (\d+)>>')


@dataclass(frozen=True)
class Setting:
    """The world that a trace was recorded in."""

    requests: tuple[str, ...]
    """In the order in which finished ids of one step are handled."""
    text: Mapping[str, Sequence[int]]
    """By request, all tokens it will ever have: prompt, then output."""
    prompt_len: Mapping[str, int]
    num_blocks: int
    block_size: int
    keys: frozenset[str]
    hidden: frozenset[str]
    deferred: frozenset[str]
    emit_tokens: Mapping[str, frozenset[int]]
    """By key that is not hidden, the tokens that emit it."""
    env: frozenset[str] = frozenset()
    watched: frozenset[int] | None = None
    """The slots to follow; all if None."""
    fine: bool = True
    """Whether the trace has an event for every link of a write's chain."""
    pressure: bool = True
    """Whether the trace has a ``ReserveBudget`` in each step with deferred rows."""

    def definitions(self) -> dict[str, object]:
        """The constants of the ``Trace`` specification, by name."""
        slots = frozenset(range(self.num_blocks * self.block_size))
        return {
            "Order": self.requests,
            "Text": Function({req: tuple(tokens) for req, tokens in self.text.items()}),
            "PromptLen": Function(dict(self.prompt_len)),
            "EmitTokens": Function(dict(self.emit_tokens)),
            "Blocks": frozenset(range(self.num_blocks)),
            "BlockSize": self.block_size,
            "Keys": self.keys,
            "Hidden": self.hidden,
            "Deferred": self.deferred,
            "Env": self.env,
            "Watched": slots if self.watched is None else self.watched,
            "Fine": self.fine,
            "Pressure": self.pressure,
        }


@dataclass(frozen=True)
class Acceptance:
    """What became of a trace."""

    accepted: bool
    taken: int
    """Events taken. If the trace was not accepted, the next one is the first that cannot happen."""
    broken: str = ""
    """The rule that a state along the trace breaks, if one does."""


Events = Sequence[Mapping[str, Any]]


def accept(setting: Setting, events: Events, *, deadline: float = 120.0) -> Acceptance:
    """Let TLC take the events of a trace."""
    return accept_all(setting, [events], deadline=deadline)[0]


def accept_all(setting: Setting, traces: Sequence[Events], *, deadline: float = 120.0) -> list[Acceptance]:
    """Let TLC take the events of each trace: in one run, and one more for each trace along which a rule breaks."""
    found: dict[int, Acceptance] = {}
    while left := [i for i in range(len(traces)) if i not in found]:
        result = _run(setting, [traces[i] for i in left], deadline)
        if result.violation is not None:  # it ends the run, so the others are not done
            last = result.violation.behaviour[-1].variables
            found[left[last["which"] - 1]] = Acceptance(False, last["taken"], result.violation.check)
            continue
        taken = dict.fromkeys(left, 0)
        for line in result.printed:
            if match := _TAKEN.fullmatch(line):
                index = left[int(match[1]) - 1]
                taken[index] = max(taken[index], int(match[2]))
        found |= {i: Acceptance(n == len(traces[i]), n) for i, n in taken.items()}
    return [found[i] for i in range(len(traces))]


def _run(setting: Setting, traces: Sequence[Events], deadline: float) -> Result:
    recorded = [[function(dict(event)) for event in events] for events in traces]
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        module = Path(folder) / f"{_MODULE}.tla"
        module.write_text(trace_module(_MODULE, "TraceRows", setting.definitions(), recorded))
        config = Config.load(SPEC / "TraceRows.cfg").render()
        return run(Job(module, config, deadline, library=SPEC))
