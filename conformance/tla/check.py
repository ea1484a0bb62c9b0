"""Run what the manifest registers, and compare what TLC found with what it must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from conformance.tla.config import Config
from conformance.tla.errors import TlaError
from conformance.tla.manifest import (
    SPEC,
    Fault,
    Goal,
    Lane,
    Manifest,
    Model,
    config_of,
    digest,
    fault_config,
    load_manifest,
)
from conformance.tla.tlc import Job, Progress, Result, run

CI_DEADLINE = 300.0
DEEP_DEADLINE = 7200.0
SIMULATED_ACTIONS = 200


@dataclass(frozen=True)
class Task:
    """One run of TLC that the manifest asks for."""

    entry: Model | Fault | Goal
    model: Model
    config: Config
    job: Job

    @property
    def kind(self) -> str:
        """The table of the manifest that it comes from."""
        return type(self.entry).__name__.lower()

    @property
    def name(self) -> str:
        """How it is called: a model and a fault by name, a goal by model and invariant."""
        return f"{self.entry.model}:{self.entry.violates}" if isinstance(self.entry, Goal) else self.entry.name

    @property
    def must_break(self) -> str | None:
        """The check that has to break, if one has to."""
        return None if isinstance(self.entry, Model) else self.entry.violates


@dataclass(frozen=True)
class Outcome:
    """What came of a task. `problem` is empty if all is as the manifest says."""

    task: Task
    result: Result | None
    problem: str
    figures: dict[str, object]

    @property
    def verdict(self) -> str:
        """What TLC found, in a word."""
        if self.result is None:
            return "no result"
        if self.result.violation is None:
            return "holds"
        return f"breaks {self.result.violation.check or self.task.must_break or 'a temporal property'}"


def _lane_includes(lane: Lane, wanted: Lane) -> bool:
    return lane == "ci" or wanted == "deep"


def _task(entry: Model | Fault | Goal, model: Model, config: Config, spec: Path) -> Task:
    deadline = CI_DEADLINE if entry.lane == "ci" else DEEP_DEADLINE
    simulate = model.behaviours if model.mode == "simulate" and isinstance(entry, Model) else 0
    job = Job(
        module=spec / f"{model.module}.tla",
        config=config.render(),
        deadline=deadline,
        coverage=isinstance(entry, Model) and not simulate,
        simulate=simulate,
        simulate_depth=SIMULATED_ACTIONS,
        short=entry.lane == "ci",
    )
    return Task(entry, model, config, job)


def tasks(manifest: Manifest, names: Sequence[str] = (), lane: Lane = "ci", spec: Path = SPEC) -> list[Task]:
    """What to run: everything of the lane, or what is named by model, fault or goal."""
    entries: list[Model | Fault | Goal] = [*manifest.model, *manifest.fault, *manifest.goal]
    found: list[Task] = []
    unknown = set(names)
    for entry in entries:
        model = entry if isinstance(entry, Model) else manifest.of(entry.model)
        if model.mode == "trace":
            continue
        task = _task(entry, model, _config(entry, model, spec), spec)
        named = {task.name, model.name} & set(names)
        unknown -= named
        if named or (not names and _lane_includes(entry.lane, lane)):
            found.append(task)
    if unknown:
        known = ", ".join(sorted({*(m.name for m in manifest.model), *(f.name for f in manifest.fault)}))
        raise TlaError(f"the manifest has no {', '.join(sorted(unknown))} to check; it has {known}")
    return found


def _config(entry: Model | Fault | Goal, model: Model, spec: Path) -> Config:
    config = config_of(model, spec)
    if isinstance(entry, Fault):
        return fault_config(entry, config)
    if isinstance(entry, Goal):
        return config.checking(entry.violates)
    return config


def _judge_model(model: Model, config: Config, result: Result) -> tuple[str, dict[str, object]]:
    if result.violation is not None:
        return f"{result.violation.check or 'a temporal property'} does not hold", {}
    if model.mode == "simulate":
        return "", {"digest": digest(config)}
    figures: dict[str, object] = {
        "digest": digest(config),
        "distinct": result.distinct,
        "total": result.generated,
        "depth": result.depth,
    }
    stale = [
        f"{name} is {value}, not {getattr(model, name)}"
        for name, value in figures.items()
        if getattr(model, name) != value
    ]
    dead = sorted(action for action, count in result.coverage.items() if count == 0 and action not in model.idle)
    woken = sorted(action for action in model.idle if result.coverage.get(action, 0) > 0)
    problems = stale + ([f"never taken: {', '.join(dead)}"] if dead else [])
    problems += [f"taken after all: {', '.join(woken)}"] if woken else []
    return "; ".join(problems), figures


def judge(task: Task, result: Result) -> Outcome:
    """Compare a finished run with the manifest."""
    if isinstance(task.entry, Model):
        problem, figures = _judge_model(task.entry, task.config, result)
        return Outcome(task, result, problem, figures)
    if result.violation is None:
        return Outcome(task, result, f"{task.entry.violates} is not broken", {})
    length = len(result.violation.behaviour)
    problem = ""
    if result.violation.check not in {task.entry.violates, ""}:
        problem = f"breaks {result.violation.check}, not {task.entry.violates}"
    elif length != task.entry.length:
        problem = f"length is {length}, not {task.entry.length}"
    return Outcome(task, result, problem, {"length": length})


def check(task: Task, on_progress: Callable[[Progress], None] | None = None) -> Outcome:
    """Run one task. An error of TLC is an outcome too."""
    try:
        return judge(task, run(task.job, on_progress))
    except TlaError as error:
        return Outcome(task, None, str(error), {})


def check_all(
    chosen: Sequence[Task], *, at_once: int = 2, on_progress: Callable[[Task, Progress], None] | None = None
) -> Iterator[Outcome]:
    """Run tasks, some at once, and give each outcome as it comes."""
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        futures = []
        for task in chosen:
            report = None if on_progress is None else (lambda progress, task=task: on_progress(task, progress))
            futures.append(pool.submit(check, task, report))
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def check_manifest(names: Sequence[str] = (), lane: Lane = "ci", spec: Path = SPEC) -> list[Task]:
    """The tasks of the manifest in a folder."""
    return tasks(load_manifest(spec), names, lane, spec)
