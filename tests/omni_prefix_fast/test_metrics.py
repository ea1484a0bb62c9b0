"""Counters only rise, and a reading is a copy."""

from collections.abc import Mapping

import pytest

from omni_prefix_fast.metrics import Counters, Footprint, Statistics


def test_totals_start_at_zero_and_add_up() -> None:
    """Each total is what was added to it."""
    counters = Counters()
    assert counters.snapshot() == Statistics()
    counters.add("steps_saved")
    counters.add("rows_saved", 5)
    counters.add("rows_saved", 2)
    counters.add_rows_hit("k", 3)
    counters.add_rows_hit("k", 4)
    assert counters.snapshot() == Statistics(steps_saved=1, rows_saved=7, rows_hit={"k": 7})


def test_reading_is_a_copy() -> None:
    """A reading does not move when the counters do."""
    counters = Counters()
    counters.add_rows_hit("k", 1)
    before = counters.snapshot()
    counters.add_rows_hit("k", 1)
    counters.add("steps_saved")
    assert (before.rows_hit, before.steps_saved) == ({"k": 1}, 0)


def test_unknown_total_is_a_fault() -> None:
    """A misspelt total fails at once instead of counting nothing."""
    with pytest.raises(KeyError, match="steps_save"):
        Counters().add("steps_save")
    with pytest.raises(KeyError, match="steps_save"):
        Counters().add_all(steps_save=1)


def test_several_totals_rise_at_once() -> None:
    """Each by its own amount."""
    counters = Counters()
    counters.add_all(steps_saved=1, rows_saved=5)
    counters.add_all(rows_saved=2)
    assert (counters.snapshot().steps_saved, counters.snapshot().rows_saved) == (1, 7)


def test_sink_hears_each_action() -> None:
    """The trace sink is told the action and what it acted on, in order; without a sink nothing happens."""
    heard: list[tuple[str, Mapping[str, object]]] = []
    counters = Counters(lambda action, acted_on: heard.append((action, acted_on)))
    counters.trace("claim_page", step=1)
    counters.trace("open_step", step=2)
    assert heard == [("claim_page", {"step": 1}), ("open_step", {"step": 2})]
    Counters().trace("claim_page", step=1)


def test_footprint_adds_up() -> None:
    """Static bytes are the pools', host bytes the pools' and the pages'."""
    footprint = Footprint({"a": 10, "b": 5}, {"a": 3}, table_bytes=7, device_bytes=1, pending_bytes=2)
    assert footprint.static_bytes == 15
    assert footprint.host_bytes == 18
