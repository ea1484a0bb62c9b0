"""`conformance.tla.values`: TLA+ values there and back."""

from collections.abc import Callable
from typing import Any

import pytest
import tla
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.tla.values import (
    Function,
    ModelValue,
    ValueSyntaxError,
    format_value,
    from_json,
    function,
    parse_value,
    to_json,
)

_NAMES = st.sampled_from(["a", "b", "rows", "TRUTH", "x_1"])
_ATOMS = st.one_of(st.booleans(), st.integers(-9, 9), st.text(alphabet='ab"\\ ', max_size=4))


def _larger(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(values, max_size=3).map(tuple),
        st.frozensets(values, max_size=3),
        st.dictionaries(_NAMES, values, min_size=1, max_size=3).map(Function),
        st.dictionaries(st.tuples(st.integers(0, 3), _NAMES), values, min_size=1, max_size=3).map(Function),
        st.dictionaries(st.integers(0, 4), values, min_size=1, max_size=4).map(function),
    )


VALUES = st.recursive(_ATOMS, _larger, max_leaves=12)


@given(VALUES)
def test_a_value_survives_being_written_and_read(value: Any) -> None:
    """As TLA+ text and as JSON."""
    assert parse_value(format_value(value)) == value
    assert from_json(to_json(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<<>>", ()),
        ("{}", frozenset()),
        ("{1, 2}", frozenset({1, 2})),
        ("0 .. 2", frozenset({0, 1, 2})),
        ("[a |-> 1, b |-> <<TRUE, FALSE>>]", Function({"a": 1, "b": (True, False)})),
        ("( 0 :> 1 @@\n  1 :> 2 )", Function({0: 1, 1: 2})),
        ("(1 :> {} @@ 2 :> -3)", (frozenset(), -3)),
        ('( <<2, "b">> :> [rows |-> << >>] )', Function({(2, "b"): Function({"rows": ()})})),
        ('"a \\"b\\" \\\\"', 'a "b" \\'),
        ("m1", ModelValue("m1")),
    ],
)
def test_the_forms_that_tlc_prints_are_read(text: str, value: Any) -> None:
    """Among them: a function on 1 .. n is a sequence, whatever way it is written."""
    assert parse_value(text) == value


@pytest.mark.parametrize("text", ["", "<<1", "[a |-> 1", "(1 :> 2 @@)", "{1,, 2}", "1 2", "[a -> 1]", "a ++ b"])
def test_what_is_no_value_is_refused(text: str) -> None:
    """With an error that quotes it, not with half a value."""
    with pytest.raises(ValueSyntaxError):
        parse_value(text)


def evaluate(node: Any) -> Any:
    """The value of an expression as the package ``tla`` parses it."""
    kind = type(node).__name__
    if kind == "Parentheses":
        return evaluate(node.expression)
    if kind in {"Tuple", "SetEnumeration"}:
        items = [evaluate(item) for item in node.items]
        return tuple(items) if kind == "Tuple" else frozenset(items)
    if kind == "Record":
        return Function({name: evaluate(item) for name, item in node.key_values})
    if kind == "OperatorApplication":
        return apply(node.operator, [evaluate(argument) for argument in node.arguments])
    literals: dict[str, Callable[[str], Any]] = {
        "IntegralNumeral": int,
        "StringLiteral": lambda text: text[1:-1],
        "BooleanLiteral": "TRUE".__eq__,
    }
    return literals[kind](node.value)


def apply(operator: str, arguments: list[Any]) -> Any:
    """The operators that values are written with."""
    if operator == "-":
        return -arguments[0]
    if operator == ":>":
        return [tuple(arguments)]
    assert operator == "@@"
    return arguments[0] + arguments[1]


def finished(value: Any) -> Any:
    """Entries that ``:>`` and ``@@`` gathered, as functions."""
    if isinstance(value, list):
        return function({finished(key): finished(item) for key, item in value})
    if isinstance(value, tuple):
        return tuple(finished(item) for item in value)
    if isinstance(value, Function):
        return Function({key: finished(item) for key, item in value.items()})
    return value


_PLAIN = st.recursive(
    st.one_of(st.booleans(), st.integers(-9, 9), st.sampled_from(["", "a", "b c"])),
    lambda values: st.one_of(
        st.lists(values, max_size=3).map(tuple),
        st.dictionaries(_NAMES, values, min_size=1, max_size=3).map(Function),
        st.dictionaries(st.tuples(st.integers(0, 3), _NAMES), values, min_size=1, max_size=3).map(Function),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=40)
@given(_PLAIN)
def test_the_tla_package_reads_the_same(value: Any) -> None:
    """A parser of all of TLA+ makes the same value of the text."""
    assert finished(evaluate(tla.parse_expr(format_value(value)))) == value == parse_value(format_value(value))


def test_functions_are_equal_whatever_the_order() -> None:
    """And hash alike, so that they can stand in sets."""
    one, other = Function({"a": 1, "b": 2}), Function({"b": 2, "a": 1})
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


def test_what_is_no_tla_value_is_not_written() -> None:
    """A float, say."""
    with pytest.raises(TypeError, match=r"1\.5"):
        format_value(1.5)
    with pytest.raises(TypeError, match=r"1\.5"):
        to_json(1.5)
