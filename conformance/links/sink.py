"""What the production package tells its trace sink, as events of the specification.

An event stands where its action takes effect. Actions on the tables are told under the state lock, so no other one
comes between; the committer's own are told before anybody who waits for them wakes. So the order in which the sink is
called is an order in which the actions may have happened, whatever the threads did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.links.environment import Tale
from conformance.links.names import snake
from conformance.tla.accept import Setting
from conformance.tla.values import Function
from omni_prefix_fast import HIDDEN_KEY

_OF_TASK = {snake(name): name for name in ("QueueTask", "ClaimCopy", "FinishCopy", "WritePool", "CommitTask")}
SILENT = frozenset({"take_step", "preserve_read", "wait_task", "wait_read"})
"""Told by what follows: a step is taken where it is released, a read completed early where it is fetched."""

Told = Mapping[str, Any]


def _name(key: str) -> str:
    return "hidden" if key == HIDDEN_KEY else key


@dataclass
class Sink:
    """The trace sink. Steps, tasks and reads get the numbers that the specification gives them."""

    tale: Tale
    setting: Setting
    thread: Callable[[], str]
    """Name of the running thread."""
    point: Callable[[], None]
    """Where another thread may go on."""
    how: dict[int, str] = field(default_factory=dict)
    """By step, the call that consumes it: materialize or discard."""
    seen: Counter[str] = field(default_factory=Counter)
    steps: dict[int, int] = field(default_factory=dict)
    tasks: dict[int, int] = field(default_factory=dict)
    _unplanned: set[int] = field(default_factory=set)

    def __call__(self, action: str, told: Told) -> None:
        """An action of the production package."""
        if action in _OF_TASK:
            self.tale.tell("committer", _OF_TASK[action], task=self._task(told))
        elif action not in SILENT:
            tell = getattr(self, f"_{action}", None)
            if tell is None:
                self.tale.break_off(f"{action}({dict(told)}) has no event")
            else:
                tell(told)
        self.point()

    def _step(self, told: Told) -> int:
        """A step has no number of its own before it claims its page: until then it is the next one."""
        return self.steps.get(told["step"], len(self.steps) + 1)

    def _task(self, told: Told) -> int:
        return self.tasks.setdefault(told["task"], len(self.tasks) + 1)

    def _engine(self, action: str, **fields: Any) -> None:
        self.tale.tell("engine", action, **fields)

    def _finish_request(self, told: Told) -> None:
        self._engine("FinishRequest", req=told["req_id"])

    def _start_request(self, told: Told) -> None:
        self._engine("StartRequest", req=told["req_id"], computed=told["computed"], blocks=tuple(told["blocks"]))

    def _plan_read(self, told: Told) -> None:
        start, end = told["span"]
        kinds = {(key, position): "hole" for key in self.setting.keys for position in range(start, end)}
        for key, plan in told["plans"].items():
            pooled = range(end - start) if plan.pool is None else plan.pool.tolist()
            kinds |= {(_name(key), start + at): "pool" for at in pooled}
            kinds |= {(_name(key), start + at): "log" for part in plan.log for at in part.positions.tolist()}
        self._engine("PlanRead", read=(self._step(told), told["req_id"]), kinds=Function(kinds))

    def _claim_page(self, told: Told) -> None:
        self.steps[told["step"]] = self._step(told)
        self._engine("ClaimPage", step=self._step(told))

    def _seal_write(self, told: Told) -> None:
        self._engine("SealWrite", task=self._task(told))

    def _reserve_budget(self, _: Told) -> None:
        if self.setting.pressure:
            self._engine("ReserveBudget", step=len(self.steps))

    def _unplan_read(self, told: Told) -> None:
        """Told once a read; in the specification all reads of a step go together."""
        if self._step(told) not in self._unplanned:
            self._unplanned.add(self._step(told))
            self._engine("UnplanReads", step=self._step(told))

    def _preserve_reads(self, told: Told) -> None:
        self._engine("PreserveReads", slots=frozenset(told["slots"].tolist()))

    def _claim_slots(self, told: Told) -> None:
        slots = told["slots"].tolist()
        versions = dict(zip(slots, told["versions"].tolist(), strict=True))
        emitted = {_name(key) for key in told["emitted"]}
        emits = {key: frozenset(slots if key in emitted else ()) for key in self.setting.keys}
        self._engine("ClaimSlots", slots=frozenset(slots), versions=Function(versions), emits=Function(emits))

    def _register_write(self, told: Told) -> None:
        self._task(told)
        self._engine("RegisterWrite", step=self._step(told))

    def _append_rows(self, told: Told) -> None:
        for task in told["tasks"]:
            self._task({"task": task})
        self._engine("AppendRows", step=self._step(told))

    def _open_step(self, told: Told) -> None:
        self._engine("OpenStep", step=self._step(told))

    def _fetch_read(self, told: Told) -> None:
        self.seen[f"fetched by {self.thread().split(' ')[0]}"] += 1
        self.tale.tell("builder", "FetchRead", read=(self._step(told), told["req_id"]))

    def _release_step(self, told: Told) -> None:
        self.tale.tell("builder", "TakeStep", step=self._step(told), how=self.how[told["step"]])
