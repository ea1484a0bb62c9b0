"""Hits of the same step, and reads that are fetched late (E14 to E20)."""

from __future__ import annotations

from conformance.cases.case import Collection
from conformance.cases.script import HIDDEN, C, K, Script
from conformance.schedules.trace import Trace

PLANS = Collection()


@PLANS.add("E14")
def e14() -> Trace:
    """A hit on what another request of the same step computes waits for it, or reads what is staged."""
    script = Script(keys=(HIDDEN, K, C))
    step = script.step(script.new("A", "abcdefgh", [0, 1]), script.new("B", "abcdefghi", [0, 1, 2], hit=8))
    script.take(step, "B")
    return script.end()


@PLANS.add("E14-failing")
def e14_failing() -> Trace:
    """The same, and the writer fails: the rows, or its error; never zeros."""
    script = Script(keys=(HIDDEN, K, C))
    script.fail("write")
    step = script.step(script.new("A", "abcdefgh", [0, 1]), script.new("B", "abcdefghi", [0, 1, 2], hit=8))
    script.take(step, "B")
    return script.end()


@PLANS.add("E15")
def e15() -> Trace:
    """A same-step hit on a block that had another tenant: the new tenant's rows, committed by then or not."""
    script = Script(keys=(HIDDEN, K, C))
    script.take(script.step(script.new("O", "wxyz", [0])))
    step = script.step(
        script.new("N", "abcd", [0]), script.new("B", "abcdef", [0, 1], hit=4), finished=["O"], emits={HIDDEN.name, "c"}
    )
    script.take(step, "B")
    return script.end()


def _used_again(*, finished: bool) -> Trace:
    script = Script(keys=(HIDDEN, K, C))
    script.take(script.step(script.new("A", "abcd", [0])))
    planned = script.step(script.new("R", "abcdef", [0, 1], hit=4), finished=["A"])
    script.take(script.step(script.new("B", "wxyz", [0]), finished=["R"] if finished else []))
    script.take(planned)
    return script.end()


@PLANS.add("E16-finished")
def e16_finished() -> Trace:
    """A hit is handed over after its block has another tenant: its own rows; the reader has finished."""
    return _used_again(finished=True)


@PLANS.add("E16-running")
def e16_running() -> Trace:
    """The same with a reader that still runs."""
    return _used_again(finished=False)


@PLANS.add("E17")
def e17() -> Trace:
    """Four hits wait while one save takes all their blocks: each gets its own rows, in any order."""
    script = Script(num_blocks=12)
    script.take(script.step(script.new("A", "abcdefghijklmnop", [0, 1, 2, 3])))
    hits = [script.new(f"R{n}", "abcdefghijklmnop" + "wxyz"[n], [0, 1, 2, 3, 4 + n], hit=16) for n in range(4)]
    waiting = script.step(*hits, finished=["A"])
    last = script.step(script.new("B", "ponmlkjihgfedcba", [0, 1, 2, 3]), finished=[f"R{n}" for n in range(4)])
    script.take(last)
    script.take(waiting, "R2", "R0", "R3", "R1")
    return script.end()


@PLANS.add("E19")
def e19() -> Trace:
    """What belongs to a step stays with it: steps are handed over in another order, and one computes nothing."""
    script = Script()
    first = script.step(script.new("A", "abcd", [0]), script.new("B", "mnop", [2]))
    second = script.step(script.go("A", "efgh", blocks=[0, 1]), finished=["B"])
    script.start(finished=["A"])
    script.take(second)
    script.take(first)
    return script.end()


@PLANS.add("E20")
def e20() -> Trace:
    """Steps share few staging pages, and the engine overwrites what it saved: no step shows another's rows."""
    script = Script(keys=(HIDDEN, K, C), depth=2, num_blocks=12)
    labels = [script.step(script.new("A", "abcd", [0]))]
    for n in range(1, 6):
        if len(labels) == 2:
            script.take(labels.pop(0))
        labels.append(script.step(script.go("A", "efghijklmnopqrstuvwxyz"[4 * n - 4 : 4 * n], blocks=range(n + 1))))
    return script.end()
