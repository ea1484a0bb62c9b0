"""TLA+ values in Python: read them from TLC's output, write them back, store them as JSON.

A number is an ``int``, a string a ``str``, a set a ``frozenset``, a sequence a ``tuple``; a function or a record is a
`Function`. As in TLA+, a function whose domain is ``1 .. n`` *is* a sequence, so it is always read as a ``tuple``.

The package ``tla`` parses whole TLA+ modules and needs milliseconds for a value; a state graph has a hundred thousand
of them. The few forms that TLC prints are read here directly, and a test holds this reader against that package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

Json: TypeAlias = bool | int | str | list[Any] | dict[str, Any]
"""What a value is stored as; see `to_json`."""


class Function(Mapping[Any, Any]):
    """A function or record: immutable, hashable, and without regard to the order of its entries."""

    __slots__ = ("_entries", "_hash")

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()) -> None:
        self._entries = dict(entries)
        self._hash: int | None = None

    def __getitem__(self, key: object) -> Any:
        return self._entries[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._entries.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"Function({self._entries!r})"


class ModelValue(str):
    """A name that TLA+ knows to differ from everything else."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"ModelValue({str(self)!r})"


def function(entries: Mapping[Any, Any]) -> Any:
    """The value of a function with these entries: a sequence if its domain is ``1 .. n``."""
    if all(isinstance(key, int) and not isinstance(key, bool) for key in entries):
        size = len(entries)
        if all(index in entries for index in range(1, size + 1)):
            return tuple(entries[index] for index in range(1, size + 1))
    return Function(entries)


class ValueSyntaxError(ValueError):
    """A text that is no TLA+ value."""


_TOKEN = re.compile(r'\s*(?:(-?\d+)|("(?:[^"\\]|\\.)*")|([A-Za-z_]\w*)|(<<|>>|\|->|:>|@@|\.\.|[\[\]{}(),]))')


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueSyntaxError(f"cannot read {text[position : position + 40]!r} as a TLA+ value")
        found.append(match.group().strip())
        position = match.end()
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.next = 0

    def peek(self) -> str:
        return self.tokens[self.next] if self.next < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise ValueSyntaxError(f"expected {expected or 'a value'} but found {token or 'the end'} in {self.text!r}")
        self.next += 1
        return token

    def items(self, closing: str) -> list[Any]:
        found: list[Any] = []
        while self.peek() != closing:
            if found:
                self.take(",")
            found.append(self.value())
        self.take(closing)
        return found

    def record(self) -> Any:
        entries: dict[str, Any] = {}
        while self.peek() != "]":
            if entries:
                self.take(",")
            name = self.take()
            self.take("|->")
            entries[name] = self.value()
        self.take("]")
        return Function(entries)

    def pairs(self) -> Any:
        """What stands in parentheses: one value, or ``key :> value @@ key :> value``."""
        first = self.value()
        if self.peek() != ":>":
            self.take(")")
            return first
        entries: dict[Any, Any] = {}
        key = first
        while True:
            self.take(":>")
            entries.setdefault(key, self.value())
            if self.peek() != "@@":
                break
            self.take("@@")
            key = self.value()
        self.take(")")
        return function(entries)

    def value(self) -> Any:
        word = self.take()
        opened = {"<<": self.sequence, "{": self.set, "[": self.record, "(": self.pairs}.get(word)
        return opened() if opened is not None else self.atom(word)

    def sequence(self) -> Any:
        return tuple(self.items(">>"))

    def set(self) -> Any:
        return frozenset(self.items("}"))

    def atom(self, word: str) -> Any:
        if word in {"TRUE", "FALSE"}:
            return word == "TRUE"
        if word[0] == '"':
            return re.sub(r"\\(.)", r"\1", word[1:-1])
        if word[0] == "-" or word[0].isdigit():
            return self.number(int(word))
        if word[0].isalpha() or word[0] == "_":
            return ModelValue(word)
        raise ValueSyntaxError(f"unexpected {word} in {self.text!r}")

    def number(self, first: int) -> Any:
        """A number, or an interval of them."""
        if self.peek() != "..":
            return first
        self.take("..")
        return frozenset(range(first, int(self.take()) + 1))


def parse_value(text: str) -> Any:
    """The value that a text denotes."""
    reader = _Reader(text)
    value = reader.value()
    if reader.peek():
        raise ValueSyntaxError(f"unexpected {reader.peek()} after a value in {text!r}")
    return value


def _sorted(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=format_value)


def format_value(value: object) -> str:
    """The value as TLA+ text. Sets and functions are written in a fixed order."""
    match value:
        case bool():
            text = "TRUE" if value else "FALSE"
        case int() | ModelValue():
            text = str(value)
        case str():
            text = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case tuple() | list():
            text = "<<" + ", ".join(map(format_value, value)) + ">>"
        case frozenset() | set():
            text = "{" + ", ".join(sorted(map(format_value, value))) + "}"
        case Mapping():
            text = _format_function(value)
        case _:
            raise TypeError(f"{value!r} is no TLA+ value")
    return text


def _format_function(value: Mapping[Any, Any]) -> str:
    if not value:
        return "<<>>"
    keys = _sorted(value)
    if all(isinstance(key, str) and re.fullmatch(r"[A-Za-z]\w*", key) for key in keys):
        return "[" + ", ".join(f"{key} |-> {format_value(value[key])}" for key in keys) + "]"
    return "(" + " @@ ".join(f"{format_value(key)} :> {format_value(value[key])}" for key in keys) + ")"


def to_json(value: object) -> Json:
    """The value for a JSON file, in the manner of the informal trace format of Apalache.

    Numbers, strings and truth values are themselves, a sequence is an array, a record an object. A set is
    ``{"#set": [...]}`` and any other function ``{"#map": [[key, value], ...]}``.
    """
    match value:
        case ModelValue():
            return {"#model": str(value)}
        case bool() | int() | str():
            return value
        case tuple() | list():
            return [to_json(item) for item in value]
        case frozenset() | set():
            return {"#set": [to_json(item) for item in _sorted(value)]}
        case Mapping():
            if all(isinstance(key, str) for key in value):
                return {key: to_json(value[key]) for key in _sorted(value)}
            return {"#map": [[to_json(key), to_json(value[key])] for key in _sorted(value)]}
        case _:
            raise TypeError(f"{value!r} is no TLA+ value")


def from_json(stored: object) -> Any:
    """The value that `to_json` stored."""
    match stored:
        case bool() | int() | str():
            return stored
        case list():
            return tuple(from_json(item) for item in stored)
        case {"#set": items}:
            return frozenset(from_json(item) for item in items)
        case {"#map": pairs}:
            return function({from_json(key): from_json(item) for key, item in pairs})
        case {"#model": name}:
            return ModelValue(name)
        case dict():
            return Function({key: from_json(item) for key, item in stored.items()})
        case _:
            raise TypeError(f"{stored!r} stores no TLA+ value")
