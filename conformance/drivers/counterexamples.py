"""Behaviours of the specification as traces: what TLC shows of a seeded fault, asked of a real cache.

Of a behaviour of ``PrefixCache`` the engine's part is taken: what the scheduler decided, when steps were saved, when
they were taken or discarded. What is due follows from the texts, through the oracle. What the committer and the
prefetch did in the behaviour is left to whoever replays it. A behaviour ends where TLC saw the fault; the trace goes on
until all is consumed, and then asks once for every row that is still published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.cases.script import Placed, Script
from conformance.schedules.content import Prefix
from conformance.schedules.oracle import HIDDEN_KEY
from conformance.schedules.trace import KeySetting, Trace
from conformance.tla.config import Config
from conformance.tla.errors import TlaError
from conformance.tla.manifest import SPEC, Fault, config_of, fault_config, load_manifest
from conformance.tla.tlc import Job, State, run
from conformance.tla.values import parse_value

MODULE = "MCRows"
DEADLINE_S = 300.0
AMPLE = 1_000_000
KINDS = {"continued": "new"}
"""How a request that comes in is told, where not by its own name."""


@dataclass(frozen=True)
class Setting:
    """The constants of a model, as far as a trace needs them."""

    order: tuple[str, ...]
    text: Mapping[str, tuple[int, ...]]
    emits: Mapping[str, frozenset[int]]
    """By key, the tokens that emit it; hidden rows are always there."""
    keys: frozenset[str]
    hidden: frozenset[str]
    deferred: frozenset[str]
    num_blocks: int
    block_size: int

    @classmethod
    def of(cls, config: Config) -> Setting:
        """Read them from a configuration and from the definitions of its module."""
        definitions = (SPEC / f"{MODULE}.tla").read_text(encoding="utf-8")

        def value(name: str) -> Any:
            text = config.constants[name]
            if text.startswith("<- "):
                found = re.search(rf"^{re.escape(text[3:])} == (.*)$", definitions, re.MULTILINE)
                if found is None:
                    raise TlaError(f"{MODULE}.tla has no {text[3:]} in one line")
                return parse_value(f"({found[1]})" if ":>" in found[1] else found[1])
            return parse_value(text.removeprefix("= "))

        return cls(
            order=value("Order"),
            text=dict(value("Text")),
            emits=dict(value("EmitTokens")),
            keys=value("Keys"),
            hidden=value("Hidden"),
            deferred=value("Deferred"),
            num_blocks=len(value("Blocks")),
            block_size=value("BlockSize"),
        )


def row_faults() -> dict[str, Fault]:
    """The seeded faults of the manifest that a trace can show: those of models with rows."""
    manifest = load_manifest()
    return {fault.name: fault for fault in manifest.fault if manifest.of(fault.model).module == MODULE}


def counterexample(name: str) -> Trace:
    """Let TLC find what a seeded fault does, and make a trace of it.

    Raises:
        TlaError: there is no such fault, or TLC does not find it.
    """
    faults = row_faults()
    if name not in faults:
        raise TlaError(f"no fault of the rows is called {name!r}; there are {', '.join(faults)}")
    fault = faults[name]
    config = fault_config(fault, config_of(load_manifest().of(fault.model)))
    # Some faults need a step whose tokens differ in what they emit. A trace's step emits a key if all of them do.
    for each in (whole_steps(config), config):
        result = run(Job(SPEC / f"{MODULE}.tla", each.render(), DEADLINE_S))
        if result.violation is not None:
            return trace_of(result.violation.behaviour, Setting.of(each))
    raise TlaError(f"{name}: {fault.violates} is not broken")


def whole_steps(config: Config) -> Config:
    """The same model with steps that emit a key for all of their tokens or for none, as a trace's steps do."""
    env = parse_value(config.constants["Env"].removeprefix("= ")) | {"whole"}
    listed = ", ".join(f'"{switch}"' for switch in sorted(env))
    return replace(config, constants={**config.constants, "Env": f"= {{{listed}}}"})


def trace_of(behaviour: Sequence[State], setting: Setting) -> Trace:
    """The engine's part of a behaviour as a trace."""
    return _Teller(behaviour, setting).tell()


class _Teller:
    def __init__(self, behaviour: Sequence[State], setting: Setting) -> None:
        self.states = [state.variables for state in behaviour]
        self.setting = setting
        keys = [
            KeySetting(name=HIDDEN_KEY, width=2, item_bytes=4)
            if key in setting.hidden
            else KeySetting(name=key, width=1, item_bytes=8, deferred=key in setting.deferred)
            for key in sorted(setting.keys)
        ]
        sealed = any(state["event"]["action"] == "SealWrite" for state in self.states)
        chunk = max(len(text) for text in setting.text.values()) * len(setting.order)
        self.script = Script(
            keys=keys,
            block_size=setting.block_size,
            num_blocks=setting.num_blocks,
            depth=len(behaviour) + setting.num_blocks,
            page_rows=AMPLE if chunk > AMPLE else 64,
            # Where the behaviour seals writes under pressure, so has the cache to: one step's rows fill the budget.
            budget=sum(key.row_bytes for key in keys if key.deferred) * chunk if sealed else AMPLE,
        )
        self.batch: list[Placed] = []
        self.started: list[Placed] = []
        """The step between its start and its save."""
        self.labels: dict[int, int] = {}

    def tell(self) -> Trace:
        """The trace."""
        for state in self.states[1:]:
            self._take(state["event"])
        if self.batch:
            self._start(frozenset())
        self._save()
        for label in list(self.script.open):
            self.script.take(label)
        if self.script.live:
            self.script.start(finished=sorted(self.script.live))
        self._ask_for_all(self.states[-1]["hash"])
        return self.script.end()

    def _take(self, event: Mapping[str, Any]) -> None:
        match event["action"]:
            case "ScheduleRequest":
                kind = KINDS.get(event["kind"], event["kind"])
                content = (0, *self.setting.text[event["req"]][: event["computed"] + event["n"]])
                blocks = tuple(event["blocks"])
                self.batch.append(Placed(event["req"], content, blocks, event["computed"], event["n"], kind))
            case "WithdrawRequest":
                self.batch = [part for part in self.batch if part.req != event["req"]]
            case "EndSchedule":
                self._start(event["reported"])
            case "ClaimPage":
                self.labels[event["step"]] = self._save()
            case "TakeStep" if event["how"] == "materialize":
                self.script.take(self.labels[event["step"]])
            case "TakeStep":
                self.script.discard(self.labels[event["step"]])

    def _start(self, reported: frozenset[str]) -> None:
        finished = [req for req in self.setting.order if req in reported]
        self.script.start(*self.batch, finished=finished)
        self.started, self.batch = self.batch, []

    def _save(self) -> int:
        if not self.started:
            return -1
        tokens = {token for part in self.started for token in part.content[part.computed + 1 :]}
        emitted = {key for key in self.setting.keys & self.setting.emits.keys() if tokens <= self.setting.emits[key]}
        emitted |= {HIDDEN_KEY for _ in self.setting.hidden}
        label = self.script.save(*self.started, emits=emitted)
        self.started = []
        return label

    def _ask_for_all(self, hashes: Any) -> None:
        """For each published prefix a request that hits it, as long as a block is left for one token more."""
        published = dict(enumerate(hashes)) if isinstance(hashes, tuple) else dict(hashes)
        size = self.setting.block_size
        for block, prefix in sorted(published.items(), key=lambda item: -len(item[1])):
            by_prefix = {content: each for each, content in published.items() if content}
            chain = [by_prefix.get(tuple(prefix[:end])) for end in range(size, len(prefix), size)]
            table = [each for each in (*chain, block) if each is not None]
            free = [each for each in range(self.setting.num_blocks) if each not in table]
            if not prefix or published.get(block) != prefix or len(table) * size != len(prefix) or not free:
                continue
            # A token that no text has, so that nobody could have hit the block behind it.
            content: Prefix = (0, *prefix, 99)
            last = min(free, key=lambda each: len(published.get(each, ())))
            published.pop(last, None)
            probe = Placed(f"ask {block}", content, (*table, last), len(prefix), 1, "new")
            self.script.take(self.script.step(probe, emits={HIDDEN_KEY for _ in self.setting.hidden}))
            self.script.start(finished=[probe.req])
