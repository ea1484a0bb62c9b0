"""`conformance.onoff.ledger`: what counts as equal, and what as missing."""

import numpy as np
import pytest
import torch

from conformance.engine.engine import REFERENCE, TAGS
from conformance.engine.model import VOICE
from conformance.onoff import Ledger, Owed, Ticket
from conformance.onoff.ledger import same_rows
from omni_prefix_fast import HIDDEN_KEY, StageCacheOutputs


def _owed(count: int, emits: list[bool] | None = None) -> Owed:
    rows = torch.arange(count, dtype=torch.float32).reshape(count, 1)
    voice = rows.clone()
    emits = emits or [True] * count
    voice[~torch.tensor(emits)] = 0
    return Owed({HIDDEN_KEY: rows, VOICE: voice}, np.asarray(emits))


def _ticket(step_id: int, computed: int, count: int, *, admitted: bool = True) -> Ticket:
    leftovers = {key: {"a": torch.zeros(1)} for key in (REFERENCE, TAGS)}
    return Ticket(step_id, {"a": computed}, {"a": count}, frozenset({"a"} if admitted else ()), leftovers)


def _outs(owed: Owed, span: tuple[int, int], voice: tuple[int, int] | None) -> StageCacheOutputs:
    leftovers = {key: {"a": torch.zeros(1)} for key in (REFERENCE, TAGS)}
    mm = {VOICE: {"a": owed.rows[VOICE][slice(*voice)]}} if voice else {}
    return StageCacheOutputs(
        {"a": owed.rows[HIDDEN_KEY][slice(*span)]},
        {**leftovers, **mm},
        {"a": span},
        {VOICE: {"a": voice}} if voice else {},
    )


def _settle(owed: Owed, ticket: Ticket, outs: StageCacheOutputs) -> Ledger:
    ledger = Ledger({"a": owed})
    ledger.save(ticket)
    ledger.settle(ticket, ["a"], outs)
    return ledger


def test_rows_are_compared_by_their_bits() -> None:
    """Minus zero is not zero, and a NaN is itself."""
    zero, nan = torch.zeros(1, 2), torch.full((1, 2), float("nan"))
    assert not same_rows(zero, -zero).any()
    assert same_rows(nan, nan.clone()).all()
    assert not same_rows(zero, zero.double()).any()
    assert not same_rows(zero, torch.zeros(2, 2)[:, :1]).any()


def test_a_hit_is_counted_as_served_from_the_cache() -> None:
    """Rows before the step's computation come from the cache; all of the span is compared, key by key."""
    owed = _owed(6)
    ledger = _settle(owed, _ticket(0, 4, 2), _outs(owed, (0, 6), (0, 6)))
    assert (ledger.rows_compared, ledger.rows_from_cache) == (12, 8)
    assert (ledger.differences, ledger.missing) == (0, 0)


@pytest.mark.parametrize("span", [(1, 6), (4, 6), (0, 5)])
def test_a_span_that_leaves_something_out_is_missing_rows(span: tuple[int, int]) -> None:
    """A fresh request is owed everything from 0 to the end of the step."""
    owed = _owed(6)
    assert _settle(owed, _ticket(0, 4, 2), _outs(owed, span, span)).missing == 6


def test_a_running_request_is_owed_its_new_rows_only() -> None:
    """What was offered in an earlier step is not owed again, even if that step was discarded."""
    owed = _owed(6)
    ledger = Ledger({"a": owed})
    first, second = _ticket(0, 0, 4), _ticket(1, 4, 2, admitted=False)
    ledger.save(first)
    ledger.drop(first)
    ledger.save(second)
    ledger.settle(second, ["a"], _outs(owed, (4, 6), (4, 6)))
    ledger.close({"a": 6})
    assert (ledger.differences, ledger.missing) == (0, 0)


def test_a_resume_with_a_larger_hit_is_owed_the_gap() -> None:
    """Of a request that had been offered 2 positions and comes back with 4 computed, 2 and 3 come from the cache."""
    owed = _owed(6)
    ledger = Ledger({"a": owed})
    first, resumed = _ticket(0, 0, 2), _ticket(1, 4, 2)
    ledger.save(first)
    ledger.settle(first, ["a"], _outs(owed, (0, 2), (0, 2)))
    ledger.save(resumed)
    ledger.settle(resumed, ["a"], _outs(owed, (4, 6), (4, 6)))
    assert (ledger.missing, ledger.gaps) == (4, 1)


def test_a_gap_in_what_is_offered_is_missing() -> None:
    """A running request cannot skip positions."""
    ledger = Ledger({"a": _owed(6)})
    ledger.save(_ticket(0, 2, 2, admitted=False))
    assert ledger.missing == 2


def test_a_key_may_be_left_out_only_where_no_token_emits_it() -> None:
    """Where no token of the span has a row the key need not be there; one such token makes it due."""
    silent, speaking = _owed(4, [False] * 4), _owed(4, [False, False, True, False])
    assert _settle(silent, _ticket(0, 2, 2), _outs(silent, (0, 4), None)).missing == 0
    assert _settle(speaking, _ticket(0, 2, 2), _outs(speaking, (0, 4), None)).missing == 1
    assert _settle(speaking, _ticket(0, 2, 2), _outs(speaking, (0, 4), (0, 2))).missing == 1
    assert _settle(speaking, _ticket(0, 2, 2), _outs(speaking, (0, 4), (0, 3))).missing == 0


def test_closing_finds_what_was_never_offered_or_never_consumed() -> None:
    """The end of a run is part of the comparison."""
    ledger = Ledger({"a": _owed(6)})
    ledger.save(_ticket(0, 0, 4))
    ledger.close({"a": 6})
    assert ledger.missing == 3
    assert len(ledger.notes) == 2
