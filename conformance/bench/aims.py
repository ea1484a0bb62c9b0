"""The aims, and whether a report meets them. Each is judged for both modes of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conformance.bench.contenders import COPY, OMNI, OURS
from conformance.bench.decode import LOCKED, LOCKED_ONCE, STEP
from conformance.bench.hits import added
from conformance.bench.measure import Figure, Figures
from conformance.bench.pending import ELSEWHERE, HERE, NONE
from conformance.bench.report import Report, Verdict, duration

FASTER_AT_DECODE = {256: 60.0, 64: 40.0, 8: 8.0, 1: 1.5}
"""How many times faster than the other implementation, by batch size."""
COPIES_AT_DECODE = {256: 2.5}
DEFERRED = 1.6
FASTER_AT_HIT = {16_384: 18.0, 512: 1.0}
COPIES_AT_HIT = {16_384: 1.25, 512: 2.0}
PENDING = 1.1
BLOCKS = 1.2
LOCK_S = 150e-6
GROWTH_BYTES = 4 << 20


def judge(report: Report) -> list[Verdict]:
    """Every aim of which the work was measured."""
    return [*_decode(report), *_hits(report), *_pending(report), *_blocks(report), *_locks(report), *_endured(report)]


def _decode(report: Report) -> Iterator[Verdict]:
    for batch, faster in FASTER_AT_DECODE.items():
        result = report.result("decode", batch=batch, deferred=0)
        if result is None:
            continue
        seconds = {name: parts[STEP].median for name, parts in result.figures.items()}
        work = f"save + materialize, decode batch {batch}"
        for mode in _modes(result.figures):
            yield _faster(work, mode, seconds.get(OMNI), seconds[mode], faster)
            if batch in COPIES_AT_DECODE:
                limit = COPIES_AT_DECODE[batch]
                yield _at_most(work, mode, "a copy of the bytes three times", seconds[mode], seconds[COPY], limit)
    for batch in FASTER_AT_DECODE:
        without = report.result("decode", batch=batch, deferred=0)
        with_it = report.result("decode", batch=batch, deferred=16)
        if without is None or with_it is None:
            continue
        for mode in _modes(with_it.figures):
            ours, base = with_it.figures[mode][STEP].median, without.figures[mode][STEP].median
            yield _at_most(
                f"the same with a deferred key, batch {batch}", mode, "the time without it", ours, base, DEFERRED
            )


def _hits(report: Report) -> Iterator[Verdict]:
    for rows, faster in FASTER_AT_HIT.items():
        result = report.result("hit", rows=rows)
        if result is None:
            continue
        seconds = {name: added(parts) for name, parts in result.figures.items()}
        work = f"merge a hit of {rows:,} rows"
        for mode in _modes(result.figures):
            yield _faster(work, mode, seconds.get(OMNI), seconds[mode], faster)
            yield _at_most(
                work, mode, "a plain copy into warm memory", seconds[mode], seconds[COPY], COPIES_AT_HIT[rows]
            )


def _pending(report: Report) -> Iterator[Verdict]:
    for result in report.results:
        if result.work != "pending":
            continue
        claim, readers = result.parameters["claim"], result.parameters["readers"]
        for mode in _modes(result.figures):
            parts = result.figures[mode]
            work = f"a save that claims {claim:,} slots, {readers} reads pending elsewhere"
            yield _at_most(work, mode, "with none pending", parts[ELSEWHERE].median, parts[NONE].median, PENDING)
            measured = f"{duration(parts[HERE].median)}: it gathers their rows first"
            yield Verdict("the same, pending on these slots", mode, "(none)", measured, None)


def _blocks(report: Report) -> Iterator[Verdict]:
    for result in report.results:
        if not result.work.startswith("blocks"):
            continue
        mode = result.work.removeprefix("blocks, ")
        counts = sorted(result.figures, key=int)
        seconds = {count: result.figures[count][STEP].median for count in counts}
        most = max(counts, key=seconds.__getitem__)
        work = f"{int(counts[0]):,} to {int(counts[-1]):,} blocks, same step"
        yield _at_most(work, mode, f"with {int(counts[0]):,} blocks", seconds[most], seconds[counts[0]], BLOCKS)


def _locks(report: Report) -> Iterator[Verdict]:
    result = report.result("decode", batch=256, deferred=0)
    if result is None:
        return
    for mode in _modes(result.figures):
        parts: Mapping[str, Figure] = result.figures[mode]
        held = parts[LOCKED].median
        measured = f"{duration(held)} a step in all, {duration(parts[LOCKED_ONCE].median)} at a time"
        yield Verdict("state lock held, batch 256", mode, f"at most {duration(LOCK_S)}", measured, held <= LOCK_S)


def _endured(report: Report) -> Iterator[Verdict]:
    for mode, endured in report.endured.items():
        work = f"{endured.steps:,} steps with {endured.hits:,} hits, {endured.aborts:,} aborts, "
        work += f"{endured.discarded:,} discards"
        measured = f"{endured.growth / 2**20:+.1f} MiB of {endured.resident[-1] / 2**20:.0f} MiB"
        aim = f"resident memory flat (at most {GROWTH_BYTES >> 20} MiB)"
        yield Verdict(work, mode, aim, measured, endured.growth <= GROWTH_BYTES)
        grown = ", ".join(f"{path}: {then} -> {now}" for path, (then, now) in endured.grown.items())
        yield Verdict(work, mode, "every container back to its size", grown or "all of them", not grown)


def _modes(figures: Figures) -> list[str]:
    return [mode for mode in OURS if mode in figures]


def _faster(work: str, mode: str, theirs: float | None, ours: float, times: float) -> Verdict:
    aim = "faster than vllm-omni" if times == 1 else f"at least {times:g}x faster than vllm-omni"
    if theirs is None:
        return Verdict(work, mode, aim, f"{duration(ours)}; vllm-omni is not here", None)
    measured = f"{theirs / ours:.1f}x ({duration(ours)} against {duration(theirs)})"
    return Verdict(work, mode, aim, measured, theirs >= times * ours)


def _at_most(work: str, mode: str, what: str, ours: float, base: float, times: float) -> Verdict:
    measured = f"{ours / base:.2f}x ({duration(ours)} against {duration(base)})" if base > 0 else duration(ours)
    return Verdict(work, mode, f"at most {times:g}x {what}", measured, ours <= times * base)
