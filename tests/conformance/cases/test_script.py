"""Scripts: what a step owes is worked out from texts and blocks, not copied from an implementation."""

from __future__ import annotations

from conformance.cases.script import HIDDEN, K, Script, content_of
from conformance.schedules.content import row
from conformance.schedules.trace import CONTRACT, ROW, Due, Materialize, Start


def _due(script: Script) -> Due | None:
    event = script.events[-1]
    assert isinstance(event, Materialize)
    return event.due


def test_a_hit_is_due_the_rows_of_its_text() -> None:
    """From position 0 to the end of the step, each the row of the text up to there."""
    script = Script()
    script.step(script.new("A", "abcd", [3]))
    script.take(script.step(script.new("B", "abcdef", [3, 1], hit=4), emits={HIDDEN.name}))
    due = _due(script)
    assert due is not None
    assert due.spans == {"B": (0, 6)}
    content = content_of("abcdef")
    assert due.rows[HIDDEN.name]["B"] == [row(HIDDEN.name, content[: n + 2]) for n in range(6)]
    assert due.rows[K.name]["B"] == [row(K.name, content[: n + 2]) for n in range(4)]


def test_a_hit_on_nothing_is_due_an_error() -> None:
    """Hidden rows that nobody computed are lost."""
    script = Script()
    script.take(script.step(script.new("B", "abcdef", [3, 1], hit=4)))
    event = script.events[-1]
    assert isinstance(event, Materialize)
    assert (event.due, event.error) == (None, ROW)


def test_the_engine_may_tell_another_table_than_the_true_one() -> None:
    """The admission says so; the slots that are computed do not change."""
    script = Script()
    script.step(script.new("A", "abcd", [3]))
    back = script.new("B", "abcdef", [3, 1], hit=4)
    script.start(back, error=CONTRACT, tables={"B": None})
    event = script.events[-1]
    assert isinstance(event, Start)
    assert (event.admitted[0].blocks, event.error) == (None, CONTRACT)
    assert back.blocks == (3, 1)


def test_at_the_end_everybody_finished_and_every_step_was_consumed() -> None:
    """`end` asks for the steps that are still open."""
    script = Script()
    script.step(script.new("A", "abcd", [0]))
    events = script.end().events
    assert [event.event for event in events] == ["start", "save", "start", "materialize", "rest"]
