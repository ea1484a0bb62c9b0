"""Every name of the specification, the reference model and the fast path's trace has its row; no other has."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformance.links
from conformance.links.names import (
    ACTIONS,
    RULES,
    Place,
    action_problems,
    render_actions,
    render_rules,
    rule_name,
    rule_problems,
    snake,
)
from conformance.links.sources import (
    UnreadableSourceError,
    disjuncts,
    fast_events,
    reference_methods,
    reference_rules,
    rules,
    spec_actions,
    spec_rules,
)
from conformance.links.views import render_variables

ACTIONS_THERE, METHODS, EVENTS = spec_actions(), reference_methods(), fast_events()
RULES_THERE, ASSERTIONS = spec_rules(), reference_rules()
README = Path(conformance.links.__file__).with_name("README.md")


def test_every_action_has_its_row_both_ways() -> None:
    """Disjuncts of `Next`, methods of the machine, events of the trace."""
    assert action_problems(ACTIONS_THERE, METHODS, EVENTS) == []


def test_every_rule_has_its_row_both_ways() -> None:
    """Invariants and properties, assertions of the reference."""
    assert rule_problems(RULES_THERE, ASSERTIONS) == []


@pytest.mark.parametrize("index", range(len(ACTIONS)))
def test_a_missing_row_of_an_action_is_seen(index: int) -> None:
    """Take any row away and the table is no longer complete, unless its names all stand in others too."""
    left = ACTIONS[:index] + ACTIONS[index + 1 :]
    assert action_problems(ACTIONS_THERE, METHODS, EVENTS, left) != []


@pytest.mark.parametrize("index", range(len(RULES)))
def test_a_missing_row_of_a_rule_is_seen(index: int) -> None:
    """Take any row away and the table is no longer complete."""
    left = RULES[:index] + RULES[index + 1 :]
    assert rule_problems(RULES_THERE, ASSERTIONS, left) != []


def test_a_superfluous_row_is_seen() -> None:
    """A name that left its source, on each side."""
    actions, methods, events = ACTIONS_THERE, METHODS, EVENTS
    for place in actions:
        assert action_problems(actions - {place}, methods, events) != []
    for method in methods:
        assert action_problems(actions, methods - {method}, events) != []
    for event in events:
        assert action_problems(actions, methods, events - {event}) != []
    for place in RULES_THERE:
        assert rule_problems(RULES_THERE - {place}, ASSERTIONS) != []
    for rule in ASSERTIONS:
        assert rule_problems(RULES_THERE, ASSERTIONS - {rule}) != []


def test_no_rows_and_no_sources_are_seen() -> None:
    """Two empty sides agree on nothing."""
    assert "there is no action at all" in action_problems([], [], [], [])
    assert "there is no rule at all" in rule_problems([], [], [])


def test_a_row_that_passes_over_a_name_is_seen() -> None:
    """A side that has the action under its own name cannot be given another."""
    problems = action_problems(ACTIONS_THERE, METHODS | {"time_out"}, EVENTS)
    assert "TimeOut: time_out exists, and the row names another" in problems


def test_names_are_written_alike() -> None:
    """CamelCase there, snake_case here."""
    assert snake("ClaimSlots") == "claim_slots"
    assert rule_name("FailureIsLoudAndStickyProp") == "failure_is_loud_and_sticky"


def test_disjuncts_are_read_from_the_module() -> None:
    r"""Quantifiers, arguments and comments aside; whatever is no name is refused."""
    text = "Next ==\n    \\/ \\E r \\in R : \\* one\n        \\/ A(r) \\/ B(r, 1)\n    \\/ C (* D *)\n\nSpec == Init\n"
    assert disjuncts(text) == {"A", "B", "C"}
    assert disjuncts("Other == A\n\nSpec == 1\n") == frozenset()
    with pytest.raises(UnreadableSourceError):
        disjuncts("Next ==\n    \\/ x' = 1\n\nSpec == 1\n")
    assert rules("AInv == 1\n\\* BInv == 1\nDebugCInv == 1\nDProp == 1\n") == {"AInv", "DProp"}


def test_python_names_are_read_from_the_syntax() -> None:
    """An event whose name is made at run time is refused."""
    assert fast_events(['self._counters.trace("a", x=1)', "trace('b')"]) == {"a"}
    assert fast_events(['self._tell_taken(undo, "c", x=1)']) == {"c"}
    assert fast_events(["def _tell_taken(self, undo, name):\n    self._counters.trace(name)"]) == set()
    for unreadable in ("self._counters.trace(name)", "self._tell_taken(undo, name)"):
        with pytest.raises(UnreadableSourceError):
            fast_events([unreadable])


def test_spec_places_name_their_module() -> None:
    """An action of two modules is two places."""
    assert {Place("PrefixCache", "ClaimPage"), Place("Handover", "ClaimPage")} <= ACTIONS_THERE


def test_the_readme_shows_the_tables() -> None:
    """As they are in `names`, letter by letter."""
    text = README.read_text()
    assert render_actions() in text
    assert render_rules() in text
    assert render_variables() in text
