"""Behaviours as files: JSON to keep and replay, TLA+ modules for the ``Trace`` specifications.

The JSON format is described in spec/README.md: it is Apalache's informal trace format with the header of this project.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.tla.errors import ManifestError
from conformance.tla.tlc import State, parse_state
from conformance.tla.values import format_value, from_json, to_json

FORMAT = "omni-prefix-trace"
VERSION = 1


def save_trace(path: Path, model: str, constants: Mapping[str, str], states: Sequence[State], check: str = "") -> None:
    """Write a behaviour of a model. `check` is the rule that it breaks, if it breaks one."""
    document = {
        "#meta": {
            "format": FORMAT,
            "version": VERSION,
            "model": model,
            "violates": check,
            "constants": dict(constants),
        },
        "vars": sorted(states[0].variables) if states else [],
        "states": [
            {"#meta": {"index": index, "action": state.action}, **{k: to_json(v) for k, v in state.variables.items()}}
            for index, state in enumerate(states)
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def load_trace(path: Path) -> tuple[dict[str, Any], tuple[State, ...]]:
    """The header and the states of a saved behaviour."""
    document = json.loads(path.read_text())
    header = document.get("#meta", {}) if isinstance(document, dict) else {}
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ManifestError(f"{path.name} is no {FORMAT} of version {VERSION}")
    states = tuple(
        State(raw["#meta"]["action"], {name: from_json(raw[name]) for name in document["vars"]})
        for raw in document["states"]
    )
    return header, states


_SIMULATED = re.compile(r"^STATE_\d+ ==\s*(.*?)(?=^STATE_\d+ ==|^=+|\Z)", re.MULTILINE | re.DOTALL)


def read_simulated(path: Path) -> tuple[State, ...]:
    """A behaviour as ``-simulate file=...`` writes it: a module with a definition for each state."""
    states = [parse_state(text.strip()) for text in _SIMULATED.findall(path.read_text())]
    return tuple(State(str(state["event"]["action"]) if "event" in state else "", state) for state in states)


def events_of(states: Iterable[State]) -> list[Mapping[str, Any]]:
    """The events of a behaviour: what ``event`` holds in every state but the first."""
    return [state.variables["event"] for state in states][1:]


def trace_module(name: str, extends: str, definitions: Mapping[str, object], traces: Iterable[Sequence[Any]]) -> str:
    """A TLA+ module that gives a ``Trace`` specification its constants and the recorded traces."""
    lines = [f"---- MODULE {name} ----", f"EXTENDS {extends}", ""]
    lines += [f"Given{key} == {format_value(value)}" for key, value in definitions.items()]
    told = ["<<\n    " + ",\n    ".join(map(format_value, events)) + "\n>>" for events in traces]
    lines += ["", "GivenTraces == <<", ",\n".join(told), ">>", "====", ""]
    return "\n".join(lines)
