"""Thousands of random small steps against a naive cache: a dict of slot -> row a key, looked up position by position.

Every computed token has a value of its own under each key, so that a row of any other token, tenant or key is seen.
Requests hit any block, stale ones and ones of the same step included; they are chunked, preempted, resumed with smaller
and larger hits, continued, aborted, and their ids used again. Steps are handed over late, in any order, in part, or
not at all; saves are refused and tried again; some steps are never saved; the byte budget is small.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from omni_prefix_fast import (
    HIDDEN_KEY,
    ModelCachePolicy,
    OmniPrefixCacheContractError,
    OmniPrefixCacheManager,
    OmniPrefixCacheRowError,
    PrefixCacheConfig,
)
from omni_prefix_fast.device import Device
from tests.omni_prefix_fast.harness import View, column, filled

FEATURES = {HIDDEN_KEY: (2,), "k": (), "d": (1,), "e": (2, 2)}
MM = tuple(key for key in FEATURES if key != HIDDEN_KEY)
DTYPES = {HIDDEN_KEY: torch.float32, "k": torch.int64, "d": torch.int32, "e": torch.float64}
POLICY = ModelCachePolicy(token_keys=frozenset("k"), deferred_keys=frozenset("de"))
DEPTH = 4


@dataclass
class Live:
    """A request as the engine knows it."""

    table: list[int]
    position: int
    emitted: int = 0


@dataclass(frozen=True)
class Part:
    """A request's part of a step: what it is owed from the cache, and what it computes."""

    req_id: str
    start: int
    computed: int
    count: int


@dataclass
class Due:
    """What a saved step has to hand over: rows by key and request, None for a position without a row."""

    step_id: int
    spans: dict[str, tuple[int, int]]
    prefix: dict[str, dict[str, list[int | None]]] = field(default_factory=dict)
    fresh: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def check(self, cache: OmniPrefixCacheManager, asked: list[str]) -> None:
        """Hand the step over for some of its requests and compare every row."""
        if any(None in self.prefix[HIDDEN_KEY][r] for r in asked):
            with pytest.raises(OmniPrefixCacheRowError):
                cache.materialize(self.step_id, asked)
            return
        outs = cache.materialize(self.step_id, asked)
        assert outs.spans == {r: self.spans[r] for r in asked}
        assert outs.hidden_states is not None
        assert {r: column(rows) for r, rows in outs.hidden_states.items()} == self.owed(HIDDEN_KEY, asked)
        for key in MM:
            owed = self.owed(key, asked)
            assert {r: column(rows) for r, rows in outs.mm_outputs.get(key, {}).items()} == owed, key
            spans = {r: (self.spans[r][0], self.spans[r][0] + len(rows)) for r, rows in owed.items()}
            assert outs.mm_spans.get(key, {}) == spans

    def owed(self, key: str, asked: list[str]) -> dict[str, list[int]]:
        """Rows of a key, by request: the prefix if it has any row or the step emits the key, then the step's."""
        owed = {}
        for req_id in asked:
            prefix, fresh = self.prefix[key][req_id], self.fresh.get(key)
            if fresh is not None or any(row is not None for row in prefix):
                owed[req_id] = [row or 0 for row in prefix] + ([] if fresh is None else fresh[req_id])
        return owed


class Fuzz:
    """A random engine and the naive cache beside the real one."""

    on = torch.device("cpu")
    """Where the forward's tensors are."""

    def __init__(self, seed: int, *, eager: bool, device: Device | None = None) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice([1, 2, 4])
        self.num_blocks = self.random.choice([6, 10, 16])
        row_bytes = 4 + 4 * 8
        config = PrefixCacheConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            staging_depth=DEPTH,
            staging_capacity_tokens=64,
            gpu_staging_bytes=row_bytes * self.random.choice([0, 3, 12, 60]),
            copy_chunk_bytes=64,
        )
        self.view = View(self.block_size)
        self.cache = OmniPrefixCacheManager(config, self.view, eager, device=device)
        self.cache.register_policy(POLICY)
        self.slots: dict[int, dict[str, int]] = {}
        self.live: dict[str, Live] = {}
        self.due: list[Due] = []
        self.value = 0
        self.started: list[Part] = []
        self.hits = 0

    # ---------------------------------------------------------------- the random engine

    def admissions(self, taken: set[int]) -> Iterator[tuple[str, Live, int]]:
        """Requests that come in with some blocks and some of them already computed: new, resumed, continued."""
        for _ in range(self.random.randint(0, 3)):
            req_id = f"r{self.random.randint(0, 7)}"
            free = [b for b in range(self.num_blocks) if b not in taken]
            if not free or req_id in self.scheduled:
                continue
            computed = self.random.choice([0, self.random.randint(0, 3 * self.block_size)])
            count = self.random.randint(1, 2 * self.block_size)
            first, last = computed // self.block_size, (computed + count - 1) // self.block_size
            if last - first + 1 > len(free):
                continue
            # Any blocks may be hit; what is computed needs blocks that nobody else computes in this step.
            own = self.random.sample(free, last - first + 1)
            table = [self.random.randrange(self.num_blocks) for _ in range(first)] + own
            taken.update(own)
            yield req_id, Live(table, computed, self.live[req_id].emitted if req_id in self.live else 0), count

    def running(self, taken: set[int]) -> Iterator[tuple[str, int]]:
        """Live requests that compute some more tokens, in blocks of theirs and one more."""
        for req_id, live in self.live.items():
            if self.random.random() < 0.5:
                continue
            count = self.random.choice([1, 1, self.random.randint(1, 2 * self.block_size)])
            blocks_needed = -(-(live.position + count) // self.block_size)
            free = [b for b in range(self.num_blocks) if b not in taken and b not in live.table]
            missing = blocks_needed - len(live.table)
            if missing > len(free):
                continue
            if missing > 0:
                live.table += self.random.sample(free, missing)
            touched = set(live.table[live.position // self.block_size : blocks_needed])
            written = [
                live.table[p // self.block_size] for p in range(live.position, live.position + count, self.block_size)
            ]
            if touched & taken or len(set(written)) < len(written):
                continue
            if len(touched) < blocks_needed - live.position // self.block_size:
                continue
            taken |= touched
            yield req_id, count

    def start(self) -> None:
        """Start a random step."""
        finished = [r for r in self.live if self.random.random() < 0.15]
        for req_id in finished:
            del self.live[req_id]
        taken: set[int] = set()
        self.scheduled: dict[str, int] = dict(self.running(taken))
        cached = list(self.scheduled)
        new: list[str] = []
        resumed: list[str] = []
        for req_id, request, count in list(self.admissions(taken)):
            if req_id in self.scheduled:
                continue
            self.scheduled[req_id] = count
            (resumed if req_id in self.live and self.random.random() < 0.5 else new).append(req_id)
            self.live[req_id] = request
        self.started = []
        for req_id, count in self.scheduled.items():
            live = self.live[req_id]
            self.started.append(Part(req_id, min(live.emitted, live.position), live.position, count))
            if req_id in cached:
                self.started[-1] = Part(req_id, live.position, live.position, count)
        self.random.shuffle(self.started)
        entries = {r: (self.live[r].table, self.live[r].position) for r in self.scheduled}
        come_back = [*cached, *resumed]
        self.cache.new_step_starts(
            SimpleNamespace(
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=r, num_computed_tokens=entries[r][1], block_ids=(entries[r][0],))
                    for r in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=come_back,
                    resumed_req_ids=set(resumed),
                    new_block_ids=[*(None for _ in cached), *((entries[r][0],) for r in resumed)],
                    num_computed_tokens=[entries[r][1] for r in come_back],
                ),
                num_scheduled_tokens=self.scheduled,
                finished_req_ids=set(finished),
            )
        )
        self.view.order = [part.req_id for part in self.started]
        self.view.tables = {r: table for r, (table, _) in entries.items()}
        self.view.computed = {r: position for r, (_, position) in entries.items()}
        for part in self.started:
            self.live[part.req_id].position += part.count

    # ---------------------------------------------------------------- the naive cache

    def compute(self, part: Part, emitted: list[str]) -> dict[str, list[int]]:
        """The request's tokens get rows of their own under the emitted keys, and no rows under the others."""
        rows: dict[str, list[int]] = {key: [] for key in emitted}
        for slot in self.view.slots(part.req_id, part.computed, part.computed + part.count):
            self.value += 1
            self.slots[slot] = {key: self.value * 4 + 1 + list(FEATURES).index(key) for key in emitted}
            for key in emitted:
                rows[key].append(self.slots[slot][key])
        return rows

    def look_up(self, part: Part) -> Mapping[str, list[int | None]]:
        """Rows of the hit span, position by position."""
        slots = self.view.slots(part.req_id, part.start, part.computed)
        self.hits += len(slots)
        return {key: [self.slots.get(slot, {}).get(key) for slot in slots] for key in FEATURES}

    def save(self) -> None:
        """Save the step that was started, and note what it has to hand over."""
        emitted = [HIDDEN_KEY, *(key for key in MM if self.random.random() < 0.6)]
        computed = [self.compute(part, emitted) for part in self.started]
        due = Due(-1, {part.req_id: (part.start, part.computed + part.count) for part in self.started})
        for key in FEATURES:
            due.prefix[key] = {}
        for part in self.started:
            for key, rows in self.look_up(part).items():
                due.prefix[key][part.req_id] = rows
        for key in emitted:
            due.fresh[key] = {part.req_id: rows[key] for part, rows in zip(self.started, computed, strict=True)}
        padded = len_of(due) + self.random.choice([0, 0, 5])
        values = {
            key: [row for part in self.started for row in due.fresh[key][part.req_id]]
            + [-1] * self.random.choice([0, padded - len_of(due)])
            for key in emitted
        }
        tensors = {key: filled(rows, *FEATURES[key], dtype=DTYPES[key]).to(self.on) for key, rows in values.items()}
        hidden = tensors.pop(HIDDEN_KEY)
        if self.random.random() < 0.1:
            self.refuse(hidden, tensors, len_of(due), padded)
        due.step_id = self.cache.save_outputs(
            hidden, tensors, num_tokens_unpadded=len_of(due), num_tokens_padded=padded
        )
        for tensor in (hidden, *tensors.values()):
            tensor.fill_(-2)  # the engine's next forward
        for part in self.started:
            self.live[part.req_id].emitted = part.computed + part.count
        self.due.append(due)

    def refuse(self, hidden: torch.Tensor, mm: dict[str, torch.Tensor], unpadded: int, padded: int) -> None:
        """A save that has to be refused and to change nothing."""
        with pytest.raises(OmniPrefixCacheContractError, match="'k' is declared per token"):
            self.cache.save_outputs(hidden, {**mm, "k": "text"}, num_tokens_unpadded=unpadded, num_tokens_padded=padded)

    def give_up(self) -> None:
        """The step that was started is never saved: nothing of what it computed has rows."""
        for part in self.started:
            self.compute(part, [])

    def consume(self, keep: int) -> None:
        """Hand over or discard unconsumed steps in any order until `keep` are left."""
        while len(self.due) > keep:
            due = self.due.pop(self.random.randrange(len(self.due)))
            asked = [r for r in due.spans if self.random.random() < 0.85]
            self.random.shuffle(asked)
            if self.random.random() < 0.1:
                self.cache.discard_step(due.step_id)
            else:
                due.check(self.cache, asked)

    def run(self, steps: int) -> None:
        """So many steps, then everything is finished and handed over."""
        for _ in range(steps):
            self.start()
            if self.random.random() < 0.05:
                self.give_up()
                continue
            self.save()
            self.consume(self.random.randint(0, DEPTH - 1))
        self.consume(0)
        self.cache.new_step_starts(SimpleNamespace(finished_req_ids=set(self.live)))


def len_of(due: Due) -> int:
    """Tokens that the step computes."""
    return sum(len(rows) for rows in due.fresh[HIDDEN_KEY].values())


@pytest.mark.parametrize("seed", range(16))
def test_cache_against_naive_cache(seed: int) -> None:
    """Every row of every step is the naive cache's, and in the end nothing is held."""
    fuzz = Fuzz(seed, eager=True)
    fuzz.run(100)
    assert fuzz.hits
    seen = fuzz.cache.inspect()
    assert not any(seen.pins)
    assert not any(seen.pages)
    assert (seen.charged, seen.chunks, seen.open_writes, seen.tasks, seen.emitted) == (0, (), {}, {}, {})


@pytest.mark.parametrize("seed", range(4))
def test_asynchronous_cache_against_naive_cache(seed: int) -> None:
    """The same with writes and gathers on their own threads: what is handed over does not depend on who is faster."""
    fuzz = Fuzz(1000 + seed, eager=False)
    fuzz.run(100)
    fuzz.cache.shutdown()
    seen = fuzz.cache.inspect()
    assert not any(seen.pins)
    assert not any(seen.pages)
    assert (seen.charged, seen.chunks, seen.open_writes, seen.tasks) == (0, (), {}, {})


def test_random_steps_reach_what_they_are_for() -> None:
    """Over the seeds, every kind of event occurs: hits, resumes, same-step reads, preserved reads, forced writes."""
    totals: dict[str, int] = {}
    for seed in range(8):
        fuzz = Fuzz(seed, eager=True)
        fuzz.run(40)
        statistics = fuzz.cache.statistics()
        for name in (
            *("requests_hit", "requests_resumed", "requests_finished", "reads_same_step", "reads_preserved"),
            *("writes_deferred", "writes_forced", "rows_lost", "steps_abandoned", "steps_discarded"),
        ):
            totals[name] = totals.get(name, 0) + getattr(statistics, name)
    assert all(totals.values()), totals
