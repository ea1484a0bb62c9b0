"""How a fault gets into the production package: an edit of one function's source, or a function around it.

An edit is the few words that a maintainer might have written instead. It is applied to the function as it stands, never
to a copy of it, so a fault is always one small step away from the product; words that do not stand there any more are
an error (`StaleFaultError`), and so is a function that is gone. Nothing stays changed after the run.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, ModuleType
from typing import Any, Protocol, TypeAlias
from unittest import mock

Owner: TypeAlias = type[Any] | ModuleType
Function: TypeAlias = Callable[..., Any]


class StaleFaultError(LookupError):
    """A fault names a function, or words in it, that the production package does not have."""


class Change(Protocol):
    """One changed function."""

    @property
    def owner(self) -> Owner:
        """The class or module that has it."""
        ...

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def wrote(self) -> str:
        """What a maintainer might have written."""
        ...

    def made(self) -> Function:
        """The changed function. Raises `StaleFaultError`."""
        ...


@dataclass(frozen=True)
class Edit:
    """`old` in the source of a function becomes `new`. It has to stand there exactly once, indented as in the class."""

    owner: Owner
    name: str
    old: str
    new: str

    @property
    def wrote(self) -> str:
        """The old words, and what stands there instead."""
        return _instead(self.old, self.new)

    def made(self) -> Function:
        """See `Change`."""
        return _edited(self.owner, self.name, ((self.old, self.new),))


@dataclass(frozen=True)
class Edits:
    """Several words of one function, say for two lines in another order."""

    owner: Owner
    name: str
    words: tuple[tuple[str, str], ...]

    @property
    def wrote(self) -> str:
        """The old words, and what stands there instead."""
        return "; ".join(_instead(old, new) for old, new in self.words)

    def made(self) -> Function:
        """See `Change`."""
        return _edited(self.owner, self.name, self.words)


@dataclass(frozen=True)
class Wrap:
    """`around` makes another function of the original one."""

    owner: Owner
    name: str
    around: Callable[[Function], Function]
    wrote: str

    def made(self) -> Function:
        """See `Change`."""
        return self.around(original(self.owner, self.name))


@dataclass(frozen=True)
class FastMutant:
    """One seeded fault of the production package."""

    name: str
    fault: str
    rule: str
    """The rule that it breaks, by the reference model's name, or in the words of docs/machine.md."""
    changes: tuple[Change, ...]
    subject: str = "fast-eager"
    """What has to catch it."""
    cases: tuple[str, ...] = ()
    """Reported faults that it stands for."""

    @property
    def wrote(self) -> str:
        """One line of what a maintainer might have written."""
        return "; ".join(" ".join(change.wrote.split()) for change in self.changes)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The production package with the fault in it. Raises `StaleFaultError` where the fault has no place."""
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(mock.patch.object(change.owner, change.name, change.made()))
            yield


def original(owner: Owner, name: str) -> Function:
    """The production function. Raises `StaleFaultError` if there is none of its own."""
    found: Function | None = vars(owner).get(name)
    if found is None:
        raise StaleFaultError(f"{owner.__name__} has no {name} of its own: the fault needs another place")
    return found


def _edited(owner: Owner, name: str, words: tuple[tuple[str, str], ...]) -> Function:
    function = inspect.unwrap(original(owner, name))
    source = inspect.getsource(function)
    for old, new in words:
        if source.count(old) != 1:
            raise StaleFaultError(
                f"{owner.__name__}.{name} has {old!r} {source.count(old)} times, once is due: the fault needs new words"
            )
        source = source.replace(old, new)
    made: dict[str, Function] = {}
    # Compiled among the globals of the original: it sees the same names, patched ones included.
    code = compile(
        textwrap.dedent(source),
        f"<fault of {owner.__name__}.{name}>",
        "exec",
        flags=__future__.annotations.compiler_flag,
    )
    exec(code, function.__globals__, made)  # noqa: S102 - the source is the product's own, and the table's words
    return made[name]


def _instead(old: str, new: str) -> str:
    return f"{old.strip()} → {new.strip() or '(nothing)'}"


@cache
def _compiled(source: str, where: str) -> CodeType:
    code: CodeType = compile(source, where, "exec", flags=__future__.annotations.compiler_flag)
    return code
