from collections import Counter

from conformance.conform.goals import FULL_STAGING, GAP, GIVEN_UP, GOALS, SAME_STEP, SAME_STEP_RECYCLED, reached
from conformance.conform.subjects import make_subject
from conformance.schedules import generate
from conformance.schedules.trace import Shutdown


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
