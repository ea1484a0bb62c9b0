"""Aborts, failures, and bounds of memory (E28 to E38)."""

from __future__ import annotations

from conformance.cases.case import Collection
from conformance.cases.script import HIDDEN, C, K, Script
from conformance.schedules.trace import CONTRACT, MEMORY, TIMEOUT, Trace

BOUNDS = Collection()


@BOUNDS.add("E28")
def e28() -> Trace:
    """A request is aborted with rows still on the device: a hit in the very step that tells it gets them."""
    script = Script(keys=(HIDDEN, C))
    script.discard(script.step(script.new("A", "abcd", [0])))
    script.take(script.step(script.new("B", "abcdef", [0, 1], hit=4), finished=["A"]))
    return script.end()


@BOUNDS.add("E29")
def e29() -> Trace:
    """Ends of requests that were never seen, or that computed nothing, are no error and leave nothing."""
    script = Script()
    script.take(script.step(script.new("A", "abcd", [0]), finished=["stranger"]))
    script.start(script.new("Z", "wxyz", [3], count=0))
    script.start(finished=["Z", "stranger"])
    script.take(script.step(script.go("A", "e", blocks=[0, 1])))
    return script.end()


@BOUNDS.add("E31-copy")
def e31_copy() -> Trace:
    """A copy to the host fails behind a published block: whoever asks is right, or told of it; then all are."""
    return _failing("copy")


@BOUNDS.add("E31-write")
def e31_write() -> Trace:
    """The same with a write to the pool."""
    return _failing("write")


def _failing(stage: str) -> Trace:
    script = Script(keys=(HIDDEN, K, C))
    script.take(script.step(script.new("A", "abcd", [0]), script.new("B", "efgh", [1])))
    script.fail(stage)
    script.take(script.step(script.go("A", "e", blocks=[0, 2]), script.go("B", "i", blocks=[1, 3])))
    script.take(script.step(script.new("D", "abcdx", [0, 4], hit=4), finished=["A", "B"]))
    return script.end()


@BOUNDS.add("E32")
def e32() -> Trace:
    """No staging page is free: the save gives up in time, and works once a step is consumed."""
    script = Script(depth=2)
    first = script.step(script.new("A", "abcd", [0]))
    script.step(script.go("A", "e", blocks=[0, 1]))
    third = script.go("A", "f")
    script.start(third)
    script.save_wrongly(third, error=TIMEOUT)
    script.take(first)
    script.take(script.save(third))
    return script.end()


@BOUNDS.add("E33")
def e33() -> Trace:
    """A request that decodes for long cannot hold the whole byte budget: its rows go to the host in between."""
    script = Script(keys=(HIDDEN, C), budget=48)
    script.take(script.step(script.new("A", "a", [0])))
    for n in range(1, 12):
        script.take(script.step(script.go("A", "abcdefghijkl"[n], blocks=range(n // 4 + 1))))
    script.take(script.step(script.new("B", "abcdefghijklm", [0, 1, 2, 3], hit=12), finished=["A"]))
    return script.end()


@BOUNDS.add("E33-clone")
def e33_clone() -> Trace:
    """The device has no room for a clone that the budget allows: the save fails, and may be made again."""
    script = Script(keys=(HIDDEN, C))
    first = script.new("A", "abcd", [0])
    script.start(first)
    script.save_wrongly(first, error=MEMORY, clone_fails=True)
    script.take(script.save(first))
    script.take(script.step(script.new("B", "abcdef", [0, 1], hit=4), finished=["A"]))
    return script.end()


@BOUNDS.add("E35")
def e35() -> Trace:
    """Many short requests with hits, aborts, discards and empty steps: at rest nothing is left of any."""
    script = Script(keys=(HIDDEN, K, C))
    before: list[str] = []
    for n in range(100):
        req, block = f"r{n}", n % 4
        text = "wxyz"[block] + "abcd"
        if n < 4:
            label = script.step(script.new(req, text, [block, 4 + block]), finished=before)
        else:
            label = script.step(script.new(req, text, [block, 4 + n % 3], hit=4), finished=before)
        if n % 3 == 1:
            script.discard(label)
        else:
            script.take(label)
        if n % 10 == 9:
            script.start()
        before = [req]
    return script.end()


@BOUNDS.add("E38")
def e38() -> Trace:
    """A step that is larger than a staging page is refused before anything is touched."""
    script = Script(page_rows=4)
    script.take(script.step(script.new("A", "abcd", [0])))
    large = script.new("B", "mnopqrst", [1, 2])
    script.start(large)
    script.save_wrongly(large, error=CONTRACT)
    script.lose(large)
    script.take(script.step(script.new("C", "abcde", [0, 3], hit=4), finished=["A", "B"]))
    return script.end()
