"""TLC on the specification: a sample. `make model-check` runs all of it."""

import pytest

from conformance.tla.accept import Acceptance, Setting, accept
from conformance.tla.check import check, check_manifest
from conformance.tla.trace import events_of

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "name",
    ["rows_two", "failures_live", "unemitted_key_dropped", "wake_before_record", "handover_live:DebugOversizedInv"],
)
def test_a_sample_of_the_manifest_is_as_registered(name: str) -> None:
    """A model, a liveness model, two faults and a goal: figures and all."""
    task = next(task for task in check_manifest([name]) if task.name == name)
    assert check(task).problem == ""


def recorded() -> tuple[Setting, list[dict[str, object]]]:
    """The hardest goal's behaviour, as a trace: a resume onto a slot of the request's own open write."""
    name = "rows_rewrite:DebugResumeSameBlockInv"
    task = next(task for task in check_manifest([name]) if task.name == name)
    outcome = check(task)
    assert outcome.result is not None
    assert outcome.result.violation is not None
    setting = Setting(
        requests=("a", "b", "c"),
        text={"a": (0, 1), "b": (0, 2), "c": (2,)},
        prompt_len={"a": 1, "b": 2, "c": 1},
        num_blocks=2,
        block_size=1,
        keys=frozenset({"codes"}),
        hidden=frozenset(),
        deferred=frozenset({"codes"}),
        emit_tokens={"codes": frozenset({0, 1})},
        watched=frozenset({0}),
        fine=False,
        pressure=False,
    )
    return setting, [dict(event) for event in events_of(outcome.result.violation.behaviour)]


def test_a_trace_is_accepted_and_an_altered_one_rejected_where_it_was_altered() -> None:
    """One event dropped, two swapped, one argument changed: TLC goes as far as the change and no further."""
    setting, events = recorded()
    assert accept(setting, events) == Acceptance(True, len(events))
    at = next(i for i, event in enumerate(events) if event["action"] == "ClaimSlots")
    assert accept(setting, [*events[:at], *events[at + 1 :]]) == Acceptance(False, at)
    swapped = [*events[:at], events[at + 1], events[at], *events[at + 2 :]]
    assert accept(setting, swapped) == Acceptance(False, at)
    altered = [*events[:at], {**events[at], "slots": frozenset({7})}, *events[at + 1 :]]
    assert accept(setting, altered) == Acceptance(False, at)
    anywhere = [{key: value for key, value in event.items() if key != "thread"} for event in events]
    assert accept(setting, anywhere).accepted
