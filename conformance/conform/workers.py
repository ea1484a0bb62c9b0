"""Worker processes: each is given a few traces at a time. One that dies or hangs is told as its trace's failure.

Parts come back in the order of the traces, so what a session sees does not depend on how many workers there are.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

from conformance.conform.part import run_part
from conformance.conform.plan import PER_PART, Found, Part, Plan
from conformance.drivers.subject import Failure

TRACE_LIMIT_S = 180.0
"""A trace takes hundredths of a second. One that takes this long, on however busy a machine, does not end."""
LOOK_S = 0.5
"""How often, in seconds, workers are looked at while none has anything to say."""
IDLE = -1

_CONTEXT = multiprocessing.get_context("spawn")


class WorkerError(RuntimeError):
    """A worker cannot work at all."""


def work(plan: Plan, pipe: Connection, at: Any, core: int | None = None) -> None:
    """A worker process's life: parts of traces come in, what came of them goes out, None is the end."""
    if core is not None:
        with contextlib.suppress(OSError):  # the machine may forbid it, and loses speed only
            os.sched_setaffinity(0, {core})
    # Steps that are never saved are part of the traces.
    logging.getLogger("omni_prefix_fast").setLevel(logging.CRITICAL)
    subjects = plan.subjects()
    # A trace makes many objects and few cycles; what is loaded by now stays. This saves a fifteenth of the time.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)

    def announce(n: int, driver: int) -> None:
        at[0], at[1] = n, driver

    with contextlib.suppress(EOFError):
        while (job := pipe.recv()) is not None:
            first, last, skip = job
            part = run_part(plan, subjects, first, last, skip=skip, announce=announce)
            at[0] = IDLE
            pipe.send(part)


@dataclass
class _Job:
    first: int
    last: int
    skip: set[tuple[int, int]] = field(default_factory=set)
    lost: list[Found] = field(default_factory=list)


class _Worker:
    def __init__(self, plan: Plan, core: int | None = None) -> None:
        self.plan = plan
        self.core = core
        self.job: _Job | None = None
        self.has_worked = False
        self.at = _CONTEXT.Array("q", [IDLE, 0], lock=False)
        self.pipe, other = _CONTEXT.Pipe()
        self.process: BaseProcess = _CONTEXT.Process(target=work, args=(plan, other, self.at, core), daemon=True)
        # Ctrl-C goes to the whole group; the session's process alone decides what then. Ignored signals are inherited,
        # so it is ignored from the process's first moment on.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, handler)
        other.close()
        self.seen = ((IDLE, 0), time.monotonic())
        """Where it was when it had last moved, and when that was."""

    def give(self, job: _Job) -> None:
        self.job = job
        with contextlib.suppress(OSError):  # it has died: its sentinel will say so
            self.pipe.send((job.first, job.last, frozenset(job.skip)))

    def hangs(self, limit_s: float) -> bool:
        now, where = time.monotonic(), (self.at[0], self.at[1])
        if where != self.seen[0]:
            self.seen = (where, now)
        return where[0] != IDLE and now - self.seen[1] > limit_s

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _cores(count: int) -> list[int | None]:
    """A core for each worker, where there is one for each: threads that take turns do so faster on one core."""
    if not hasattr(os, "sched_getaffinity"):
        return [None] * count
    allowed = sorted(os.sched_getaffinity(0))
    return list(allowed[:count]) if count <= len(allowed) else [None] * count


class Crew:
    """So many workers. Use as a context: leaving it ends them all, at once."""

    def __init__(self, plan: Plan, count: int, *, limit_s: float = TRACE_LIMIT_S) -> None:
        self._plan = plan
        self._count = count
        self._limit_s = limit_s
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        # Taken over by the workers, whose torch is to have one thread each: they share the cores.
        os.environ["OMP_NUM_THREADS"] = "1"
        cores = _cores(self._count)
        self._workers = [_Worker(self._plan, core) for core in cores]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def parts(self, first: int, last: int) -> Iterator[Part | None]:
        """What comes of the traces `[first, last)`, part by part, in order; None now and then, while nothing comes.

        Raises:
            WorkerError: a worker ended before it could run anything.
        """
        jobs = (_Job(start, min(start + PER_PART, last)) for start in range(first, last, PER_PART))
        again: list[_Job] = []
        ready: dict[int, Part] = {}
        upcoming = first
        while upcoming < last:
            for worker in self._workers:
                if worker.job is None and (job := again.pop() if again else next(jobs, None)) is not None:
                    worker.give(job)
            for part in self._hear(again):
                ready[part.first] = part
            while upcoming in ready:
                part = ready.pop(upcoming)
                upcoming = part.last
                yield part
            yield None

    def _hear(self, again: list[_Job]) -> Iterator[Part]:
        """What workers say that have done a job. A dead worker's job is done again, without that trace."""
        of = {worker.pipe: worker for worker in self._workers if worker.job is not None}
        wait([*of, *(worker.process.sentinel for worker in of.values())], timeout=LOOK_S)
        for place, worker in enumerate(self._workers):
            if worker.job is None:
                continue
            job, part = worker.job, None
            with contextlib.suppress(EOFError, OSError):
                part = worker.pipe.recv() if worker.pipe.poll() else None
            if part is not None:
                worker.job, worker.has_worked = None, True
                part.found = sorted([*part.found, *job.lost], key=lambda f: (f.n, self._plan.drivers.index(f.driver)))
                yield part
            elif not worker.process.is_alive() or worker.hangs(self._limit_s):
                again.append(self._bury(worker, job))
                self._workers[place] = _Worker(self._plan, worker.core)

    def _bury(self, worker: _Worker, job: _Job) -> _Job:
        alive, n, driver = worker.process.is_alive(), worker.at[0], worker.at[1]
        worker.end()
        if n == IDLE and worker.has_worked:  # between two traces: somebody ended it, and no trace is to blame
            return job
        if n == IDLE:
            raise WorkerError(
                f"a worker process ended before its first trace, with exit code {worker.process.exitcode}"
            )
        name = self._plan.drivers[driver]
        what = (
            f"the run did not end within {self._limit_s:g} s"
            if alive
            else f"the process that ran it ended, with exit code {worker.process.exitcode}"
        )
        job.skip.add((n, driver))
        job.lost.append(Found(n, name, Failure(-1, "", "deadlock" if alive else "crash", what), lost=True))
        return job
