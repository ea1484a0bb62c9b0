from typing import Any

from conformance.drivers.subject import Run
from conformance.page.model import page_data
from conformance.schedules import generate
from tests.conformance.page.runs import faulty, right


def drawn(driver: str, seed: int) -> dict[str, Any]:
    """The data of a right run's page."""
    trace, run = right(driver, seed)
    assert run.failure is None
    return page_data(trace, run, driver=driver, command="")


def test_every_event_has_a_call() -> None:
    """Each event that ran is called once, in order where one thread runs them all, with its words."""
    for driver in ("fast-eager", "fast-async"):
        data = drawn(driver, 5)
        calls = [moment["event"] for moment in data["moments"] if moment["action"] == "call"]
        assert sorted(calls) == list(range(len(data["events"])))
        assert driver == "fast-async" or calls == sorted(calls)


def test_spans_lie_within_the_run() -> None:
    """Spans of threads, tasks and reads follow each other, within the moments that there are."""
    data = drawn("fast-async", 5)
    assert {bar["name"] for bar in data["threads"]} >= {"engine", "committer"}
    for bar in (*data["threads"], *data["tasks"], *data["reads"]):
        ends = [0, *(end for span in bar["spans"] for end in span[:2])]
        assert ends == sorted(ends)
        assert ends[-1] <= len(data["moments"])


def test_tasks_go_through_their_chain() -> None:
    """Every task of a run without a failed write goes PENDING, QUEUED, COPYING, HOST_READY, WRITTEN."""
    chain = ["PENDING", "QUEUED", "COPYING", "HOST_READY", "WRITTEN"]
    for seed in (3, 5):
        data = drawn("fast-eager", seed)
        assert data["tasks"]
        for bar in data["tasks"]:
            assert [state for _, _, state in bar["spans"]] == chain


def test_changes_of_slots_end_in_the_caches_tables() -> None:
    """The changes that moments carry, applied in order, are the tables followed to the end."""
    data = drawn("fast-eager", 5)
    last: dict[int, list[Any]] = {}
    for moment in data["moments"]:
        last |= {slot: state for slot, *state in moment.get("slots", ())}
    assert last
    for version, _, _, letters in last.values():
        assert version > 0
        assert len(letters) == len(data["keys"])
        assert "t" not in letters, "at rest nothing is on its way"


def test_failure_is_the_last_moment_with_its_slots() -> None:
    """A failing run's page ends at the failure, with each wrong row's slot marked."""
    trace, run = faulty()
    data = page_data(trace, run, driver="fast-eager", command="omni-prefix ...")
    assert data["moments"][-1]["action"] == "failure"
    assert data["failure"]["event"] == data["moments"][-1]["event"]
    assert len(data["failure"]["differences"]) == 4
    assert data["failure"]["slots"] == [2, 3]


def test_driver_that_tells_nothing_still_has_a_page() -> None:
    """A run without moments is drawn by its events alone."""
    trace = generate(2).trace
    data = page_data(trace, Run(None, 4), driver="module:other", command="")
    assert [moment["action"] for moment in data["moments"]] == ["call"] * 4
    assert (data["tasks"], data["reads"]) == ([], [])
