from collections import Counter
from dataclasses import replace

from conformance.conform.goals import (
    FAILED_JOIN,
    FAILED_WRITE,
    FULL_STAGING,
    GAP,
    GIVEN_UP,
    GOALS,
    SAME_STEP,
    SAME_STEP_RECYCLED,
    reached,
)
from conformance.conform.subjects import make_subject
from conformance.drivers.subject import Moment, Run
from conformance.schedules import generate
from conformance.schedules.trace import Fail, Shutdown


def test_goals_agree_with_what_was_drawn() -> None:
    """Where the generator counts the same thing, a run comes to a goal as often as it was drawn."""
    subject = make_subject("fast-eager")
    drawn_counts: Counter[str] = Counter()
    goals: Counter[str] = Counter()
    for seed in range(45):
        drawn = generate(seed)
        broken = drawn.counts["failures"] or any(isinstance(event, Shutdown) for event in drawn.trace.events[:-4])
        if not broken:
            run = subject.run(drawn.trace, seed=seed, record=True)
            assert run.failure is None
            drawn_counts += drawn.counts
            goals += reached(drawn, run)
    assert goals[FULL_STAGING.name] == drawn_counts["full staging pools"] > 0
    assert goals[SAME_STEP.name] == drawn_counts["same-step hits"] > 0
    assert goals[GAP.name] == drawn_counts["gaps of a resume"] > 0
    assert goals[GIVEN_UP.name] == drawn_counts["unsaved steps"] > 0
    assert 0 < goals[SAME_STEP_RECYCLED.name] < goals[SAME_STEP.name]


def test_threads_come_to_goals_that_one_thread_cannot() -> None:
    """Goals that need threads are never come to by the eager mode, and some of them soon by the other."""
    needing = {goal.name for goal in GOALS if goal.threads}
    counts: dict[str, Counter[str]] = {"fast-eager": Counter(), "fast-async": Counter()}
    for seed in range(20):
        drawn = generate(seed)
        for driver, counted in counts.items():
            counted.update(reached(drawn, make_subject(driver).run(drawn.trace, seed=seed, record=True)))
    assert not needing & counts["fast-eager"].keys()
    assert len(needing & counts["fast-async"].keys()) >= 3


def test_a_write_that_a_shutdown_drops_has_not_failed() -> None:
    """The goals of failed writes are come to by a write that fails, with or without a joiner, and by no shutdown."""
    drawn = generate(0)
    trace = drawn.trace.model_copy(update={"events": [Fail(stage="copy"), Shutdown()]})
    drawn = replace(drawn, trace=trace)
    waits = Moment(0, "builder 0", "wait_task", {"task": 4})
    told = {
        "dropped by a shutdown": Moment(1, "engine", "fail_task", {"task": 4}, 1),
        "dropped by the last shutdown": Moment(1, "engine", "fail_task", {"task": 4}),
        "failed": Moment(1, "committer", "fail_task", {"task": 4}),
    }
    found = {name: reached(drawn, Run(None, 2, moments=(waits, moment))) for name, moment in told.items()}
    assert found["failed"] == {FAILED_WRITE.name: 1, FAILED_JOIN.name: 1}
    assert not found["dropped by a shutdown"]
    assert not found["dropped by the last shutdown"]
