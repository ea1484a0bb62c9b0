"""Run a workload on a real engine with the cache and without prefix caching, and compare every row.

What has to hold, for each request that was not aborted: every position it computed was handed over at least once, for
every key that is emitted in each step; for all requests: each hidden row handed over has the bits of the run without
prefix caching, each mm row is the hash of the request's own tokens.
"""

from __future__ import annotations

import atexit
import functools
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import torch

from conformance.vllm import hooks
from conformance.vllm.engine import REFERENCE, Request, StepEngine
from conformance.vllm.environment import RunnerKind
from conformance.vllm.recorder import Received, rows_equal
from conformance.vllm.truth import SOMETIMES_KEY, TOKEN_KEYS, true_rows
from conformance.vllm.workloads import Job, Phases, Workload
from omni_prefix_fast.types import HIDDEN_KEY

Progress = Callable[[int], None]
"""Called with the number of requests that ended since the last call."""

_STEPS_AT_MOST = 20_000


@dataclass(slots=True)
class Report:
    """One workload's outcome."""

    name: str
    runner: RunnerKind
    seed: int
    requests: int = 0
    aborts: int = 0
    rows_served: int = 0
    """Rows that came from the cache: handed over, and not computed by a forward."""
    rows_compared: int = 0
    differences: int = 0
    gaps: int = 0
    rows_again: int = 0
    zero_rows: int = 0
    """Rows of a key that were zeros because the request had hit blocks without it."""
    slots_checked: int = 0
    """Slots that were compared with the engine's own slot mapping."""
    late: int = 0
    """The most steps between a step and its handover."""
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What should have happened for the workload to count, and did not."""

    @property
    def ok(self) -> bool:
        """Whether everything held and the workload did what it is for."""
        return not (self.differences or self.gaps or self.problems or self.missing)

    def value(self, name: str) -> int:
        """A count by name, of the engine's or of the comparison's."""
        return self.counts[name] if name in self.counts else int(getattr(self, name))

    def line(self) -> str:
        """One line for a log, with the seed to repeat it."""
        shown = ("hits", "same_step_hits", "preemptions", "resumes", "resumes_beyond_delivered", "blocks_reused")
        return (
            f"{self.runner} {self.name} seed={self.seed}: {self.requests} requests, {self.aborts} aborted, "
            + ", ".join(f"{name}={self.counts.get(name, 0)}" for name in shown)
            + f", late={self.late}, rows from cache={self.rows_served}, compared={self.rows_compared}, "
            f"differences={self.differences}, gaps={self.gaps}, {self.seconds:.1f} s"
        )

    def text(self) -> str:
        """The line, and what went wrong below it."""
        wrong = [*self.problems, *(f"{name} is zero: the workload did not do what it is for" for name in self.missing)]
        return "\n  ".join([self.line(), *wrong])


def drive(engine: StepEngine, phases: Phases, progress: Progress | None = None) -> None:
    """Submit the jobs of each phase as they arrive, abort those that are to be aborted, and step until all are done."""
    for jobs in phases:
        at = 0
        waiting = sorted(jobs, key=lambda job: job.arrives)
        aborts: list[tuple[int, Job]] = []
        while waiting or engine.busy:
            while waiting and waiting[0].arrives <= at:
                job = waiting.pop(0)
                engine.add(job.req_id, job.prompt, job.max_tokens)
                if job.abort_after is not None:
                    aborts.append((at + job.abort_after, job))
            before = _ended(engine)
            engine.step()
            at += 1
            for _, job in [due for due in aborts if due[0] <= at]:
                if not engine.requests[job.req_id].finished:
                    engine.abort(job.req_id)
            aborts = [due for due in aborts if due[0] > at]
            if progress is not None:
                progress(_ended(engine) - before)
            if at > _STEPS_AT_MOST:
                raise RuntimeError(f"the engine is still busy after {at} steps")
        engine.step()  # reports what finished last, without a forward


def _ended(engine: StepEngine) -> int:
    return sum(r.finished or r.aborted for r in engine.requests.values())


@dataclass(slots=True)
class Reference:
    """Hidden rows and tokens of each request without prefix caching."""

    hidden: dict[str, torch.Tensor]
    tokens: dict[str, tuple[int, ...]]


class Comparison:
    """Runs workloads, each on an engine of its own, against one engine without prefix caching that all of them share.

    That one stays up, which also makes the others start in a fraction of a second. Jobs that were run on it before,
    with the same seed, are not run again.
    """

    def __init__(self, kind: RunnerKind) -> None:
        """Start the engine to compare with. The process must be one for that kind of runner."""
        self.kind: RunnerKind = kind
        self._engine = StepEngine(REFERENCE, kind)
        self._known: dict[tuple[str, int], Reference] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.close()

    def run(self, workload: Workload, *, seed: int | None = None, progress: Progress | None = None) -> Report:
        """Run one workload with the cache and compare every row.

        Args:
            workload: what to run.
            seed: of the jobs; the workload's own if left out.
            progress: called as requests end, in both runs.
        """
        chosen = workload.seed if seed is None else seed
        report = Report(workload.name, self.kind, chosen)
        began = time.monotonic()
        phases = workload.jobs(random.Random(chosen))
        with StepEngine(workload.engine, self.kind) as engine:
            # In this order: an engine that is closed takes vLLM's process groups with it, and the next one brings them.
            expected = self._reference(workload, chosen, phases, progress)
            hooks.EMITTED_SOMETIMES.clear()
            hooks.forget_tokens()
            drive(engine, phases, progress)
            engine.close()  # a builder thread may still be handing over
        emitted = list(hooks.EMITTED_SOMETIMES)
        _compare(engine, expected, emitted, report)
        report.counts = {name: int(value) for name, value in asdict(engine.counts).items()}
        report.slots_checked = engine.worker.slots_checked
        report.late = engine.link.handover.statistics().largest_lateness
        report.rows_served = engine.recorder.rows - engine.counts.rows_computed
        report.rows_again = engine.recorder.rows_again
        report.problems += engine.recorder.problems[:10]
        if engine.recorder.rows_changed:
            report.differences += engine.recorder.rows_changed
            report.problems.append(f"{engine.recorder.rows_changed} rows differ from an earlier delivery of themselves")
        report.missing = [name for name in ("slots_checked", *workload.must) if report.value(name) <= 0]
        report.seconds = time.monotonic() - began
        return report

    def _reference(self, workload: Workload, seed: int, phases: Phases, progress: Progress | None) -> Reference:
        """Every job, run to its end without prefix caching."""
        known = (workload.jobs.__name__, seed)
        if known not in self._known:
            prefix = f"{len(self._known)}."
            jobs = [Job(prefix + job.req_id, job.prompt, job.max_tokens) for phase in phases for job in phase]
            drive(self._engine, [jobs], progress)
            self._known[known] = self._collect(prefix)
        return self._known[known]

    def _collect(self, prefix: str) -> Reference:
        hidden = {}
        tokens = {}
        for req_id, got in self._engine.received().items():
            if not req_id.startswith(prefix):
                continue
            request = self._engine.requests[req_id]
            kept = got.keys[HIDDEN_KEY]
            if not request.finished or kept.gaps(request.computed):
                raise RuntimeError(f"without prefix caching {req_id} lacks rows: the comparison would be void")
            name = req_id.removeprefix(prefix)
            hidden[name] = kept.rows
            tokens[name] = request.tokens
        return Reference(hidden, tokens)


@functools.cache
def _shared_comparison(kind: RunnerKind) -> Comparison:
    comparison = Comparison(kind)
    atexit.register(comparison.__exit__)
    return comparison


def run_workload(
    workload: Workload, kind: RunnerKind, *, seed: int | None = None, progress: Progress | None = None
) -> Report:
    """`Comparison.run`, on one comparison that stays up as long as the process."""
    return _shared_comparison(kind).run(workload, seed=seed, progress=progress)


def _compare(engine: StepEngine, expected: Reference, emitted: list[tuple[str, int, int]], report: Report) -> None:
    received: dict[str, Received] = engine.received()
    hands_hidden = engine.settings.omni_prefix.get("policy", {}).get("needs_full_hidden_states", True)
    for req_id, request in engine.requests.items():
        report.requests += 1
        report.aborts += request.aborted and not request.finished
        got = received.get(req_id, Received())
        _compare_tokens(request, expected, report)
        for key in (HIDDEN_KEY, *TOKEN_KEYS):
            if key in got.keys:
                _compare_key(key, request, got, expected, report)
        _check_whole(request, got, report, hidden=hands_hidden)
    for internal, start, end in emitted:
        _check_emitted(internal, start, end, engine, report)


def _compare_tokens(request: Request, expected: Reference, report: Report) -> None:
    """Greedy decoding with the same rows gives the same tokens; otherwise rows further on cannot be compared."""
    other = expected.tokens[request.req_id]
    if request.tokens != other[: len(request.tokens)]:
        report.problems.append(f"{request.req_id} generated other tokens than without prefix caching")


def _compare_key(key: str, request: Request, got: Received, expected: Reference, report: Report) -> None:
    kept = got.keys[key]
    # An aborted request may have rows for one position more than it has tokens to tell: compare with the whole run.
    tokens = expected.tokens[request.req_id]
    length = len(kept.there)
    want = expected.hidden[request.req_id] if key == HIDDEN_KEY else torch.from_numpy(true_rows(key, tokens).copy())
    if length > want.shape[0]:
        report.problems.append(f"{request.req_id}: {length} rows of {key}, more than its {want.shape[0]} positions")
        return
    same = rows_equal(kept.rows, want[:length])
    if key == SOMETIMES_KEY:
        zeros = (kept.rows == 0).flatten(1).all(dim=1).numpy() & kept.there
        report.zero_rows += int(zeros.sum())
        same |= zeros
    wrong = ~same & kept.there
    report.rows_compared += int(kept.there.sum())
    report.differences += int(wrong.sum())
    if wrong.any() and len(report.problems) < 10:
        at = np.flatnonzero(wrong)
        report.problems.append(f"{request.req_id}: {key} differs at {len(at)} positions, {at[0]}..{at[-1]}")


def _check_whole(request: Request, got: Received, report: Report, *, hidden: bool) -> None:
    """No position of a finished request was left out, and none before the last one of an aborted request."""
    keys = set(TOKEN_KEYS) - {SOMETIMES_KEY}
    if hidden:
        keys.add(HIDDEN_KEY)
    for key in keys:
        kept = got.keys.get(key)
        there = 0 if kept is None else len(kept.there)
        length = request.computed if request.finished else there
        missing = length if kept is None else kept.gaps(length)
        report.gaps += missing
        if missing and len(report.problems) < 10:
            report.problems.append(f"{request.req_id}: {missing} of {length} rows of {key} were never handed over")
    if request.finished and not got.finished:
        report.problems.append(f"{request.req_id} finished, and the consumer was never told")


def _check_emitted(internal: str, start: int, end: int, engine: StepEngine, report: Report) -> None:
    """A row that the model emitted was handed over as a row, never as the zeros of a hole."""
    got: Any = engine.recorder.requests.get(internal)
    kept = None if got is None else got.keys.get(SOMETIMES_KEY)
    if kept is None or not kept.there[start:end].all() or not (kept.rows[start:end] != 0).all():
        report.problems.append(f"{internal}: rows {start}..{end - 1} of {SOMETIMES_KEY} were emitted and are not there")
