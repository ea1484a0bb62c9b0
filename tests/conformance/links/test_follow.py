"""The eager production package follows the state graph of the specification; a faulty one leaves it."""

from __future__ import annotations

from functools import cache

import pytest

from conformance.links.follow import Follower, FollowError
from conformance.links.models import EAGER
from conformance.links.sources import spec_actions
from conformance.mutants.fast_table import FAST_MUTANTS
from conformance.tla.accept import Setting
from conformance.tla.graph import Graph

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(240)]

SETTING = Setting(
    requests=("a", "b"),
    text={"a": (0,), "b": (0, 2)},
    prompt_len={"a": 1, "b": 2},
    num_blocks=2,
    block_size=1,
    keys=frozenset({"codes", "hidden"}),
    hidden=frozenset({"hidden"}),
    deferred=frozenset({"codes"}),
    emit_tokens={"codes": frozenset({0, 1, 2})},
    pressure=False,
)
OUTSIDE = {"WithdrawRequest", "LoadBlock", "SealWrite", "ReserveBudget"}
"""Engines that the gate refuses, and pressure."""
BY_NAME = {mutant.name: mutant for mutant in FAST_MUTANTS}


@cache
def graph() -> Graph:
    """TLC runs once."""
    return EAGER.graph(100.0)


def test_every_choice_of_the_environment_is_followed() -> None:
    """Events, tables at rest, rows handed over: each choice at each state that the eager cache can come to rest in."""
    followed = Follower(graph(), SETTING).follow()
    print(followed)
    assert followed.rests > 1000
    assert set(followed.edges) == {place.name for place in spec_actions() if place.module == "PrefixCache"} - OUTSIDE


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("skip_version_bump", "ClaimSlots"),
        ("plan_same_step_once", "PreserveReads"),
        ("drop_aborted_write", "tasks"),
        ("gather_without_pins", "pins"),
        ("ends_off_by_one", "emitted"),
        ("hit_rows_left_out", "hands over"),
    ],
)
def test_a_fault_leaves_the_graph(name: str, seen: str) -> None:
    """An event that the graph does not have, another table, or a wrong row."""
    with BY_NAME[name].applied(), pytest.raises(FollowError) as raised:
        Follower(graph(), SETTING).follow()
    assert seen in str(raised.value).partition("\n")[0]
