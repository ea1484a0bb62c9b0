"""The reference cache behind its public contract, by hand-written scenarios."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from omni_prefix_ref import HIDDEN_KEY, Admission, BatchItem, EagerDriver, KeySpec, Outputs, Rules, Settings, StepStart
from omni_prefix_ref.driver import slots_of
from omni_prefix_ref.errors import (
    OmniPrefixCacheClosedError,
    OmniPrefixCacheContractError,
    OmniPrefixCacheRowError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheWriteError,
)

BS = 4
CODES = "codes"
FEED = "feed"


class Engine:
    """Drives a reference cache in the notation of the cases: who holds which blocks and computes which positions."""

    def __init__(self, *, depth: int = 4, budget: int = 10_000, page_rows: int = 64, num_blocks: int = 8) -> None:
        keys = (KeySpec(HIDDEN_KEY, 8), KeySpec(FEED, 4), KeySpec(CODES, 16, deferred=True))
        self.rules = Rules()
        self.cache = EagerDriver(Settings(BS, num_blocks, keys, depth, page_rows, budget), observers=(self.rules,))

    def start(
        self,
        *admitted: tuple[str, int, tuple[int, ...]],
        finished: tuple[str, ...] = (),
        scheduled: Mapping[str, int] | None = None,
    ) -> None:
        self.cache.new_step_starts(StepStart(finished, tuple(Admission(*a) for a in admitted), scheduled or {}))

    def save(self, *parts: tuple[str, tuple[int, ...], range, int], emits: tuple[str, ...] = (HIDDEN_KEY,)) -> int:
        """Save `(req, blocks, positions, base)` parts; a row of position p is `base + p + 1`."""
        batch = tuple(BatchItem(req, p.start, slots_of(blocks, p.start, p.stop, BS)) for req, blocks, p, _ in parts)
        column = tuple(base + p + 1 for _, _, positions, base in parts for p in positions)
        return self.cache.save_outputs(batch, dict.fromkeys(emits, column))

    def step(
        self,
        *parts: tuple[str, tuple[int, ...], range, int],
        hits: Mapping[str, int] | None = None,
        finished: tuple[str, ...] = (),
        emits: tuple[str, ...] = (HIDDEN_KEY,),
    ) -> int:
        """Start and save a step; requests named in `hits` are admitted with so many computed tokens."""
        admitted = [(req, n, blocks) for req, blocks, _, _ in parts for r, n in (hits or {}).items() if r == req]
        self.start(*admitted, finished=finished, scheduled={req: len(p) for req, _, p, _ in parts})
        return self.save(*parts, emits=emits)

    def take(self, step: int, *reqs: str) -> Outputs:
        return self.cache.materialize(step, reqs)


def rows(positions: range, base: int = 0) -> tuple[int, ...]:
    """Rows of these positions, by this base."""
    return tuple(base + p + 1 for p in positions)


def test_hit_is_cached_prefix_and_this_step() -> None:
    """E01: rows handed over are hit + scheduled, always."""
    engine = Engine()
    first = engine.step(("a", (0, 1), range(8), 0), hits={"a": 0})
    assert engine.take(first, "a").rows[HIDDEN_KEY] == {"a": rows(range(8))}
    second = engine.step(("b", (0, 1, 2), range(8, 12), 0), hits={"b": 8}, finished=("a",))
    outputs = engine.take(second, "b")
    assert outputs.rows[HIDDEN_KEY] == {"b": rows(range(12))}
    assert outputs.spans == {"b": (0, 12)}


def test_batch_is_split_by_computed_tokens() -> None:
    """E02: decode, hit and new request in one step each get their own rows, asked for in any order."""
    engine = Engine()
    engine.cache.discard_step(engine.step(("a", (0, 1), range(8), 0), ("d", (2,), range(3), 40), hits={"a": 0, "d": 0}))
    step = engine.step(
        ("d", (2,), range(3, 4), 40),
        ("h", (0, 1, 3), range(8, 10), 0),
        ("n", (4,), range(3), 60),
        hits={"h": 8, "n": 0},
    )
    found = engine.take(step, "n", "h", "d").rows[HIDDEN_KEY]
    assert found == {"d": (44,), "h": rows(range(10)), "n": (61, 62, 63)}


def test_unaligned_hit_is_whole() -> None:
    """E06: a hit that ends within a block is read to its last position."""
    engine = Engine()
    engine.cache.discard_step(engine.step(("a", (0, 1), range(6), 0), hits={"a": 0}))
    step = engine.step(("b", (0, 1), range(6, 8), 0), hits={"b": 6})
    assert engine.take(step, "b").rows[HIDDEN_KEY] == {"b": rows(range(8))}


def test_planned_read_survives_reuse() -> None:
    """E16: a read planned before its block changed hands serves the tenant that it was planned on."""
    engine = Engine()
    engine.cache.discard_step(engine.step(("a", (0,), range(4), 0), hits={"a": 0}))
    late = engine.step(("b", (0, 1), range(4, 6), 0), hits={"b": 4}, finished=("a",))
    engine.cache.discard_step(
        engine.step(("c", (0,), range(4), 99), hits={"c": 0}, finished=("b",), emits=(HIDDEN_KEY, FEED, CODES))
    )
    assert engine.take(late, "b").rows == {HIDDEN_KEY: {"b": rows(range(6))}}


def test_same_step_hit_on_a_recycled_block() -> None:
    """A read whose producer is in the batch is planned again, and only then."""
    engine = Engine()
    engine.cache.discard_step(engine.step(("old", (0,), range(4), 50), hits={"old": 0}))
    step = engine.step(
        ("a", (0,), range(4), 0), ("b", (0, 1), range(4, 5), 0), hits={"a": 0, "b": 4}, finished=("old",)
    )
    assert engine.take(step, "b", "a").rows[HIDDEN_KEY] == {"a": rows(range(4)), "b": rows(range(5))}


def test_resume_onto_the_same_block_with_its_deferred_write_open() -> None:
    """A rewrite by the very task that a read was planned on changes nothing for that read."""
    engine = Engine()
    emits = (HIDDEN_KEY, CODES)
    engine.cache.discard_step(engine.step(("a", (0,), range(4), 0), hits={"a": 0}, emits=emits))
    late = engine.step(("b", (0, 1), range(4, 5), 0), hits={"b": 4})
    engine.cache.discard_step(engine.step(("a", (0,), range(4), 500), hits={"a": 0}, emits=emits))
    assert engine.take(late, "b").rows[CODES] == {"b": rows(range(4))}
    after = engine.step(("c", (0, 2), range(4, 5), 500), hits={"c": 4}, finished=("a", "b"))
    assert engine.take(after, "c").rows[CODES] == {"c": rows(range(4), 500)}


def test_claim_ends_the_former_tenancy_of_keys_that_are_not_emitted() -> None:
    """Rows of a key that the new tenant does not emit are gone; a hit on it reads zeros, or nothing."""
    engine = Engine()
    engine.cache.discard_step(engine.step(("a", (0,), range(4), 7), hits={"a": 0}, emits=(HIDDEN_KEY, FEED)))
    engine.cache.discard_step(engine.step(("b", (0,), range(4), 0), hits={"b": 0}, finished=("a",)))
    quiet = engine.step(("c", (0, 1), range(4, 5), 0), hits={"c": 4})
    assert FEED not in engine.take(quiet, "c").rows
    loud = engine.step(("d", (0, 2), range(4, 5), 0), hits={"d": 4}, emits=(HIDDEN_KEY, FEED))
    assert engine.take(loud, "d").rows[FEED] == {"d": (0, 0, 0, 0, 5)}


def test_key_of_a_hit_is_owed_though_the_step_does_not_emit_it() -> None:
    """D1: cached rows of a key reach the consumer in a step that emits none."""
    engine = Engine()
    engine.cache.discard_step(engine.step(("a", (0,), range(4), 5), hits={"a": 0}, emits=(HIDDEN_KEY, FEED)))
    step = engine.step(("b", (0, 1), range(4, 6), 5), hits={"b": 4})
    assert engine.take(step, "b").rows[FEED] == {"b": rows(range(4), 5)}


def test_abort_still_lands() -> None:
    """E28: deferred rows of a request aborted in the very step of the hit are there."""
    engine = Engine()
    emits = (HIDDEN_KEY, CODES)
    engine.cache.discard_step(engine.step(("a", (0,), range(4), 0), hits={"a": 0}, emits=emits))
    step = engine.step(("b", (0, 1), range(4, 6), 0), hits={"b": 4}, finished=("a",), emits=emits)
    assert engine.take(step, "b").rows[CODES] == {"b": rows(range(6))}


def test_continuation_is_not_a_hit_and_a_larger_hit_on_resume_is() -> None:
    """E26 and the span rule: nothing twice, and the gap of a resume comes from the cache."""
    engine = Engine()
    assert engine.take(engine.step(("a", (0, 1), range(4), 0), hits={"a": 0}), "a").spans == {"a": (0, 4)}
    assert engine.take(engine.step(("a", (0, 1), range(4, 6), 0), hits={"a": 4}), "a").spans == {"a": (4, 6)}
    engine.cache.discard_step(engine.step(("b", (2, 3), range(8), 0), hits={"b": 0}))
    outputs = engine.take(engine.step(("a", (2, 3, 4), range(8, 9), 0), hits={"a": 8}), "a")
    assert outputs.spans == {"a": (6, 9)}
    assert outputs.rows[HIDDEN_KEY] == {"a": rows(range(6, 9))}


def test_budget_is_never_exceeded_by_one_long_request() -> None:
    """E33: a running request's write is sealed and another opened; all its rows land."""
    engine = Engine(budget=48)
    for p in range(12):
        hits = {"a": 0} if p == 0 else {}
        engine.cache.discard_step(
            engine.step(("a", (0, 1, 2), range(p, p + 1), 0), hits=hits, emits=(HIDDEN_KEY, CODES))
        )
        assert engine.cache.machine.charged <= 48
    assert engine.cache.machine.write_n["a"] == 4
    step = engine.step(("b", (0, 1, 2, 3), range(12, 13), 0), hits={"b": 12}, finished=("a",))
    assert engine.take(step, "b").rows[CODES] == {"b": rows(range(12))}


def test_chunk_larger_than_the_budget_joins_the_immediate_write() -> None:
    """Rows that could never be reserved are written at once."""
    engine = Engine(budget=48)
    engine.cache.discard_step(engine.step(("a", (0,), range(4), 0), hits={"a": 0}, emits=(HIDDEN_KEY, CODES)))
    assert engine.cache.machine.charged == 0
    step = engine.step(("b", (0, 1), range(4, 5), 0), hits={"b": 4})
    assert engine.take(step, "b").rows[CODES] == {"b": rows(range(4))}


def test_absent_hidden_row_is_fatal_to_its_request_alone() -> None:
    """A hit with no hidden rows behind it raises when its rows are asked for; others of the step are served."""
    engine = Engine()
    parts = (("a", (5, 6), range(4, 5), 0), ("n", (1,), range(2), 9))
    step = engine.step(*parts, hits={"a": 4, "n": 0})
    assert engine.take(step, "n").rows[HIDDEN_KEY] == {"n": (10, 11)}
    engine.start(("c", 4, (5, 2)), scheduled={"c": 1})
    step = engine.save(("c", (5, 2), range(4, 5), 0))
    with pytest.raises(OmniPrefixCacheRowError, match="'c'"):
        engine.take(step, "c")
    with pytest.raises(OmniPrefixCacheContractError, match="consumed"):
        engine.take(step, "c")


@pytest.mark.parametrize("stage", ["copy", "write"])
def test_failed_write_is_raised_again_and_again(stage: str) -> None:
    """E31: the first failure is loud, and every later entry raises it."""
    engine = Engine()
    step = engine.step(("a", (0,), range(4), 0), hits={"a": 0})
    engine.cache.fail_next = stage
    with pytest.raises(OmniPrefixCacheWriteError):
        engine.step(("a", (0, 1), range(4, 5), 0))
    with pytest.raises(OmniPrefixCacheWriteError):
        engine.take(step, "a")
    with pytest.raises(OmniPrefixCacheWriteError):
        engine.cache.discard_step(step)
    with pytest.raises(OmniPrefixCacheWriteError):
        engine.start()
    engine.cache.shutdown()


def test_full_staging_pool_times_out_and_changes_nothing() -> None:
    """E32: the error names the unconsumed steps; once one is consumed, the same save goes through."""
    engine = Engine(depth=2)
    first = engine.step(("a", (0,), range(2), 0), hits={"a": 0})
    engine.step(("a", (0,), range(2, 3), 0))
    engine.start(scheduled={"a": 1})
    before = engine.cache.machine
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=rf"\[{first}, "):
        engine.save(("a", (0,), range(3, 4), 0))
    assert engine.cache.machine == before
    engine.cache.discard_step(first)
    engine.save(("a", (0,), range(3, 4), 0))


def test_resumed_request_without_blocks_harms_no_other() -> None:
    """E23: the error names the request; the same step, told rightly, goes through."""
    engine = Engine()
    engine.cache.discard_step(engine.step(("a", (0,), range(4), 0), hits={"a": 0}))
    with pytest.raises(OmniPrefixCacheContractError, match="'b'"):
        engine.cache.new_step_starts(StepStart(("a",), (Admission("b", 4, None),), {"b": 1}))
    with pytest.raises(OmniPrefixCacheContractError, match="'b'"):
        engine.start(("b", 8, (0,)), scheduled={"b": 1})
    step = engine.step(("b", (0, 1), range(4, 5), 0), hits={"b": 4})
    assert engine.take(step, "b").rows[HIDDEN_KEY] == {"b": rows(range(5))}


def test_nothing_is_left_at_rest() -> None:
    """E35, E29: once all requests finished and all steps are consumed, no bookkeeping remains; unknown ids are fine."""
    engine = Engine(budget=64)
    for n in range(20):
        step = engine.step(
            (f"r{n}", (n % 8,), range(3), n), hits={f"r{n}": 0}, finished=(f"r{n - 1}",), emits=(HIDDEN_KEY, CODES)
        )
        engine.take(step, f"r{n}")
    engine.start(finished=("r19", "never seen"))
    engine.rules.at_rest(engine.cache.machine)


def test_wrong_order_is_refused() -> None:
    """Calls out of order, unknown ids and requests outside the snapshot change nothing."""
    engine = Engine(page_rows=4)
    with pytest.raises(OmniPrefixCacheContractError, match="new_step_starts"):
        engine.save(("a", (0,), range(1), 0))
    step = engine.step(("a", (0,), range(4), 0), hits={"a": 0})
    with pytest.raises(OmniPrefixCacheContractError, match="never saved"):
        engine.take(step + 1, "a")
    with pytest.raises(OmniPrefixCacheContractError, match="not in step"):
        engine.take(step, "b")
    with pytest.raises(OmniPrefixCacheContractError, match="does not fit"):
        engine.step(("a", (0, 1, 2), range(4, 9), 0))
    engine.take(step, "a")
    engine.cache.shutdown()
    engine.cache.shutdown()
    with pytest.raises(OmniPrefixCacheClosedError):
        engine.start()
