"""Subjects over drivers: a trace applied event by event, each outcome judged, tables compared where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from conformance.drivers.agree import compare_tables
from conformance.drivers.expected import keep_tables_at_rest
from conformance.drivers.kept import KeepingDriver, WarmMemory
from conformance.drivers.reference import ReferenceDriver
from conformance.drivers.subject import Failure, Moment, Run
from conformance.schedules.driver import INJECTED, Outcome, Snapshot
from conformance.schedules.replay import Judge
from conformance.schedules.trace import WRITE, Discard, Event, Interleaving, Materialize, Rest, Shutdown, Trace
from omni_prefix_ref import Machine
from omni_prefix_ref.errors import NotEnabled, RuleBroken


class Applies(Protocol):
    """A driver, as far as a trace needs it."""

    def apply(self, event: Event) -> Outcome | None:
        """Apply one event. Errors of the contract are outcomes; any other error is raised. None: it was left out."""
        ...


def run_events(trace: Trace, driver: Applies, *, check: Callable[[Event, Outcome], str | None] | None = None) -> Run:
    """Apply every event, up to the first that comes to something else than was due, breaks a rule, or crashes.

    `check` is asked after each event for what else is wrong.
    """
    judge = Judge()
    for index, event in enumerate(trace.events):
        failure: Failure | None = None
        try:
            outcome = driver.apply(event)
            if outcome is None:
                continue
            mismatch = judge.judge(index, event, outcome)
            if mismatch is not None:
                what = f"expected {mismatch.expected}, found {mismatch.found}"
                failure = Failure(index, event.event, "outcome", what)
            elif check is not None and (different := check(event, outcome)) is not None:
                failure = Failure(index, event.event, "tables", different)
        except RuleBroken as broken:
            failure = Failure(index, event.event, "rule", str(broken))
        except NotEnabled as stuck:
            failure = Failure(index, event.event, "deadlock", str(stuck))
        except Exception as error:  # noqa: BLE001 - whatever an implementation raises is its run's failure
            failure = Failure(index, event.event, "crash", f"{type(error).__name__}: {error}")
        if failure is not None:
            return Run(failure, index + 1)
    return Run(None, len(trace.events))


class ReferenceModel:
    """The reference model, eager, with its rules checked at every action."""

    name = "reference"
    interleaves = False

    def run(
        self,
        trace: Trace,
        *,
        seed: int = 0,  # noqa: ARG002 - it has no threads
        interleaving: Interleaving | None = None,  # noqa: ARG002
        record: bool = False,  # noqa: ARG002
    ) -> Run:
        """Run a trace."""
        actions: Counter[str] = Counter()
        driver = ReferenceDriver(trace.header)

        def count(action: str, args: tuple[Any, ...], before: Machine, after: Machine) -> None:  # noqa: ARG001
            actions[action] += 1

        driver.cache.observers = (*driver.cache.observers, count)
        ran = run_events(trace, driver)
        return Run(ran.failure, ran.events, actions)


class EagerFast:
    """The production cache, eager, its tables compared with the reference model's after every event."""

    name = "fast-eager"
    interleaves = False

    def run(
        self,
        trace: Trace,
        *,
        seed: int = 0,  # noqa: ARG002 - it has no threads
        interleaving: Interleaving | None = None,  # noqa: ARG002
        record: bool = False,
    ) -> Run:
        """Run a trace."""
        actions: Counter[str] = Counter()
        moments: list[Moment] = []
        at_rest: dict[int, Snapshot | None] = {}
        over, failed, index = False, False, 0

        def observe(action: str, acted_on: Mapping[str, object]) -> None:
            actions[action] += 1
            if record:
                moments.append(Moment(len(moments), "engine", action, acted_on, index))

        def compare(event: Event, outcome: Outcome) -> str | None:
            nonlocal over, failed, index
            index += 1
            if outcome.error == INJECTED and isinstance(event, Materialize):
                event = Discard(label=event.label)  # the failure that the trace asked for consumed the step
            expected = reference.apply(event)
            # After a failed write or a shutdown the contract says what calls answer, not what tables hold.
            failed = failed or expected.error == WRITE
            over = over or failed or outcome.error == WRITE or isinstance(event, Shutdown)
            due = reference.snapshot() if not over or (isinstance(event, Rest) and not failed) else None
            if isinstance(event, Rest):
                at_rest[index - 1] = None if failed else due
            return None if over or due is None else compare_tables(event, due, driver)

        reference = ReferenceDriver(trace.header, checked=False)
        driver = KeepingDriver(trace.header, observe=observe, allocate=WarmMemory())
        ran = run_events(trace, driver, check=compare)
        if ran.failure is None and driver.went_off is None:
            keep_tables_at_rest(trace, at_rest)
        return Run(ran.failure, ran.events, actions, moments=tuple(moments), went_off=driver.went_off)
