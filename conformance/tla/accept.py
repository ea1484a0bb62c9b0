"""Is a recorded trace a behaviour of the specification? TLC takes its events one by one, or says where it cannot.

Events are those of spec/README.md. An event may leave fields out; then they may be anything.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.tla.config import Config
from conformance.tla.manifest import SPEC
from conformance.tla.tlc import Job, run
from conformance.tla.trace import trace_module
from conformance.tla.values import Function, function

_MODULE = "TraceRun"
_TAKEN = "TraceTakenInv"


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
    """Whether the trace has a ``ReserveBudget`` wherever a deferred write is open."""

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


def accept(setting: Setting, events: Sequence[Mapping[str, Any]], *, deadline: float = 120.0) -> Acceptance:
    """Let TLC take the events of a trace."""
    recorded = [function(dict(event)) for event in events]
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        module = Path(folder) / f"{_MODULE}.tla"
        module.write_text(trace_module(_MODULE, "TraceRows", setting.definitions(), recorded))
        config = Config.load(SPEC / "TraceRows.cfg").render()
        result = run(Job(module, config, deadline, library=SPEC))
    if result.violation is None:
        # Every level of the search is one more event taken; the first level is the initial state.
        return Acceptance(False, result.depth - 1)
    taken = len(result.violation.behaviour) - 1
    if result.violation.check == _TAKEN:
        return Acceptance(True, taken)
    return Acceptance(False, taken, result.violation.check)
