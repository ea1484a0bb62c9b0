"""The names on the three sides, action by action and rule by rule.

A row says where a name of the specification stands in the reference model and in the trace of the production package.
If a side has it under the same name (``ClaimSlots``, ``claim_slots``), nothing needs saying; where a side has another
name or none, the row gives the reason. Names without a counterpart in the specification have rows too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """A name in a module of the specification."""

    module: str
    name: str


def snake(name: str) -> str:
    """``ClaimSlots`` as ``claim_slots``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def rule_name(name: str) -> str:
    """``ClaimAllProp`` as ``claim_all``."""
    return snake(name.removesuffix("Inv").removesuffix("Prop"))


@dataclass(frozen=True)
class ActionLink:
    """An action and its counterparts. No modules: the specification has none, and `name` is what others call it."""

    name: str
    modules: tuple[str, ...]
    reference: tuple[str, ...]
    fast: tuple[str, ...]
    why: str = ""

    @property
    def by_name(self) -> bool:
        """All three sides have it, under one name."""
        return bool(self.modules) and self.reference == self.fast == (snake(self.name),)


@dataclass(frozen=True)
class RuleLink:
    """A rule and the assertion of the reference model that is the same rule."""

    name: str
    modules: tuple[str, ...]
    reference: tuple[str, ...]
    why: str = ""

    @property
    def by_name(self) -> bool:
        """Both sides have it, under one name."""
        return bool(self.modules) and self.reference == (rule_name(self.name),)


_P, _H, _F = "PrefixCache", "Handover", "Failures"
_CHAIN = ("queue_task", "claim_copy", "finish_copy", "write_pool", "commit_task")


def _same(name: str, *modules: str) -> ActionLink:
    return ActionLink(name, modules, (snake(name),), (snake(name),))


def _environment(name: str, what: str) -> ActionLink:
    return ActionLink(name, (_P,), (), (), f"vLLM's scheduler {what}; the cache is only told of it as a step starts")


ACTIONS: tuple[ActionLink, ...] = (
    _same("FinishRequest", _P, _H),
    _same("StartRequest", _P),
    _same("PlanRead", _P),
    _same("ClaimPage", _P, _H),
    _same("ReserveBudget", _P, _H),
    ActionLink("UnplanReads", (_P,), ("unplan_reads",), ("unplan_read",), "traced once for each read that it unplans"),
    _same("PreserveReads", _P),
    _same("ClaimSlots", _P),
    ActionLink(
        "RegisterWrite",
        (_P, _F),
        ("register_write",),
        ("register_write",),
        "Failures has no rows, so any registered write, a deferred one too, is this action there",
    ),
    _same("AppendRows", _P),
    _same("OpenStep", _P, _H),
    _same("QueueTask", _P, _F),
    _same("ClaimCopy", _P, _F),
    _same("FinishCopy", _P, _F),
    _same("WritePool", _P, _F),
    _same("CommitTask", _P),
    _same("FetchRead", _P, _H),
    _same("TakeStep", _P, _H),
    _same("SealWrite", _P, _H),
    _same("FailTask", _F),
    ActionLink(
        "Publish",
        (_H,),
        ("register_write", "append_rows"),
        ("register_write", "append_rows"),
        "Handover has no rows, so publishing the immediate and the deferred ones is one action there",
    ),
    ActionLink("WriteTask", (_H,), _CHAIN, _CHAIN, "the whole chain is one action in Handover: what counts is its end"),
    ActionLink(
        "CancelStep",
        (_H,),
        ("cancel_step",),
        (),
        "the fast path gives the page back in the save's error path, which traces nothing: the save never happened",
    ),
    _same("ReleaseStep", _H),
    ActionLink(
        "PublishFailure",
        (_F,),
        ("publish_failure",),
        ("fail_task",),
        "the fast path publishes the record and fails the task in one call, in this order, and traces its end",
    ),
    ActionLink(
        "EnterCache",
        (_F,),
        ("check_usable",),
        (),
        "the question with which every public call begins changes nothing, so it is no event",
    ),
    ActionLink(
        "JoinTask",
        (_F,),
        (),
        ("wait_task",),
        "the reference has no threads; its drivers' `wait` repeats an action until it is enabled",
    ),
    ActionLink(
        "WakeJoiner",
        (_F,),
        (),
        (),
        "the end of a wait: a driver's business in the reference, seen in the fast path by what the waiter does next",
    ),
    ActionLink(
        "TimeOut",
        (_H, _F),
        (),
        (),
        "a wait that ran out: a driver's business in the reference, an error of the call in the fast path",
    ),
    ActionLink("BeginStep", (_H,), (), (), "the environment: which requests the step computes and what it hits"),
    ActionLink("WriteRaises", (_F,), (), (), "the environment: what makes a write fail is the device's business"),
    ActionLink("RefuseTake", (_H,), (), (), "enabled by a seeded fault only: a refused call is no transition"),
    ActionLink("RequeueTask", (_F,), (), (), "enabled by a seeded fault only"),
    ActionLink("ForgetFailure", (_F,), (), (), "enabled by a seeded fault only"),
    _environment("ScheduleRequest", "places a request"),
    _environment("PreemptRequest", "takes a request's blocks away"),
    _environment("FreeRequest", "ends a request, some time before it reports it"),
    _environment("EndSchedule", "is done with the step"),
    ActionLink("WithdrawRequest", (_P,), (), (), "an engine that the gate refuses"),
    ActionLink("LoadBlock", (_P,), (), (), "an engine that the gate refuses"),
    ActionLink(
        "DiscardStep",
        (),
        ("discard_step",),
        (),
        "`TakeStep` with how = discard, then `ReleaseStep`; the fast path traces take_step and release_step for it",
    ),
    ActionLink(
        "AbandonReads",
        (),
        ("abandon_reads",),
        (),
        "reads of a step that is never saved; in the specification each step that starts is saved",
    ),
    ActionLink("ShutDown", (), ("shut_down",), (), "the specification's machine goes on for ever"),
    ActionLink("Start", (), ("start",), (), "`Init`: the state before the first step"),
    ActionLink("Defers", (), ("defers",), (), "a question: `Defers` in Handover, an operator and no action"),
    ActionLink("Outputs", (), ("outputs",), (), "a question: what a taken step hands over, checked by `SpansMeetInv`"),
    ActionLink(
        "PreserveRead",
        (),
        (),
        ("preserve_read",),
        "a claimant completes a planned read; what follows is its `FetchRead`, and once all are done `PreserveReads`",
    ),
    ActionLink(
        "WaitRead", (), (), ("wait_read",), "somebody else is gathering the read; what follows is his `FetchRead`"
    ),
)

RULES: tuple[RuleLink, ...] = (
    RuleLink("RowsAreRightInv", ("Rules",), ("rows_are_right",)),
    RuleLink(
        "HashedRowsAreRightInv",
        ("Rules",),
        ("rows_are_right",),
        "the reference knows no hashes: each committed row of any slot, hashed or not, is its tenancy's",
    ),
    RuleLink("HitIsWholeOrFatalInv", ("Rules",), ("hit_is_whole_or_fatal",)),
    RuleLink(
        "NoFalseRaiseInv",
        ("Rules",),
        (),
        "speaks of what the scheduler promised; the oracle of conformance.schedules says which errors are due",
    ),
    RuleLink("ClaimAllProp", ("Rules",), ("claim_all",)),
    RuleLink("PlannedReadNamesRowsInv", ("Rules", _H), ("planned_read_names_rows",)),
    RuleLink("PlanOnceProp", ("Rules",), ("plan_once",)),
    RuleLink("SpanOwedUntilEmittedInv", ("Rules",), ("span_owed_until_emitted",)),
    RuleLink(
        "SpansMeetInv",
        ("Rules",),
        (),
        "speaks of what the consumer got so far, a ghost that the reference lacks; the oracle keeps it for the traces",
    ),
    RuleLink("StrictChainProp", ("Rules", _F), ("strict_chain",)),
    RuleLink("OneWriterInv", ("Rules", _F), ("one_writer",)),
    RuleLink("OneWriterProp", ("Rules",), ("one_writer",)),
    RuleLink("StepConsumedOnceInv", (_H,), ("step_consumed_once",)),
    RuleLink("PageHeldWhileReadInv", (_H,), ("page_held_while_read",)),
    RuleLink("BudgetChargedOnceInv", (_H,), ("budget_charged_once",)),
    RuleLink(
        "HoldersExistInv",
        (_H,),
        ("at_rest",),
        "a holder that is gone would keep its chunk for ever; the reference sees that once all is at rest",
    ),
    RuleLink("AbortStillLandsInv", ("Rules", _F), ("abort_still_lands",)),
    RuleLink("FailureIsLoudAndStickyInv", (_F,), ("failure_is_loud_and_sticky",)),
    RuleLink("FailureIsLoudAndStickyProp", (_F,), ("failure_is_loud_and_sticky",)),
    RuleLink("SaveProceedsProp", (_H,), (), "liveness: a run of the reference either ends or raises a time-out"),
    RuleLink("WritesLandProp", (_H,), ("at_rest",), "liveness: a run of the reference ends, and then nothing is left"),
    RuleLink(
        "EveryWriteEndsProp", (_F,), ("at_rest",), "liveness: a run of the reference ends, and then nothing is left"
    ),
    RuleLink("NobodyWaitsForEverProp", (_F,), (), "liveness of threads, which the reference has none of"),
    RuleLink("TypeOKInv", ("Rules",), (), "types: mypy --strict holds them for the reference"),
    RuleLink(
        "VersionsNeverFall",
        (),
        ("versions_never_fall",),
        "part of `ClaimAllProp`, which says what each action does to them",
    ),
)


def action_problems(
    spec: Iterable[Place],
    reference: Iterable[str],
    fast: Iterable[str],
    links: Iterable[ActionLink] = ACTIONS,
) -> list[str]:
    """What the sources and the table of actions do not agree on, one line each."""
    rows = tuple(links)
    listed = [Place(module, row.name) for row in rows for module in row.modules]
    problems = _differences("action", spec, listed, once=True)
    problems += _differences("reference method", reference, (name for row in rows for name in row.reference))
    problems += _differences("trace event", fast, (name for row in rows for name in row.fast))
    problems += [f"{row.name}: no reason is given" for row in rows if not row.by_name and not row.why]
    problems += [
        f"{row.name}: {snake(row.name)} exists, and the row names another"
        for row in rows
        for side, names in (((row.reference), set(reference)), ((row.fast), set(fast)))
        if snake(row.name) in names and snake(row.name) not in side
    ]
    return problems


def rule_problems(spec: Iterable[Place], reference: Iterable[str], links: Iterable[RuleLink] = RULES) -> list[str]:
    """What the sources and the table of rules do not agree on, one line each."""
    rows = tuple(links)
    listed = [Place(module, row.name) for row in rows for module in row.modules]
    problems = _differences("rule", spec, listed, once=True)
    problems += _differences("assertion", reference, (name for row in rows for name in row.reference))
    problems += [f"{row.name}: no reason is given" for row in rows if not row.by_name and not row.why]
    return problems


def _differences(what: str, real: Iterable[object], listed: Iterable[object], *, once: bool = False) -> list[str]:
    sources, rows = set(real), list(listed)

    def text(name: object) -> str:
        return "!".join(name) if isinstance(name, Place) else str(name)

    problems = [f"{what} {text(name)} has no row" for name in sources - set(rows)]
    problems += [f"{what} {text(name)} has a row and does not exist" for name in set(rows) - sources]
    problems += [
        f"{what} {text(name)} has {rows.count(name)} rows" for name in set(rows) if once and rows.count(name) > 1
    ]
    problems += [f"there is no {what} at all"] if not sources or not rows else []
    return sorted(problems)


def _cells(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def render_actions() -> str:
    """The table of actions, for the README."""
    head = [_row("action", "modules", "reference", "fast path's event", "why"), _row(*["---"] * 5)]
    return "\n".join(
        head
        + [
            _row(
                f"`{row.name}`" if row.modules else "–",
                ", ".join(row.modules),
                _cells(row.reference),
                _cells(row.fast),
                row.why,
            )
            for row in ACTIONS
        ]
    )


def render_rules() -> str:
    """The table of rules, for the README."""
    head = [_row("rule", "modules", "reference", "why"), _row(*["---"] * 4)]
    return "\n".join(
        head
        + [
            _row(f"`{row.name}`" if row.modules else "–", ", ".join(row.modules), _cells(row.reference), row.why)
            for row in RULES
        ]
    )
