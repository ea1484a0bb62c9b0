"""Found by running random traces on another implementation (N1 to N6). See docs/other-implementations.md."""

from __future__ import annotations

from conformance.cases.case import Collection
from conformance.cases.script import HIDDEN, C, K, Script
from conformance.schedules.trace import CLOSED, CONTRACT, Discard, Materialize, Save, Shutdown, Start, Trace

OTHERS = Collection()


@OTHERS.add("N1")
def n1() -> Trace:
    """A block changes hands in a step that does not emit a key: the former tenant's rows of it are gone."""
    script = Script(keys=(HIDDEN, K, C))
    script.take(script.step(script.new("A", "wxyz", [0])))
    script.take(script.step(script.new("B", "abcd", [0]), finished=["A"], emits={HIDDEN.name}))
    script.take(script.step(script.new("D", "abcde", [0, 1], hit=4), finished=["B"]))
    return script.end()


@OTHERS.add("N2")
def n2() -> Trace:
    """A stage without hidden rows sees a key for the first time on a step with a hit: zeros before it."""
    script = Script(keys=(C,))
    script.take(script.step(script.new("A", "abcd", [0]), emits=()))
    script.take(script.step(script.new("B", "abcdef", [0, 1], hit=4), finished=["A"]))
    return script.end()


@OTHERS.add("N3")
def n3() -> Trace:
    """A request that was not in the batch is refused, and the step can be handed over still."""
    script = Script()
    label = script.step(script.new("A", "abcd", [0]))
    script.events.append(Materialize(label=label, reqs=["A", "stranger"], error=CONTRACT))
    script.take(label)
    return script.end()


@OTHERS.add("N4")
def n4() -> Trace:
    """A save without a start of its own is refused: its slots would be those of the step before."""
    script = Script()
    label = script.step(script.new("A", "abcd", [0]))
    script.events.append(Save(label=-1, batch=[], padded=0, rows={}, error=CONTRACT))
    script.take(label)
    return script.end()


@OTHERS.add("N5")
def n5() -> Trace:
    """After shutdown every call says so."""
    script = Script()
    script.take(script.step(script.new("A", "abcd", [0])))
    script.end()
    script.events += [Shutdown(), Shutdown(), Start(error=CLOSED), Discard(label=-1, error=CLOSED)]
    return script.trace()


@OTHERS.add("N6")
def n6() -> Trace:
    """Only rows of a key that no step emits any more are owed: they are handed over all the same."""
    script = Script(keys=(C,))
    script.take(script.step(script.new("A", "abcd", [0])))
    script.take(script.step(script.new("B", "abcdef", [0, 1], hit=4), finished=["A"], emits=()))
    return script.end()
