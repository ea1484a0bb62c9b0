import pytest

from conformance.drivers.subject import Failure
from conformance.page.words import RowNames, differ, event_words, failure_words, parse_due, ranges
from conformance.schedules import generate
from conformance.schedules.trace import Due, Materialize, Save, Start
from tests.conformance.page.runs import faulty


@pytest.mark.parametrize(
    ("numbers", "told"), [([], ""), ([4], "4"), ([4, 5, 6], "4-6"), ([1, 3, 4, 9], "1, 3-4, 9"), ([5, 4], "5, 4")]
)
def test_ranges_join_neighbours(numbers: list[int], told: str) -> None:
    """Whole numbers that follow each other are told as a range, in their order."""
    assert ranges(numbers) == told


def test_every_event_is_told() -> None:
    """Each event of many traces has words that name its requests, and the error that is due."""
    for seed in range(40):
        for event in generate(seed).trace.events:
            told = event_words(event)
            error = getattr(event, "error", None)
            assert error is None or told.endswith(f"{error} is due")
            if isinstance(event, Start):
                assert all(admission.req in told for admission in event.admitted)
            if isinstance(event, Save):
                assert all(part.req in told for part in event.batch)


def test_due_reads_back() -> None:
    """What a failure says was found is read back as it was, and other text is not taken for it."""
    due = Due(rows={"codes": {"r1": [5, 6]}}, spans={"r1": (0, 2)})
    assert parse_due(str(due)) == due
    assert parse_due("no error") is None
    assert parse_due("rows={1} spans={2, (} ") is None


def test_rows_are_told_as_positions() -> None:
    """A row is named by the request, position and step that computed it; zeros and unknown rows are told as such."""
    trace = generate(3).trace
    names = RowNames(trace)
    save = next(event for event in trace.events if isinstance(event, Save) and event.rows and event.error is None)
    key, column = next(iter(save.rows.items()))
    part = save.batch[0]
    assert names.told(key, column[0]) == f"{part.req}'s {part.start} (step {save.label})"
    assert names.told(key, 0) == "zeros"
    assert names.told(key, -5) == "row -5, which no step saved"


def test_differences_are_all_that_differs() -> None:
    """Rows, missing rows, missing keys and spans that differ are each told once, at their positions."""
    names = RowNames(generate(3).trace)
    due = Due(rows={"codes": {"r1": [5, 6, 7]}, "feed": {"r1": [1]}}, spans={"r1": (4, 7)})
    found = Due(rows={"codes": {"r1": [5, 0, 7]}}, spans={"r1": (4, 8)})
    told = [(one.key, one.position, one.found) for one in differ(due, found, names)]
    assert told == [("", -1, "span (4, 8)"), ("codes", 5, "zeros"), ("feed", -1, "no rows")]
    assert not list(differ(due, due, names))


def test_failure_of_rows_is_told_by_rows() -> None:
    """A materialize that hands over wrong rows is told row by row, each at its position, with both sides named."""
    trace, run = faulty()
    assert run.failure is not None
    words = failure_words(trace, run.failure)
    event = trace.events[run.failure.index]
    assert isinstance(event, Materialize)
    assert words.headline.startswith(f"materialize step {event.label}")
    assert words.headline.endswith(f"{len(words.differences)} rows wrong")
    assert {one.found for one in words.differences} == {"zeros"}
    assert all(one.expected.startswith("r") for one in words.differences)


def test_failure_of_tables_is_told_by_slots() -> None:
    """Tables that differ are told entry by entry; any other failure stays in its own words."""
    trace = generate(0).trace
    what = "occupancy: reference {'codes': ('absent', 'committed')}; fast {'codes': ('absent', 'absent')}"
    words = failure_words(trace, Failure(1, "save", "tables", what))
    assert [(d.req, d.key, d.expected, d.found) for d in words.differences] == [
        ("slot 1", "occupancy of codes", "committed", "absent")
    ]
    other = failure_words(trace, Failure(-1, "", "deadlock", "everybody waits"))
    assert (other.headline, other.found, other.differences) == ("the run: deadlock", "everybody waits", ())
