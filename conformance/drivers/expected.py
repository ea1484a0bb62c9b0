"""What the tables have to be where a trace is at rest: the reference model's. Worked out once a trace."""

from __future__ import annotations

from collections.abc import Mapping

from conformance.drivers.reference import ReferenceDriver
from conformance.schedules.driver import Snapshot
from conformance.schedules.trace import WRITE, Rest, Trace

_last: list[tuple[Trace, Mapping[int, Snapshot | None]]] = []


def tables_at_rest(trace: Trace) -> Mapping[int, Snapshot | None]:
    """The tables by index of each `Rest`; None behind a failed write, where nothing is said of them."""
    if not _last or _last[0][0] is not trace:
        _last[:] = [(trace, _worked_out(trace))]
    return _last[0][1]


def keep_tables_at_rest(trace: Trace, found: Mapping[int, Snapshot | None]) -> None:
    """Somebody ran the reference model on the trace: its tables need not be worked out again."""
    _last[:] = [(trace, found)]


def _worked_out(trace: Trace) -> dict[int, Snapshot | None]:
    driver = ReferenceDriver(trace.header, checked=False)
    found: dict[int, Snapshot | None] = {}
    failed = False
    for index, event in enumerate(trace.events):
        failed = failed or driver.apply(event).error == WRITE
        if isinstance(event, Rest):
            found[index] = None if failed else driver.snapshot()
    return found
