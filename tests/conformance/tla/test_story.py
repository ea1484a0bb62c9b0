"""`conformance.tla.story` and `conformance.tla.trace`: a behaviour told, and kept."""

from pathlib import Path
from typing import Any

import pytest

from conformance.tla.errors import ManifestError
from conformance.tla.story import tell
from conformance.tla.tlc import State
from conformance.tla.trace import events_of, load_trace, save_trace
from conformance.tla.values import Function


def state(action: str, thread: str, version: dict[int, int], **rest: Any) -> State:
    """A state of a made-up behaviour."""
    event = Function({"action": action, "thread": thread, **rest})
    return State(action, {"event": event, "version": Function(version), "pins": (0, 0)})


BEHAVIOUR = (
    state("Init", "engine", {0: 0, 5: 0}),
    state("ClaimSlots", "engine", {0: 0, 5: 1}, slots=frozenset({5})),
    state("WritePool", "committer", {0: 0, 5: 1}, task=1),
)


def test_the_story_says_who_did_what_and_what_changed() -> None:
    """Only what changed is told, down to the entry of a function."""
    assert list(tell(BEHAVIOUR)) == [
        "  1  engine    ClaimSlots  slots {5}",
        "               version[5]: 0 -> 1",
        "  2  committer WritePool  task 1",
    ]


def test_a_behaviour_that_never_ends_says_where_it_goes_on() -> None:
    """Back to an earlier state, or nowhere."""
    assert list(tell(BEHAVIOUR, back_to=2))[-1].strip() == "and again from 1"
    assert "nothing more happens" in list(tell(BEHAVIOUR, back_to=3))[-1]


def test_a_behaviour_survives_being_saved(tmp_path: Path) -> None:
    """States, actions and header come back as they were."""
    path = tmp_path / "deep" / "trace.json"
    save_trace(path, "rows_two", {"BlockSize": "= 1"}, BEHAVIOUR, "RowsAreRightInv")
    header, states = load_trace(path)
    assert states == BEHAVIOUR
    assert (header["model"], header["violates"]) == ("rows_two", "RowsAreRightInv")
    assert [event["action"] for event in events_of(states)] == ["ClaimSlots", "WritePool"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    """A file of another kind is not read as an empty trace."""
    path = tmp_path / "other.json"
    path.write_text('{"#meta": {"format": "something"}}')
    with pytest.raises(ManifestError, match=r"other\.json"):
        load_trace(path)
