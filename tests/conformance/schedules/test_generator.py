"""Random traces: repeatable, rich enough to hold what they are for, and faithful to the engine's rules."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.schedules import generate
from conformance.schedules.trace import CONTRACT, Materialize, Save, Start

SEEDS = st.integers(min_value=0, max_value=1 << 40)


@given(seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_a_seed_is_a_trace(seed: int) -> None:
    """The same seed draws the same trace, event for event."""
    assert generate(seed).trace == generate(seed).trace


def test_traces_hold_what_they_are_for() -> None:
    """Each kind of event that the generator promises occurs within 150 traces."""
    counts: Counter[str] = Counter()
    for seed in range(150):
        counts.update(generate(seed).counts)
    promised = {
        "hits",
        "same-step hits",
        "gaps of a resume",
        "lost hits",
        "preemptions",
        "resumed admissions",
        "continued admissions",
        "aborts",
        "late consumers",
        "discards",
        "refused calls",
        "full staging pools",
        "unsaved steps",
        "blocks filled from outside",
        "failures",
        "clones that fail",
    }
    assert not {name for name in promised if counts[name] == 0}, counts


@given(seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_step_computes_each_slot_once_and_saves_what_was_scheduled(seed: int) -> None:
    """Slots of one step differ, stand at the positions' offsets, and the batch is what the scheduler announced."""
    trace = generate(seed).trace
    size = trace.header.block_size
    start = Start()
    for event in trace.events:
        if isinstance(event, Start):
            start = event
        if not isinstance(event, Save) or event.error is not None:
            continue
        slots = [slot for part in event.batch for slot in part.slots]
        assert len(set(slots)) == len(slots)
        assert {part.req: len(part.slots) for part in event.batch} == start.scheduled
        for part in event.batch:
            assert [slot % size for slot in part.slots] == [(part.start + i) % size for i in range(len(part.slots))]


@given(seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_rows_due_are_as_long_as_their_span(seed: int) -> None:
    """Hidden rows cover the whole span; another key covers all of it or the part that comes from the cache."""
    for event in generate(seed).trace.events:
        if not isinstance(event, Materialize) or event.due is None:
            continue
        for key, of_key in event.due.rows.items():
            for req, rows in of_key.items():
                start, end = event.due.spans[req]
                assert len(rows) <= end - start
                if key.startswith("__hidden"):
                    assert len(rows) == end - start


def test_refused_tables_are_short_by_a_block() -> None:
    """A hit is told with no table, with none of its blocks, and with all but one: each is refused."""
    refused = [
        (admission.blocks, -(-admission.computed // trace.header.block_size))
        for trace in (generate(seed).trace for seed in range(400))
        for event in trace.events
        if isinstance(event, Start) and event.error == CONTRACT
        for admission in event.admitted
        if len(admission.blocks or ()) * trace.header.block_size < admission.computed
    ]
    assert any(blocks is None for blocks, _ in refused)
    assert any(blocks == [] for blocks, _ in refused)
    assert any(blocks and len(blocks) == needed - 1 for blocks, needed in refused)
