"""A case: what once went wrong for somebody, as a trace with what is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from conformance.schedules.trace import Trace

Make: TypeAlias = Callable[[], Trace]


@dataclass(frozen=True)
class Case:
    """`name` is the number, with a word behind it where a number has several traces."""

    name: str
    title: str
    make: Make


class Collection:
    """The cases of one part, in order."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}

    def add(self, name: str) -> Callable[[Make], Make]:
        """Register a function that builds a trace; its docstring's first line is the title."""

        def register(make: Make) -> Make:
            assert name not in self.cases, f"two cases are called {name}"
            assert make.__doc__, f"case {name} has no docstring"
            self.cases[name] = Case(name, make.__doc__.splitlines()[0].rstrip("."), make)
            return make

        return register
