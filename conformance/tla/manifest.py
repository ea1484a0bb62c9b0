"""``spec/manifest.toml``: every model with what it must show, every seeded fault, every goal.

A model's entry holds the digest of its configuration and what TLC counted on it. So a constant made smaller, a check
taken out or an action that no longer fires changes a figure that is on record, and the comparison fails.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from conformance.tla.config import Config
from conformance.tla.errors import ManifestError

SPEC = Path(__file__).resolve().parents[2] / "spec"
"""The folder of the specification, in a checkout."""

Lane: TypeAlias = Literal["ci", "deep"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Model(_Entry):
    """One configuration. Exhaustive models have figures; simulations and trace specifications have none."""

    name: str
    config: str
    module: str
    mode: Literal["exhaustive", "simulate", "trace"]
    lane: Lane
    why: str
    digest: str = ""
    distinct: int = 0
    total: int = 0
    depth: int = 0
    behaviours: int = 0
    """How many behaviours a simulation draws."""
    idle: tuple[str, ...] = ()
    """Actions that this model cannot reach, each for a reason that `why` or its constants give."""


class Fault(_Entry):
    """A model with faults seeded (or other constants set), and the one check that it must break."""

    name: str
    model: str
    violates: str
    what: str
    faults: tuple[str, ...] = ()
    """The switches; the fault's own name if none is given and no constant is set."""
    set: dict[str, str] = {}
    lane: Lane = "ci"
    length: int = 0
    """States in the shortest counterexample."""


class Goal(_Entry):
    """Something that must be reachable, as an invariant that must break."""

    model: str
    violates: str
    what: str
    lane: Lane = "ci"
    length: int = 0


class Manifest(BaseModel):
    """All of the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: tuple[Model, ...]
    fault: tuple[Fault, ...]
    goal: tuple[Goal, ...]

    def of(self, name: str) -> Model:
        """The model of a name."""
        for model in self.model:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in self.model)
        raise ManifestError(f"there is no model {name!r}; there are {known}")


def load_manifest(spec: Path = SPEC) -> Manifest:
    """Read the manifest of a specification folder."""
    path = spec / "manifest.toml"
    if not path.is_file():
        raise ManifestError(f"{path.name} is missing in {spec.name}/: the specification is part of a checkout only")
    return Manifest.model_validate(tomllib.loads(path.read_text()))


def config_of(model: Model, spec: Path = SPEC) -> Config:
    """The configuration of a model."""
    return Config.load(spec / model.config)


def digest(config: Config) -> str:
    """What identifies a configuration, its layout aside."""
    return hashlib.sha256(config.render().encode()).hexdigest()[:16]


def fault_config(fault: Fault, config: Config) -> Config:
    """The configuration that shows the fault: the model's, less all checks but one, with the switches set."""
    switches = fault.faults or (() if fault.set else (fault.name,))
    seeded = config.with_faults(switches) if switches else config
    for name, value in fault.set.items():
        if name not in seeded.constants:
            raise ManifestError(f"{fault.name}: {fault.model} has no constant {name}")
        seeded = Config(**{**vars(seeded), "constants": {**seeded.constants, name: f"= {value}"}})
    return seeded.checking(fault.violates)


def record(spec: Path, figures: dict[tuple[str, str], dict[str, object]]) -> None:
    """Write measured figures into the manifest. `figures` is by table and name; a goal's name is its invariant."""
    path = spec / "manifest.toml"
    blocks = re.split(r"(?m)^(?=\[\[)", path.read_text())
    text = "".join(_with_figures(block, figures) for block in blocks)
    path.write_text(text.rstrip("\n") + "\n")


def _with_figures(block: str, figures: dict[tuple[str, str], dict[str, object]]) -> str:
    """One table of the manifest with its figures set."""
    said = dict(re.findall(r'(?m)^(name|model|violates) = "(.*)"$', block))
    table = re.match(r"\[\[(\w+)\]\]", block)
    if table is None:
        return block
    name = f"{said['model']}:{said['violates']}" if table[1] == "goal" else said["name"]
    for field, value in figures.get((table[1], name), {}).items():
        line = f'{field} = "{value}"' if isinstance(value, str) else f"{field} = {value}"
        block, found = re.subn(rf"(?m)^{field} = .*$", line, block)
        if not found:
            body, gap, rest = block.partition("\n\n")
            block = f"{body}\n{line}{gap}{rest}" if gap else f"{body.rstrip()}\n{line}\n"
    return block
