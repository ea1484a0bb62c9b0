from collections import Counter

from conformance.conform.coverage import Coverage
from conformance.drivers.subject import Moment, Run
from conformance.schedules import generate
from tests.conformance.conform.fakes import Fake


def covered(seeds: range) -> Coverage:
    """What a fake covers with some traces."""
    coverage = Coverage()
    for seed in seeds:
        drawn = generate(seed)
        coverage.add_trace(drawn)
        coverage.add_run("fake", drawn, Fake("fake").run(drawn.trace, seed=seed, record=True))
    return coverage


def test_parts_add_up_in_any_order() -> None:
    """Coverage of parts, merged in any order and through JSON, is the coverage of the whole."""
    whole = covered(range(12))
    parts = [covered(range(8, 12)), covered(range(4)), covered(range(4, 8))]
    merged = Coverage()
    for part in parts:
        merged.merge(Coverage.from_json(part.to_json()))
    assert merged.to_json() == whole.to_json()


def test_every_event_has_a_pair_on_each_side() -> None:
    """A trace of n events has n + 1 pairs, with its beginning and its end."""
    coverage = covered(range(5))
    events = sum(len(generate(seed).trace.events) for seed in range(5))
    assert coverage.sections["events"].total() == events
    assert coverage.sections["pairs of events"].total() == events + 5


def test_pairs_are_those_of_one_thread() -> None:
    """Consecutive actions count within a thread; where the thread changes, the pair is one of two threads."""
    drawn = generate(0)
    told = [("engine", "a"), ("committer", "x"), ("engine", "call"), ("engine", "b"), ("committer", "y")]
    moments = tuple(Moment(i, thread, action) for i, (thread, action) in enumerate(told))
    coverage = Coverage()
    coverage.add_run("d", drawn, Run(None, 1, Counter(a=1), moments=moments))
    assert coverage.sections["pairs in a thread of d"] == Counter(
        {"begin > a": 1, "a > b": 1, "begin > x": 1, "x > y": 1}
    )
    assert coverage.sections["threads' pairs of d"] == Counter(
        {"engine a | committer x": 1, "committer x | engine b": 1, "engine b | committer y": 1}
    )
