"""The whole benchmark: which pieces of work, in which sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from conformance.bench import other
from conformance.bench.aims import judge
from conformance.bench.contenders import EAGER, OURS, Contender, contenders
from conformance.bench.decode import Decode, measure_blocks, measure_decode
from conformance.bench.endurance import Endurance, endure
from conformance.bench.hits import Hit, measure_hit
from conformance.bench.measure import Pace
from conformance.bench.pending import Pending, measure_pending
from conformance.bench.report import Report, Result


class Work(StrEnum):
    """Pieces of work."""

    DECODE = "decode"
    HIT = "hit"
    PENDING = "pending"
    BLOCKS = "blocks"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    works: Sequence[Work]
    pace: Pace
    batches: Sequence[int]
    hits: Sequence[int]
    pending: Pending
    blocks: Sequence[int]
    blocks_work: Decode
    long_run: Endurance
    width: int
    deferred: Sequence[int] = (0, 16)
    threads: int = 1
    download: bool = True
    """Whether the other implementation's wheel may be downloaded."""


FULL = Plan(
    works=tuple(Work),
    pace=Pace(),
    batches=(256, 64, 8, 1),
    hits=(16, 128, 512, 2048, 16_384),
    pending=Pending(),
    blocks=(1_000, 10_000, 100_000, 1_000_000),
    blocks_work=Decode(batch=256, width=128, blocks=3),  # a million blocks of the usual width would not fit into memory
    long_run=Endurance(),
    width=2048,
)

QUICK = Plan(
    works=tuple(Work),
    pace=Pace(rounds=1, burst=1, warm=0),
    batches=(4, 1),
    hits=(64,),
    pending=Pending(readers=4, hit_blocks=2, claim=64, width=16),
    blocks=(100, 1_000),
    blocks_work=Decode(batch=4, width=8, blocks=2),
    long_run=Endurance(steps=100, looks=3, checked=2),
    width=16,
    download=False,
)
"""Everything once, in tiny sizes: shows that it runs, and says nothing about time."""


def run(plan: Plan, command: str, on_result: Callable[[Result], None], on_work: Callable[[str], None]) -> Report:
    """Measure. `on_work` is told what comes, `on_result` what came."""
    load = os.getloadavg()[0]
    torch.set_num_threads(plan.threads)
    wheel = other.find_wheel(download=plan.download)
    everybody = contenders(None if wheel is None else other.load(wheel))
    about = f"{other.NAME} {other.VERSION}" if wheel is not None else f"{other.NAME} {other.VERSION} is not here"
    report = Report(command, plan.threads, about, load=load)
    for work in plan.works:
        if work is Work.LONG:
            for mode in OURS:
                on_work(f"a long run of {plan.long_run.steps:,} steps, {mode}")
                report.endured[mode] = endure(replace(plan.long_run, eager=mode == EAGER))
        else:
            for result in _MEASURES[work](plan, everybody, on_work):
                report.results.append(result)
                on_result(result)
    report.verdicts = judge(report)
    return report


def _decode(plan: Plan, everybody: Mapping[str, Contender], on_work: Callable[[str], None]) -> Iterator[Result]:
    for deferred in plan.deferred:
        for batch in plan.batches:
            on_work(f"decode, batch {batch}" + (", with a deferred key" if deferred else ""))
            decode = Decode(batch=batch, width=plan.width, deferred=deferred)
            yield Result("decode", {"batch": batch, "deferred": deferred}, measure_decode(decode, everybody, plan.pace))


def _hit(plan: Plan, everybody: Mapping[str, Contender], on_work: Callable[[str], None]) -> Iterator[Result]:
    for rows in plan.hits:
        on_work(f"a hit of {rows:,} rows")
        yield Result("hit", {"rows": rows}, measure_hit(Hit(rows, width=plan.width), everybody, plan.pace))


def _pending(plan: Plan, everybody: Mapping[str, Contender], on_work: Callable[[str], None]) -> Iterator[Result]:
    on_work("a save beside pending reads")
    pace = replace(plan.pace, burst=1, warm=min(1, plan.pace.warm))
    parameters = {"claim": plan.pending.claim, "readers": plan.pending.readers}
    yield Result("pending", parameters, measure_pending(plan.pending, everybody, pace))


def _blocks(plan: Plan, everybody: Mapping[str, Contender], on_work: Callable[[str], None]) -> Iterator[Result]:
    work = plan.blocks_work
    for mode in OURS:
        on_work(f"caches of different sizes, {mode}")
        figures = measure_blocks(work, plan.blocks, everybody[mode], plan.pace)
        yield Result(f"blocks, {mode}", {"batch": work.batch, "width": work.width}, figures)


_MEASURES = {Work.DECODE: _decode, Work.HIT: _hit, Work.PENDING: _pending, Work.BLOCKS: _blocks}
