"""Moments in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.drivers.subject import Failure, Moment
from conformance.page.tables import number, numbers, text
from conformance.page.words import event_words, failure_words, key_name, plural, ranges
from conformance.schedules.trace import Trace

Details = Mapping[str, Any]


def moment_words(moment: Moment, trace: Trace, failure: Failure | None) -> str:
    """What happened at a moment."""
    if moment.action == "call" and 0 <= moment.event < len(trace.events):
        return event_words(trace.events[moment.event])
    if moment.action == "failure" and failure is not None:
        return failure_words(trace, failure).headline
    tell = _WORDS.get(moment.action)
    return moment.action.replace("_", " ") if tell is None else tell(moment.details)


def _step(d: Details) -> str:
    return f"step id {number(d, 'step')}"


def _task(d: Details) -> str:
    return f"task {number(d, 'task')}"


def _read(d: Details) -> str:
    return f"the read of {text(d, 'req_id')} in {_step(d)}"


def _keys(names: Any) -> str:
    return ", ".join(key_name(str(name)) for name in names) or "no key"


def _return(d: Details) -> str:
    return f"returns with {d['error']}" if d.get("error") else "returns"


def _plan(d: Details) -> str:
    start, end = d.get("span", (0, 0))
    return f"plan {_read(d)}: positions {ranges(range(int(start), int(end)))}"


def _append(d: Details) -> str:
    opened = ", ".join(str(req) for req in d.get("opened", ()))
    return f"clone rows of {_keys(d.get('keys', ()))} into the log" + (
        f"; opens a write for {opened}" if opened else ""
    )


_WORDS: dict[str, Callable[[Details], str]] = {
    "call": lambda d: f"calls {text(d, 'event')}",
    "return": _return,
    "block": lambda d: f"waits for {text(d, 'for')}" if d.get("for") else "waits",
    "run": lambda _: "goes on",
    "finish_request": lambda d: f"{text(d, 'req_id')} finishes: its open deferred write, if any, is sealed",
    "start_request": lambda d: (
        f"{text(d, 'req_id')} starts with {plural(max(0, number(d, 'computed')), 'token')} computed"
    ),
    "plan_read": _plan,
    "unplan_read": lambda d: f"unplan {_read(d)}: this step computes what it hits",
    "preserve_reads": lambda d: f"no planned read names slots {ranges(sorted(numbers(d, 'slots')))} any more",
    "preserve_read": lambda d: f"complete {_read(d)} before its rows are lost",
    "fetch_read": lambda d: f"fetched: {_read(d)}",
    "wait_read": lambda d: f"another thread gathers {_read(d)}",
    "claim_page": lambda d: f"{_step(d)} gets page {number(d, 'page')}",
    "reserve_budget": lambda d: f"reserve {plural(number(d, 'bytes'), 'device byte')}",
    "claim_slots": lambda d: (
        f"{_step(d)} claims slots {ranges(sorted(numbers(d, 'slots')))}: their version rises; emits "
        f"{_keys(d.get('emitted', ()))}"
    ),
    "register_write": lambda d: f"{_task(d)} is the immediate write of {_step(d)}",
    "append_rows": _append,
    "open_step": lambda d: f"{_step(d)} is saved",
    "seal_write": lambda d: f"seal the open {_task(d)} of a running request",
    "queue_task": lambda d: f"{_task(d)} is queued",
    "claim_copy": lambda d: f"{_task(d)} is being copied",
    "finish_copy": lambda d: f"rows of {_task(d)} are on the host",
    "write_pool": lambda d: f"rows of {_task(d)} are in the pool (those of slots that it still has)",
    "commit_task": lambda d: f"{_task(d)} is committed",
    "fail_task": lambda d: f"{_task(d)} fails",
    "wait_task": lambda d: f"waits for {_task(d)} to be {text(d, 'until')}",
    "take_step": lambda d: f"{_step(d)} is consumed",
    "release_step": lambda d: f"{_step(d)} lets go of its page and reads",
}
