"""The names that the sources really have: read from the modules of the specification and from the Python sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from conformance.links.names import Place

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "spec"
MACHINE = ROOT / "omni_prefix_ref" / "machine.py"
RULES = ROOT / "omni_prefix_ref" / "rules.py"
FAST = ROOT / "omni_prefix_fast"

_COMMENTS = re.compile(r"\(\*.*?\*\)|\\\*[^\n]*", re.DOTALL)
_QUANTIFIER = re.compile(r"\\E[^:]*:")
_RULE = re.compile(r"^((?!Debug)\w+(?:Inv|Prop))(?:\([^)]*\))?\s*==", re.MULTILINE)
_NEXT = re.compile(r"^Next\s*==(.*?)(?=^\S)", re.MULTILINE | re.DOTALL)


class UnreadableSourceError(Exception):
    """A source that does not say its names in a way that can be read here."""


def _bare(text: str) -> str:
    return _COMMENTS.sub(" ", text)


def disjuncts(text: str) -> frozenset[str]:
    """The actions of a module's ``Next``; none if the module has no ``Next``."""
    body = _NEXT.search(_bare(text))
    if body is None:
        return frozenset()
    parts = [part.strip() for part in _QUANTIFIER.sub(" ", body[1]).split("\\/")]
    names = [re.fullmatch(r"(\w+)\s*(?:\([^()]*\))?", part) for part in parts if part]
    if not names or not all(names):
        raise UnreadableSourceError(f"Next has a disjunct that is no action's name: {parts}")
    return frozenset(name[1] for name in names if name)


def rules(text: str) -> frozenset[str]:
    """The invariants and properties of a module. Goals (``Debug...Inv``) are no rules: they must break."""
    return frozenset(_RULE.findall(_bare(text)))


def _by_name(found: Mapping[str, Iterable[str]]) -> dict[Place, None]:
    return {Place(module, name): None for module, names in found.items() for name in names}


def spec_actions(folder: Path = SPEC) -> frozenset[Place]:
    """Every disjunct of every ``Next``."""
    return frozenset(_by_name({path.stem: disjuncts(path.read_text()) for path in folder.glob("*.tla")}))


def spec_rules(folder: Path = SPEC) -> frozenset[Place]:
    """Every invariant and property."""
    return frozenset(_by_name({path.stem: rules(path.read_text()) for path in folder.glob("*.tla")}))


def _methods(source: str, owner: str) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            yield from (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name[0] != "_")


def reference_methods(source: str | None = None) -> frozenset[str]:
    """Every public method of the reference model's machine."""
    return frozenset(method.name for method in _methods(source or MACHINE.read_text(), "Machine"))


def _named_rules(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name("require" | "RuleBroken"), args=[ast.Constant(str() as rule), *_]):
                yield rule


def reference_rules(source: str | None = None) -> frozenset[str]:
    """Every assertion of the reference model: methods of its rules, and names under which they complain."""
    text = source or RULES.read_text()
    return frozenset(method.name for method in _methods(text, "Rules")) | frozenset(_named_rules(text))


_TELLER = "_tell_taken"
"""A method that traces the event that its second argument names."""


def _traced(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    tellers = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == _TELLER)
    told = {inner for teller in tellers for inner in ast.walk(teller)}
    for node in ast.walk(tree):
        match node:
            case _ if node in told:
                pass
            case ast.Call(func=ast.Attribute(attr="trace"), args=[ast.Constant(str() as event), *_]):
                yield event
            case ast.Call(func=ast.Attribute(attr=attr), args=[_, ast.Constant(str() as event), *_]) if attr == _TELLER:
                yield event
            case (
                ast.Call(func=ast.Attribute(value=ast.Attribute(attr="_counters" | "counters"), attr="trace"))
                | ast.Call(func=ast.Attribute(attr="_tell_taken"))
            ):
                raise UnreadableSourceError(f"line {node.lineno}: an event whose name is no literal")


def fast_events(sources: Iterable[str] | None = None) -> frozenset[str]:
    """Every event that the production package traces."""
    texts = [path.read_text() for path in sorted(FAST.rglob("*.py"))] if sources is None else sources
    return frozenset(event for text in texts for event in _traced(text))
