import tomllib
from itertools import pairwise

import pytest

from conformance.conform.coverage import ARROW, BEGIN, END, kind
from conformance.conform.pairs import EVENTS, LIST, known
from conformance.schedules import generate


def test_pairs_of_events_are_known() -> None:
    """What traces hold, pair by pair, is in the list, but for what is too rare to have been seen."""
    pairs: list[str] = []
    for seed in range(300):
        kinds = [BEGIN, *map(kind, generate(5_000_000 + seed).trace.events), END]
        pairs += [f"{first}{ARROW}{after}" for first, after in pairwise(kinds)]
    unlisted = [pair for pair in pairs if pair not in known(EVENTS)]
    assert len(unlisted) <= len(pairs) / 500, sorted(set(unlisted))


@pytest.mark.parametrize("of", [EVENTS, "fast-eager", "fast-async"])
def test_list_is_sorted_and_without_repetition(of: str) -> None:
    """The list is kept by hand: sorted, so that it is easily compared, and each pair once."""
    table = tomllib.loads(LIST.read_text(encoding="utf-8"))[of]
    assert list(table) == sorted(table)
    assert all(afters == sorted(set(afters)) for afters in table.values())
    assert len(known(of)) == sum(map(len, table.values())) > 50


def test_other_drivers_have_no_list() -> None:
    """A driver without a list has no known pairs."""
    assert not known("module:other")
