"""`SlotTable` against a naive model, one dict entry a slot."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_prefix_fast.slots import NO_CHUNK, NO_STEP, SlotTable
from omni_prefix_fast.types import IntArray, Occupancy

NUM_SLOTS = 8
IMMEDIATE, DEFERRED = "hidden", "codes"
KEYS = (IMMEDIATE, DEFERRED)
EVERY = np.arange(NUM_SLOTS)


def table_with_keys() -> SlotTable:
    """A table with one immediate and one deferred key."""
    table = SlotTable(NUM_SLOTS)
    table.open_key(IMMEDIATE, deferred=False)
    table.open_key(DEFERRED, deferred=True)
    return table


def some(*slots: int) -> IntArray:
    """An array of slots."""
    return np.array(slots, dtype=np.int64)


@dataclass
class NaiveSlot:
    version: int = 0
    owner: int = NO_STEP
    pins: int = 0
    occupancy: dict[str, Occupancy] = field(default_factory=lambda: dict.fromkeys(KEYS, Occupancy.ABSENT))
    chunk: int = NO_CHUNK
    row: int = 0


SLOTS = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=NUM_SLOTS, unique=True)


class TableAgainstNaiveModel(RuleBasedStateMachine):
    """Claims, appends, commits (late and of lost tenancies too) and pins agree with a loop over slots."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_with_keys()
        self.naive = [NaiveSlot() for _ in range(NUM_SLOTS)]
        self.step = 0
        self.claims: list[tuple[list[int], list[int], set[str]]] = []
        self.pinned: list[list[int]] = []

    @rule(slots=SLOTS, emitted=st.sets(st.sampled_from(KEYS)), logged=st.booleans())
    def claim(self, slots: list[int], emitted: set[str], logged: bool) -> None:
        self.step += 1
        versions = self.table.claim(some(*slots), self.step, emitted).tolist()
        for slot in slots:
            entry = self.naive[slot]
            entry.version, entry.owner, entry.chunk = entry.version + 1, self.step, NO_CHUNK
            entry.occupancy = {k: Occupancy.IN_TRANSIT if k in emitted else Occupancy.ABSENT for k in KEYS}
        assert versions == [self.naive[s].version for s in slots]
        self.claims.append((slots, versions, emitted))
        if logged and DEFERRED in emitted:
            self.table.log_append(DEFERRED, some(*slots), chunk_id=self.step)
            for row, slot in enumerate(slots):
                self.naive[slot].chunk, self.naive[slot].row = self.step, row

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        slots, versions, emitted = data.draw(st.sampled_from(self.claims))
        owned = [self.naive[s].version == v for s, v in zip(slots, versions, strict=True)]
        assert self.table.still_owned(some(*slots), some(*versions)).tolist() == owned
        for key in sorted(emitted):
            self.table.commit(key, some(*slots), some(*versions))
            for slot in itertools.compress(slots, owned):
                self.naive[slot].occupancy[key] = Occupancy.COMMITTED
                if key == DEFERRED:
                    self.naive[slot].chunk = NO_CHUNK

    @rule(slots=SLOTS)
    def pin(self, slots: list[int]) -> None:
        self.table.pin(some(*slots))
        self.pinned.append(slots)
        for slot in slots:
            self.naive[slot].pins += 1

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slots = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.table.unpin(some(*slots))
        for slot in slots:
            self.naive[slot].pins -= 1

    @rule(slots=SLOTS)
    def ask(self, slots: list[int]) -> None:
        assert self.table.any_pinned(some(*slots)) == any(self.naive[s].pins for s in slots)

    @invariant()
    def agrees(self) -> None:
        assert self.table.version.tolist() == [n.version for n in self.naive]
        assert self.table.owner.tolist() == [n.owner for n in self.naive]
        assert self.table.pins.tolist() == [n.pins for n in self.naive]
        for key in KEYS:
            assert self.table.occupancy(key, EVERY).tolist() == [n.occupancy[key] for n in self.naive]
        logged = self.table.log_rows(DEFERRED, EVERY)
        assert logged is not None
        assert logged.chunk.tolist() == [n.chunk for n in self.naive]
        assert all(logged.row[s] == n.row for s, n in enumerate(self.naive) if n.chunk != NO_CHUNK)


TestTableAgainstNaiveModel = TableAgainstNaiveModel.TestCase


def test_claim_ends_the_tenancy_for_keys_that_are_not_emitted() -> None:
    """A key that the new step does not emit has no row any more."""
    table = table_with_keys()
    first = table.claim(some(0, 1), 1, KEYS)
    for key in KEYS:
        table.commit(key, some(0, 1), first)
    table.claim(some(1), 2, (IMMEDIATE,))
    assert table.occupancy(IMMEDIATE, some(0, 1)).tolist() == [Occupancy.COMMITTED, Occupancy.IN_TRANSIT]
    assert table.occupancy(DEFERRED, some(0, 1)).tolist() == [Occupancy.COMMITTED, Occupancy.ABSENT]


def test_log_rows_of_an_immediate_key() -> None:
    """Only deferred keys have rows in the log."""
    assert table_with_keys().log_rows(IMMEDIATE, some(0)) is None


def test_stamp_marks_until_the_next_one() -> None:
    """A stamp tells exactly whether a slot was among the marked ones; a later stamp is another."""
    table = SlotTable(NUM_SLOTS)
    first = table.stamp(some(1, 2))
    assert table.stamped(some(0, 2), first)
    assert not table.stamped(some(0, 3), first)
    assert not table.stamped(some(), first)
    second = table.stamp(some(3))
    assert not table.stamped(some(1, 2), second)
    assert table.stamped(some(3), second)


@given(st.lists(st.integers(0, NUM_SLOTS - 1), max_size=12))
def test_repeated_slot_is_found(slots: list[int]) -> None:
    """`first_repeated` names a slot that stands twice, and none if there is none."""
    table = SlotTable(NUM_SLOTS)
    found = table.first_repeated(some(*slots))
    if len(set(slots)) == len(slots):
        assert found is None
    else:
        assert found is not None
        assert slots.count(found) > 1


def test_keys_open_once_and_close() -> None:
    """Opening twice keeps the rows; a closed key has none, a late commit to it is nothing, and it opens anew empty."""
    table = table_with_keys()
    versions = table.claim(some(0), 1, (IMMEDIATE,))
    table.open_key(IMMEDIATE, deferred=False)
    assert table.occupancy(IMMEDIATE, some(0)).tolist() == [Occupancy.IN_TRANSIT]
    table.close_key(IMMEDIATE)
    assert table.open_keys() == (DEFERRED,)
    assert not table.has_key(IMMEDIATE)
    table.commit(IMMEDIATE, some(0), versions)
    table.open_key(IMMEDIATE, deferred=False)
    assert table.occupancy(IMMEDIATE, some(0)).tolist() == [Occupancy.ABSENT]
    table.close_key("never opened")


def test_bytes_grow_with_keys() -> None:
    """The table's footprint counts every array, per slot and per key."""
    table = SlotTable(NUM_SLOTS)
    bare = table.nbytes
    table.open_key(IMMEDIATE, deferred=False)
    immediate = table.nbytes
    table.open_key(DEFERRED, deferred=True)
    assert immediate - bare == NUM_SLOTS
    assert table.nbytes - immediate == NUM_SLOTS * (1 + 8 + 8)


@pytest.mark.parametrize("key", KEYS)
def test_copies_do_not_alias_the_table(key: str) -> None:
    """What the table returns may be kept and changed."""
    table = table_with_keys()
    table.occupancy(key, EVERY)[:] = Occupancy.COMMITTED
    versions = table.claim(some(0), 1, ())
    versions += 5
    assert table.occupancy(key, some(0)).tolist() == [Occupancy.ABSENT]
    assert table.version[0] == 1


@pytest.mark.parametrize("count", [2, 96, 97, 300])
@given(st.data())
def test_first_repeated_slot_of_few_and_of_many(count: int, data: st.DataObject) -> None:
    """A slot that stands twice is found wherever it stands, by either of two ways; none where there is none."""
    table = SlotTable(512)
    slots = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(512)[:count]
    assert table.first_repeated(slots) is None
    source, target = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    slots[target] = slots[source]
    assert table.first_repeated(slots) == slots[source]


def test_nothing_is_compared_while_nothing_was_claimed() -> None:
    """With the count of claims of its own claim a write owns all its slots; after any other claim each is looked at."""
    table = SlotTable(8)
    table.open_key("k", deferred=False)
    slots = some(1, 2)
    versions, claims = table.claim(slots, 0, ("k",)), table.claims
    assert table.still_owned(slots, versions, claims).all()
    table.claim(some(2), 1, ("k",))
    assert np.asarray(table.still_owned(slots, versions, claims)).tolist() == [True, False]
    table.commit("k", slots, versions, claims)
    assert table.occupancy("k", some(1, 2)).tolist() == [Occupancy.COMMITTED, Occupancy.IN_TRANSIT]
