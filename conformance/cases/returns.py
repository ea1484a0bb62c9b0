"""Preemption, resume, replacement, continuation (E21 to E26, E47)."""

from __future__ import annotations

from conformance.cases.case import Collection
from conformance.cases.script import HIDDEN, C, K, Script
from conformance.schedules.trace import CONTRACT, Trace

RETURNS = Collection()


@RETURNS.add("E21")
def e21() -> Trace:
    """A resume with a smaller hit hands rows over again, and the spans say which."""
    script = Script(keys=(HIDDEN, K, C))
    script.take(script.step(script.new("A", "abcdefgh", [0, 1])))
    script.take(script.step(script.resumed("A", [0, 2], hit=4, count=2)))
    script.take(script.step(script.go("A", "ij", blocks=[0, 2, 3])))
    script.take(script.step(script.new("B", "abcdefghij", [0, 2, 4], hit=8), finished=["A"]))
    return script.end()


@RETURNS.add("E21-gap")
def e21_gap() -> Trace:
    """A resume with a larger hit than what was handed over: the gap comes from the cache."""
    script = Script(keys=(HIDDEN, K, C))
    script.take(script.step(script.new("A", "abcdefgh", [0, 1], count=4)))
    script.take(script.step(script.new("B", "abcdefgh", [2, 3])))
    script.take(script.step(script.resumed("A", [2, 3], hit=7)))
    return script.end()


def _told_wrongly(blocks: list[int] | None) -> Trace:
    script = Script()
    script.take(script.step(script.new("A", "abcdefghi", [0, 1], count=4), script.new("B", "mnop", [2])))
    script.take(script.step(script.new("D", "abcdefgh", [3, 4])))
    back = script.resumed("A", [3, 4, 5], hit=8)
    script.start(back, error=CONTRACT, tables={"A": blocks})
    script.lose(back)
    script.take(script.step(script.go("B", "q", blocks=[2, 6]), finished=["A"]))
    return script.end()


@RETURNS.add("E23-none")
def e23_none() -> Trace:
    """A request that comes back without a block table is refused; the others go on in the next step."""
    return _told_wrongly(None)


@RETURNS.add("E23-short")
def e23_short() -> Trace:
    """The same with a table that is too short for its hit."""
    return _told_wrongly([3])


@RETURNS.add("E24")
def e24() -> Trace:
    """A prompt in chunks is preempted and computed again from its start: the consumer has each position."""
    script = Script(keys=(HIDDEN, K, C))
    script.take(script.step(script.new("A", "abcdefghij", [0, 1, 2], count=4)))
    script.take(script.step(script.go("A", count=4)))
    script.take(script.step(script.resumed("A", [3, 4, 5], count=4)))
    script.take(script.step(script.go("A", count=4)))
    script.take(script.step(script.go("A")))
    return script.end()


@RETURNS.add("E25")
def e25() -> Trace:
    """Another prompt under the same id starts anew: nothing of the old one's marks or rows."""
    script = Script(keys=(HIDDEN, K, C))
    script.take(script.step(script.new("P", "mnopqrst", [2, 3])))
    script.take(script.step(script.new("A", "abcdefgh", [0, 1]), finished=["P"]))
    script.take(script.step(script.new("A", "mnopqrstuv", [2, 3, 4], hit=8), finished=["A"]))
    script.take(script.step(script.new("A", "abcdefghi", [0, 1, 5], hit=8), finished=["A"]))
    return script.end()


@RETURNS.add("E26")
def e26() -> Trace:
    """The next chunk of a live request is no hit: its rows alone; a later request hits all of it."""
    script = Script(keys=(HIDDEN, K, C))
    script.take(script.step(script.new("A", "abcdefgh", [0, 1])))
    script.take(script.step(script.again("A", "ijkl", blocks=[0, 1, 2])))
    script.take(script.step(script.new("A", "abcdefghm", [0, 1, 3], hit=8), finished=["A"]))
    return script.end()


@RETURNS.add("E47")
def e47() -> Trace:
    """A long preemption, then a shorter one: rows are kept by slot, and the longer's stay."""
    script = Script(keys=(HIDDEN, K, C), num_blocks=12)
    script.take(script.step(script.new("A", "abcdefghij", [0, 1, 2])))
    script.take(script.step(script.resumed("A", [0, 1, 3], hit=8, count=1)))
    script.take(script.step(script.resumed("A", [0, 4, 5], hit=4, count=3)))
    script.take(script.step(script.go("A")))
    script.take(script.step(script.new("B", "abcdefghijk", [0, 1, 6], hit=8), finished=["A"]))
    return script.end()
