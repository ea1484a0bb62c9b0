"""Which rows come back on a hit: slots, order, spans, keys (E01 to E12, E41, E42, E45, E46, E48, D1, D3)."""

from __future__ import annotations

from conformance.cases.case import Collection
from conformance.cases.script import HIDDEN, K, Script
from conformance.schedules.trace import CONTRACT, KeySetting, Trace

HITS = Collection()


@HITS.add("E01")
def e01() -> Trace:
    """A hit hands over the rows of the whole prompt, not of what was computed alone."""
    script = Script()
    script.take(script.step(script.new("A", "abcdefgh", [0, 1])))
    script.take(script.step(script.new("B", "abcdefghijkl", [0, 1, 2], hit=8), finished=["A"]))
    return script.end()


@HITS.add("E02")
def e02() -> Trace:
    """A batch is split by the tokens that each request computes, in whatever order it is asked for."""
    script = Script(num_blocks=12)
    script.take(script.step(script.new("A", "abcdefgh", [0, 1]), script.new("d", "xyz", [4])))
    step = script.step(
        script.go("d", "w"),
        script.new("h", "abcdefghij", [0, 1, 2], hit=8),
        script.new("n", "pqr", [5]),
        finished=["A"],
    )
    script.take(step, "n", "h", "d")
    return script.end()


def _diverging(*, finished: bool) -> Trace:
    script = Script()
    script.take(script.step(script.new("A", "abcdefghijkl", [0, 1, 2])))
    script.take(script.step(script.new("B", "abcdefghwxyz", [0, 1, 3], hit=8), finished=["A"] if finished else []), "B")
    script.take(script.step(script.new("C", "abcdefghijklm", [0, 1, 2, 4], hit=12), finished=[] if finished else ["A"]))
    script.take(script.step(script.new("D", "abcdefghwxyzm", [0, 1, 3, 5], hit=12)))
    return script.end()


@HITS.add("E03-finished")
def e03_finished() -> Trace:
    """Two prompts part within a shared prefix: each keeps its own blocks behind it; the first has finished."""
    return _diverging(finished=True)


@HITS.add("E03-running")
def e03_running() -> Trace:
    """The same while the first still runs, and finishes later."""
    return _diverging(finished=False)


@HITS.add("E04")
def e04() -> Trace:
    """A key with much wider rows than any other is cached like them: a hit carries all of it."""
    wide = KeySetting(name="wide", width=512, item_bytes=8)
    script = Script(keys=(HIDDEN, wide))
    script.take(script.step(script.new("A", "abcd", [0])))
    script.take(script.step(script.new("B", "abcdef", [0, 1], hit=4), finished=["A"]))
    return script.end()


@HITS.add("E06")
def e06() -> Trace:
    """A hit that ends inside a block hands over that part of the block, too."""
    script = Script()
    script.take(script.step(script.new("A", "abcdef", [0, 1])))
    script.take(script.step(script.new("B", "abcdefgh", [0, 1], hit=6), finished=["A"]))
    return script.end()


@HITS.add("E11")
def e11() -> Trace:
    """A key that changes its width is refused by name, and the same step may be saved rightly then."""
    script = Script()
    script.take(script.step(script.new("A", "abcd", [0])))
    hit = script.new("B", "abcdef", [0, 1], hit=4)
    script.start(hit, finished=["A"])
    script.save_wrongly(hit, error=CONTRACT, widths={"k": 3})
    script.take(script.save(hit))
    return script.end()


@HITS.add("E12")
def e12() -> Trace:
    """Positions whose step did not emit a key are zeros, whatever the buffers held before."""
    script = Script()
    script.take(script.step(script.new("X", "zyxwvuts", [2, 3])))
    script.take(script.step(script.new("A", "abcd", [0]), finished=["X"], emits={HIDDEN.name}))
    script.take(script.step(script.new("B", "abcdef", [0, 4], hit=4), finished=["A"]))
    return script.end()


@HITS.add("E41")
def e41() -> Trace:
    """A hit on a block that nobody ever computed raises; the next step is served."""
    script = Script()
    script.take(script.step(script.new("A", "wxyz", [1])))
    script.take(script.step(script.new("B", "abcdef", [5, 6], hit=4), finished=["A"]))
    script.take(script.step(script.go("B", "g")))
    return script.end()


@HITS.add("E41-unsaved")
def e41_unsaved() -> Trace:
    """A block computed by a step that was never saved holds nobody's rows, its former tenant's least of all."""
    script = Script()
    script.take(script.step(script.new("A", "wxyz", [5])))
    lost = script.new("L", "abcd", [5])
    script.start(lost, finished=["A"])
    script.lose(lost)
    script.take(script.step(script.new("B", "abcdef", [5, 6], hit=4), finished=["L"]))
    return script.end()


@HITS.add("E42")
def e42() -> Trace:
    """Equal ids under another condition are other blocks, and rows follow blocks; under the same they are hit."""
    script = Script()
    script.take(script.step(script.new("A", "aaaa", [0], salt=1)))
    script.take(script.step(script.new("B", "aaaaa", [1, 2], salt=2), finished=["A"]))
    script.take(script.step(script.new("C", "aaaaa", [0, 3], salt=1, hit=4), finished=["B"]))
    script.take(script.step(script.new("D", "aaaaa", [1, 4], salt=2, hit=4), finished=["C"]))
    return script.end()


@HITS.add("E45")
def e45() -> Trace:
    """A key that lags behind the hidden rows: where it was not emitted it is zeros, and what was is not lost."""
    script = Script()
    script.take(script.step(script.new("A", "abcd", [0])))
    script.take(script.step(script.go("A", "efgh", blocks=[0, 1]), emits={HIDDEN.name}))
    script.take(script.step(script.resumed("A", [0, 1], hit=4, count=4), emits={HIDDEN.name}))
    script.take(script.step(script.new("B", "abcdefghij", [0, 1, 2], hit=8), finished=["A"]))
    return script.end()


@HITS.add("E46")
def e46() -> Trace:
    """A stage that needs no hidden rows: its key is handed over alone, valid from where it was emitted on."""
    script = Script(keys=(K,))
    script.take(script.step(script.new("A", "abcdefgh", [0, 1], count=4), emits=()))
    script.take(script.step(script.go("A")))
    script.take(script.step(script.new("B", "abcdefghi", [0, 1, 2], hit=8), finished=["A"]))
    return script.end()


@HITS.add("E48")
def e48() -> Trace:
    """A long prompt in chunks, then hit, then with a last chunk of one token: each time all rows, once."""
    text = "".join(chr(ord("A") + n) for n in range(37))
    script = Script(block_size=16, num_blocks=8)
    script.take(script.step(script.new("A", text, [0, 1, 2], count=16)))
    script.take(script.step(script.go("A", count=16)))
    script.take(script.step(script.go("A")))
    script.take(script.step(script.new("B", text, [0, 1, 3], hit=32), finished=["A"]))
    script.take(script.step(script.new("C", text, [0, 1, 4], hit=32, count=4), finished=["B"]))
    script.take(script.step(script.go("C", count=1)))
    return script.end()


@HITS.add("D1")
def d1() -> Trace:
    """A step that emits nothing of a key hands over the hit's rows of it all the same."""
    script = Script()
    script.take(script.step(script.new("A", "abcd", [0])))
    script.take(script.step(script.new("B", "abcdef", [0, 1], hit=4), finished=["A"], emits={HIDDEN.name}))
    script.take(script.step(script.go("B", "g")))
    return script.end()


@HITS.add("D3")
def d3() -> Trace:
    """A key seen for the first time on a step with a hit: zeros before it."""
    script = Script()
    script.take(script.step(script.new("A", "abcd", [0]), emits={HIDDEN.name}))
    script.take(script.step(script.new("B", "abcdef", [0, 1], hit=4), finished=["A"]))
    return script.end()
