"""Hits from the pool, from the log and from the same step, planned once; spans. The row of position p is base + p."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_prefix_fast import (
    ModelCachePolicy,
    OmniPrefixCacheContractError,
    OmniPrefixCacheManager,
    OmniPrefixCacheRowError,
    PrefixCacheConfig,
)
from tests.omni_prefix_fast.harness import (
    Engine,
    View,
    column,
    filled,
    per_token,
)

DEFER = ModelCachePolicy(deferred_keys=frozenset({"d"}))


@pytest.mark.parametrize("hit", [1, 3, 4, 6, 7, 8])
def test_hit_of_any_length(hit: int) -> None:
    """Cached rows and computed rows together are the whole prompt, at block borders and off them."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0, 1], 0, 8)]), "A")
    step = engine.step(new=[("B", [0, 1, 2], hit, 10 - hit)])
    outs = engine.take(step, "B")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == list(range(10))
    assert outs.spans == {"B": (0, 10)}


@pytest.mark.parametrize("policy", [ModelCachePolicy(), DEFER], ids=["immediate", "in transit"])
def test_same_step_hit(policy: ModelCachePolicy) -> None:
    """B hits blocks that A computes in the same step: fresh ones, recycled ones, and both in one span."""
    engine = Engine(policy=policy)
    engine.take(engine.step(new=[("old", [1, 3], 0, 8)], base={"old": 700}, mm={"d": per_token(3)}), "old")
    # Block 0 is fresh, block 1 recycled, block 2 fresh; blocks 3's rows are an older tenant's and still right for C.
    step = engine.step(
        new=[
            ("A", [0, 1], 0, 8),
            ("B", [0, 1, 2], 8, 2),
            ("C", [3, 4], 4, 1),
        ],
        finished=["old"],
        base={"B": 100},
        mm={"d": per_token(3)},
    )
    outs = engine.take(step, "A", "B", "C")
    assert outs.hidden_states is not None
    for rows in (outs.hidden_states, outs.mm_outputs["d"]):
        assert column(rows["A"]) == list(range(8))
        assert column(rows["B"]) == [*range(8), 108, 109]
        assert column(rows["C"]) == [704, 705, 706, 707, 4]
    assert engine.cache.statistics().reads_same_step == 1


@pytest.mark.parametrize("policy", [ModelCachePolicy(), DEFER], ids=["immediate", "deferred"])
def test_span_from_the_pool_and_from_the_same_step(policy: ModelCachePolicy) -> None:
    """Half of the span was computed before, half is computed now by the request that hit the first half itself."""
    engine = Engine(policy=policy)
    engine.take(engine.step(new=[("P", [0], 0, 4)], mm={"d": per_token(1)}), "P")
    step = engine.step(
        new=[("A", [0, 1], 4, 4), ("B", [0, 1, 2], 8, 1)], base={"A": 40, "B": 90}, mm={"d": per_token(1)}
    )
    outs = engine.take(step, "B")
    assert outs.hidden_states is not None
    expected = [0, 1, 2, 3, 44, 45, 46, 47, 98]
    assert column(outs.hidden_states["B"]) == column(outs.mm_outputs["d"]["B"]) == expected


def test_read_is_not_planned_again_after_publish() -> None:
    """A hole at publish stays a hole: rows that a later tenant puts there are not the ones that were owed."""
    engine = Engine(policy=ModelCachePolicy(token_keys=frozenset({"k"})))
    engine.take(engine.step(new=[("A", [0], 0, 4)]), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)], mm={"k": per_token(1)})
    engine.take(engine.step(new=[("C", [0], 0, 4)], finished=["A", "B"], base={"C": 70}, mm={"k": per_token(1)}), "C")
    assert engine.mm(late, "k", "B") == [0, 0, 0, 0, 4]


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
@pytest.mark.parametrize("changes", [1, 2])
def test_late_read_after_the_blocks_changed_hands(changes: int, deferred: bool) -> None:
    """What was planned is handed over, however many tenants the blocks had since; the tenants get their own rows."""
    engine = Engine(policy=DEFER if deferred else None)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(2)}), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)], finished=["A"], base={"B": 50}, mm={"d": per_token(2)})
    steps = [
        engine.step(
            new=[(f"C{i}", [0], 0, 4)],
            finished=["B"] if i == 0 else [f"C{i - 1}"],
            base={f"C{i}": 100 * (i + 1)},
            mm={"d": per_token(2)},
        )
        for i in range(changes)
    ]
    outs = engine.take(late, "B")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == column(outs.mm_outputs["d"]["B"]) == [0, 1, 2, 3, 54]
    for i, step in enumerate(steps):
        assert engine.mm(step, "d", f"C{i}") == [100 * (i + 1) + p for p in range(4)]


@pytest.mark.parametrize("emits_d", [True, False], ids=["all keys", "hidden only"])
def test_late_read_of_rows_that_the_same_write_rewrites(emits_d: bool) -> None:
    """A is preempted and resumes onto the same block while its deferred write is open: B's plan keeps A's old rows."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(2)}), "A")
    late = engine.step(new=[("B", [0, 1], 4, 1)], mm={"d": per_token(2)})
    mm: Mapping[str, Any] = {"d": per_token(2)} if emits_d else {}
    again = engine.step(resumed=[("A", [0], 0, 4)], base={"A": 600}, mm=mm)
    outs = engine.take(late, "B")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == column(outs.mm_outputs["d"]["B"]) == [0, 1, 2, 3, 4]
    assert engine.hidden(again, "A") == [600, 601, 602, 603]
    step = engine.step(new=[("C", [0, 2], 4, 1)], finished=["A"], mm={"d": per_token(2)})
    outs = engine.take(step, "C")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["C"]) == [600, 601, 602, 603, 4]
    assert column(outs.mm_outputs["d"]["C"]) == ([600, 601, 602, 603, 4] if emits_d else [0, 0, 0, 0, 4])


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
def test_claim_ends_the_tenancy_for_every_key(deferred: bool) -> None:
    """The new tenant's step does not emit the mm key: a hit on it reads zeros, never the former tenant's rows."""
    engine = Engine(policy=DEFER if deferred else None)
    engine.take(engine.step(new=[("A", [0], 0, 4)], base={"A": 700}, mm={"d": per_token(1)}), "A")
    engine.take(engine.step(new=[("B", [0], 0, 4)], finished=["A"]), "B")
    outs = engine.take(engine.step(new=[("C", [0, 1], 4, 2)], mm={"d": per_token(1)}), "C")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["C"]) == [0, 1, 2, 3, 4, 5]
    assert column(outs.mm_outputs["d"]["C"]) == [0, 0, 0, 0, 4, 5]


def test_key_that_the_step_does_not_emit_still_hands_over_its_prefix() -> None:
    """The span is owed for every key with a row in it; `mm_spans` says where it ends."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1), "k": per_token(1)}), "A")
    outs = engine.take(engine.step(new=[("B", [0, 1], 4, 2), ("C", [2], 0, 1)]), "B", "C")
    assert {key: column(rows["B"]) for key, rows in outs.mm_outputs.items()} == {"d": [0, 1, 2, 3], "k": [0, 1, 2, 3]}
    assert outs.mm_spans == {"d": {"B": (0, 4)}, "k": {"B": (0, 4)}}
    assert outs.spans == {"B": (0, 6), "C": (0, 1)}


def test_key_first_seen_on_a_hit_has_zeros_before() -> None:
    """A key opened by this very step has no cached row: zeros, then its own."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4)]), "A")
    assert engine.mm(engine.step(new=[("B", [0, 1], 4, 2)], mm={"new": per_token(3)}), "new", "B") == [0, 0, 0, 0, 4, 5]


def test_partly_absent_mm_rows_are_zeros_between_rows() -> None:
    """Holes are zeros exactly where no row is, pool rows and log rows beside them."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0], 0, 2)], base={"A": 10}, mm={"d": per_token(1), "k": per_token(1)}), "A")
    engine.take(engine.step(cached=[("A", 1)]), "A")
    engine.take(engine.step(cached=[("A", 2, [1])], mm={"d": per_token(1), "k": per_token(1)}), "A")
    outs = engine.take(engine.step(new=[("B", [0, 1], 5, 1)], mm={"d": per_token(1), "k": per_token(1)}), "B")
    for key in ("d", "k"):
        assert column(outs.mm_outputs[key]["B"]) == [10, 11, 0, 13, 14, 5]


def test_hit_on_hidden_rows_that_are_absent_is_fatal() -> None:
    """The request, the position and the slot are named; the step is consumed; others of it were not harmed before."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 3)]), "A")
    step = engine.step(new=[("B", [0, 1], 4, 1), ("C", [2], 0, 1)])
    with pytest.raises(OmniPrefixCacheRowError, match=rf"step {step}: request 'B'.*0\.\.3.*position 3 \(slot 3\)"):
        engine.take(step, "B", "C")
    with pytest.raises(OmniPrefixCacheContractError, match="consumed already"):
        engine.take(step, "C")
    assert engine.hidden(engine.step(new=[("D", [0, 3], 3, 1)]), "D") == [0, 1, 2, 3]


def test_others_of_the_step_are_handed_over_beside_a_failed_read() -> None:
    """Whoever does not ask for the request without rows gets its own."""
    engine = Engine()
    step = engine.step(new=[("B", [0, 1], 4, 1), ("C", [2], 0, 1)])
    assert engine.hidden(step, "C") == [0]


def test_no_hidden_rows_are_owed_if_the_policy_skips_them() -> None:
    """Hidden states are ignored, absent from the outputs, and their absence fails no hit."""
    engine = Engine(policy=ModelCachePolicy(needs_full_hidden_states=False))
    outs = engine.take(engine.step(new=[("A", [0], 0, 4)], hidden=None, mm={"k": per_token(2)}), "A")
    assert outs.hidden_states is None
    outs = engine.take(engine.step(new=[("B", [0, 1], 4, 1)], mm={"k": per_token(2)}), "B")
    assert outs.hidden_states is None
    assert column(outs.mm_outputs["k"]["B"]) == [0, 1, 2, 3, 4]
    assert "__hidden_states__" not in engine.cache.footprint().pool_bytes


def test_a_miss_is_no_error() -> None:
    """A request that hits nothing gets what it computed."""
    engine = Engine()
    assert engine.hidden(engine.step(new=[("A", [0], 0, 3)]), "A") == [0, 1, 2]


def test_spans_of_chunks_and_decodes() -> None:
    """Each step covers what it computed; a hit adds its prefix once, in the first step."""
    engine = Engine()
    engine.take(engine.step(new=[("P", [0], 0, 4)]), "P")
    spans = [engine.take(engine.step(new=[("A", [0, 1, 2], 4, 3)]), "A").spans["A"]]
    spans += [engine.take(engine.step(cached=[("A", n)]), "A").spans["A"] for n in (2, 1, 1)]
    assert spans == [(0, 7), (7, 9), (9, 10), (10, 11)]


@pytest.mark.parametrize("resume_as", ["resumed", "new"])
@pytest.mark.parametrize(
    ("hit", "count", "rows", "span"),
    [
        (0, 9, list(range(9)), (0, 9)),
        (4, 6, [4, 5, 6, 7, 8, 9], (4, 10)),
        (6, 2, [6, 7], (6, 8)),
        (8, 2, [1006, 1007, 8, 9], (6, 10)),
    ],
    ids=["no hit", "smaller hit", "same", "larger hit"],
)
def test_span_of_a_resumed_request(
    resume_as: str, hit: int, count: int, rows: list[int], span: tuple[int, int]
) -> None:
    """A computed 0..5 and is preempted: rows are owed from min(emitted, computed) on, the gap from the cache."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0, 1], 0, 6)]), "A")
    engine.take(engine.step(new=[("Q", [4, 5], 0, 8)], base={"Q": 1000}), "Q")
    blocks = [0, 5, 6] if hit == 8 else [0, 1, 6]
    come_back: dict[str, Any] = {resume_as: [("A", blocks, hit, count)]}
    outs = engine.take(engine.step(**come_back), "A")
    assert outs.hidden_states is not None
    assert outs.spans["A"] == span
    assert column(outs.hidden_states["A"]) == rows


def test_continuation_of_a_live_request_is_not_a_hit() -> None:
    """A live id that comes back as new with what it already computed gets the new rows only."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0, 1], 0, 6)]), "A")
    outs = engine.take(engine.step(new=[("A", [0, 1], 6, 2)]), "A")
    assert outs.spans["A"] == (6, 8)
    assert engine.cache.statistics().requests_started == 1
    assert engine.cache.statistics().requests_resumed == 1


def test_id_used_again_after_it_finished() -> None:
    """The same id is a new request: nothing of the old one is left, its span starts at 0, its writes count from 1."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0, 1], 0, 6)], mm={"d": per_token(1)}), "A")
    step = engine.step(new=[("A", [0, 2], 4, 3)], finished=["A"], base={"A": 50}, mm={"d": per_token(1)})
    outs = engine.take(step, "A")
    assert outs.spans["A"] == (0, 7)
    assert column(outs.mm_outputs["d"]["A"]) == [0, 1, 2, 3, 54, 55, 56]
    assert {write_n for _, write_n in engine.cache.inspect().open_writes.values()} == {1}


def test_finished_ids_come_before_new_ones() -> None:
    """An id that finishes and starts in one output is started; one never seen is ignored."""
    engine = Engine()
    step = engine.step(new=[("A", [0], 0, 2)], finished=["A", "never seen"])
    assert engine.hidden(step, "A") == [0, 1]
    assert engine.cache.inspect().emitted == {"A": 2}
    engine.step(finished=["A"], new=[("B", [1], 0, 1)])
    assert set(engine.cache.inspect().emitted) == {"B"}


def test_step_of_zero_tokens() -> None:
    """A step that computes nothing may be saved or not, has outputs of nothing, and claims nothing."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(1), "k": per_token(1)}), "A")
    versions = engine.cache.inspect().version
    empty = {"d": torch.zeros(0, 1), "k": torch.zeros(0, 1)}
    for hidden in (None, torch.zeros(0, 2), torch.zeros(8, 2)):
        step = engine.step(hidden=hidden, mm=empty, padded=8)
        outs = engine.take(step)
        assert (outs.hidden_states, outs.spans) == ({}, {})
    engine.start(finished=["A"])
    engine.start()
    assert engine.cache.inspect().version == versions
    outs = engine.take(engine.step(new=[("B", [0, 1], 4, 1)], mm={"d": per_token(1), "k": per_token(1)}), "B")
    assert column(outs.mm_outputs["d"]["B"]) == column(outs.mm_outputs["k"]["B"]) == [0, 1, 2, 3, 4]
    assert engine.cache.statistics().steps_abandoned == 0


def test_scheduler_output_without_optional_fields() -> None:
    """New requests and counts are enough; a running request goes on where it stopped if its position is not told."""
    view = View(4, tables={"A": [0, 1]}, computed={"A": 0}, order=["A"])
    cache = OmniPrefixCacheManager(PrefixCacheConfig(num_blocks=8, block_size=4), view)
    cache.new_step_starts(
        SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id="A")], num_scheduled_tokens={"A": 3})
    )
    cache.materialize(cache.save_outputs(filled(range(3), 2), None, num_tokens_unpadded=3), ["A"])
    view.computed["A"] = 3
    cache.new_step_starts(SimpleNamespace(num_scheduled_tokens={"A": 2}))
    outs = cache.materialize(cache.save_outputs(filled([3, 4], 2), {}, num_tokens_unpadded=2), ["A"])
    assert outs.spans == {"A": (3, 5)}
    cache.new_step_starts(object())
