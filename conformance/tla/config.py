"""TLC's configuration files, in the one style that this project writes: one constant a line, upper-case sections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from conformance.tla.errors import ManifestError
from conformance.tla.values import format_value

_SECTIONS = {
    "SPECIFICATION": "specification",
    "VIEW": "view",
    "CONSTRAINT": "constraint",
    "CONSTANTS": "constants",
    "INVARIANTS": "invariants",
    "PROPERTIES": "properties",
}
_CONSTANT = re.compile(r"(\w+)\s*(=|<-)\s*(.+?)\s*$")


@dataclass(frozen=True)
class Config:
    """One configuration: what to run, with which constants, and what to check."""

    specification: str
    constants: Mapping[str, str]
    """By name, ``= value`` or ``<- operator``."""
    invariants: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    view: str | None = None
    constraint: str | None = None

    @classmethod
    def parse(cls, text: str) -> Config:
        """Read a configuration."""
        words: dict[str, list[str]] = {name: [] for name in _SECTIONS.values()}
        constants: dict[str, str] = {}
        section = ""
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.split("\\*")[0].strip()
            head, _, rest = line.partition(" ")
            if head in _SECTIONS:
                section, line = _SECTIONS[head], rest.strip()
            if not line:
                continue
            if section == "constants":
                match = _CONSTANT.match(line)
                if match is None or match[1] in constants:
                    raise ManifestError(f"line {number}: {line!r} sets no constant, or sets one again")
                constants[match[1]] = f"{match[2]} {match[3]}"
            elif section:
                words[section] += line.split()
            else:
                raise ManifestError(f"line {number}: {line!r} stands in no known section")
        if len(words["specification"]) != 1:
            raise ManifestError("a configuration names one SPECIFICATION")
        return cls(
            specification=words["specification"][0],
            constants=constants,
            invariants=tuple(words["invariants"]),
            properties=tuple(words["properties"]),
            view=words["view"][0] if words["view"] else None,
            constraint=words["constraint"][0] if words["constraint"] else None,
        )

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read a configuration file; errors name it."""
        try:
            return cls.parse(path.read_text())
        except ManifestError as error:
            raise ManifestError(f"{path.name}: {error}") from error

    def render(self) -> str:
        """The configuration as TLC reads it."""
        lines = [f"SPECIFICATION {self.specification}"]
        lines += [f"VIEW {self.view}"] if self.view else []
        lines += [f"CONSTRAINT {self.constraint}"] if self.constraint else []
        lines += ["CONSTANTS", *(f"    {name} {value}" for name, value in self.constants.items())]
        lines += ["INVARIANTS", *(f"    {name}" for name in self.invariants)] if self.invariants else []
        lines += ["PROPERTIES", *(f"    {name}" for name in self.properties)] if self.properties else []
        return "\n".join(lines) + "\n"

    def with_faults(self, faults: Iterable[str]) -> Config:
        """The same model with these faults seeded: one line differs."""
        if self.constants.get("Mutants") != "= {}":
            raise ManifestError("only a model whose constant Mutants is empty can be seeded with faults")
        return replace(self, constants={**self.constants, "Mutants": f"= {format_value(frozenset(faults))}"})

    def checking(self, name: str) -> Config:
        """The same model with one invariant (``...Inv``) or property (``...Prop``) listed, and nothing else."""
        if name.endswith("Inv"):
            return replace(self, invariants=(name,), properties=())
        return replace(self, invariants=(), properties=(name,))

    @property
    def checks(self) -> tuple[str, ...]:
        """All that is listed to be checked."""
        return self.invariants + self.properties


@dataclass(frozen=True)
class Definitions:
    """What a TLA+ source defines: the part of it that tests look at."""

    operators: frozenset[str] = field(default_factory=frozenset)
    variables: frozenset[str] = field(default_factory=frozenset)
    constants: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, text: str) -> Definitions:
        """Scan the text of a module."""
        bare = re.sub(r"\(\*.*?\*\)", " ", re.sub(r"\\\*.*", "", text), flags=re.DOTALL)

        def declared(keyword: str) -> frozenset[str]:
            blocks = re.findall(rf"^{keyword}S?\b([\w\s,]*?)(?=^\w+.*==|^-|^=|^[A-Z]+\b|\Z)", bare, re.MULTILINE)
            return frozenset(name for block in blocks for name in re.findall(r"\w+", block))

        return cls(
            operators=frozenset(re.findall(r"^(\w+)(?:\([^)]*\))?\s*==", bare, re.MULTILINE)),
            variables=declared("VARIABLE"),
            constants=declared("CONSTANT"),
        )
