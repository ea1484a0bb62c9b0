"""`conformance.tla.tlc`: TLC is run, ended, and read."""

from pathlib import Path

import pytest

from conformance.tla.errors import DeadlineError, TlcError
from conformance.tla.graph import read_graph
from conformance.tla.tlc import Job, Message, Result, messages, parse_state, run

COUNTER = r"""---- MODULE Counter ----
EXTENDS Naturals
CONSTANT Top
VARIABLES n, seen
Init == n = 0 /\ seen = {}
Up == n < Top /\ n' = n + 1 /\ seen' = seen \cup {n}
Down == n > 0 /\ n' = n - 1 /\ UNCHANGED seen
Never == n > Top /\ UNCHANGED <<n, seen>>
Next == Up \/ Down \/ Never
Spec == Init /\ [][Next]_<<n, seen>>
Fair == Spec /\ WF_n(Up)
LowInv == n < 3
FineInv == n <= Top
UpProp == [][n' >= n]_n
EndsProp == (n = 0) ~> (n = Top)
TopProp == <>[](n = Top)
====
"""


def counter(folder: Path, checks: str, *, spec: str = "Spec", top: int = 3, text: str = COUNTER) -> Job:
    """A job on a module of the test's own."""
    module = folder / "Counter.tla"
    module.write_text(text)
    return Job(module, f"SPECIFICATION {spec}\nCONSTANTS\n Top = {top}\n{checks}\n", deadline=50, coverage=True)


def test_messages_are_split() -> None:
    """Numbered ones, and lines outside of them; one that breaks off is given as far as it goes."""
    lines = ["out", "@!@!@STARTMSG 2193:0 @!@!@", "done", "well", "@!@!@ENDMSG 2193 @!@!@",
             "@!@!@STARTMSG 1000:1 @!@!@", "cut"]  # fmt: skip
    assert list(messages(iter(lines))) == [
        Message(0, 0, "out"),
        Message(2193, 0, "done\nwell"),
        Message(1000, 1, "cut"),
    ]


def test_a_state_is_read() -> None:
    """One variable or several, over several lines."""
    assert parse_state("n = 3") == {"n": 3}
    assert parse_state("/\\ n = 1\n/\\ f = ( 0 :> 1 @@\n  2 :> 3 )\n/\\ s = {}") == {
        "n": 1,
        "f": {0: 1, 2: 3},
        "s": frozenset(),
    }


@pytest.mark.tlc
def test_what_holds_is_counted(tmp_path: Path) -> None:
    """States, depth, and how often each action was taken; one that never was shows as 0."""
    result = run(counter(tmp_path, "INVARIANTS FineInv"))
    assert result.violation is None
    assert (result.distinct, result.depth) == (10, 7)
    assert result.coverage["Up"] > 0
    assert result.coverage["Never"] == 0


@pytest.mark.tlc
@pytest.mark.parametrize(
    ("checks", "spec", "broken", "length"),
    [
        ("INVARIANTS FineInv LowInv", "Spec", "LowInv", 4),
        ("PROPERTIES UpProp", "Spec", "UpProp", 3),
        ("PROPERTIES TopProp", "Fair", "", None),
    ],
)
def test_what_breaks_is_named_and_shown(
    tmp_path: Path, checks: str, spec: str, broken: str, length: int | None
) -> None:
    """The check, and the behaviour up to where it breaks. TLC does not name a temporal property."""
    result = run(counter(tmp_path, checks, spec=spec))
    assert result.violation is not None
    assert result.violation.check == broken
    behaviour = result.violation.behaviour
    assert behaviour[0].action == "Init"
    assert behaviour[1].action == "Up"
    assert length is None or len(behaviour) == length
    if broken == "LowInv":
        assert behaviour[-1].variables == {"n": 3, "seen": frozenset({0, 1, 2})}
    assert (result.violation.back_to is not None) == (broken == "")


@pytest.mark.tlc
@pytest.mark.parametrize(
    ("broken_text", "said"),
    [
        (COUNTER.replace("n' = n + 1", "n' = = n"), ["line 6", "Counter"]),
        (COUNTER.replace("n' = n + 1", "n' = m + 1"), ["line 6", "Unknown operator", "m"]),
        (COUNTER.replace("n' = n + 1", 'n\' = n + "x"'), ["line 6", "Counter"]),
    ],
)
def test_what_tlc_says_of_a_mistake_is_passed_on(tmp_path: Path, broken_text: str, said: list[str]) -> None:
    """A syntax error, an unknown name, a type error: with line and module, in TLC's own words."""
    with pytest.raises(TlcError) as caught:
        run(counter(tmp_path, "INVARIANTS FineInv", text=broken_text))
    for words in said:
        assert words in caught.value.report


@pytest.mark.tlc
def test_an_unknown_check_is_an_error_not_a_pass(tmp_path: Path) -> None:
    """A misspelt invariant must not look like one that holds."""
    with pytest.raises(TlcError, match="MissingInv"):
        run(counter(tmp_path, "INVARIANTS MissingInv"))


@pytest.mark.tlc
def test_a_run_past_its_deadline_is_ended(tmp_path: Path) -> None:
    """And says so; nothing is left running."""
    job = counter(tmp_path, "INVARIANTS FineInv", top=100_000_000)
    with pytest.raises(DeadlineError, match="3 s"):
        run(Job(job.module, job.config, deadline=3))


@pytest.mark.tlc
def test_two_runs_are_the_same(tmp_path: Path) -> None:
    """Same counts, same counterexample."""

    def once(name: str) -> Result:
        folder = tmp_path / name
        folder.mkdir()
        return run(counter(folder, "INVARIANTS LowInv"))

    one, other = once("one"), once("other")
    assert (one.generated, one.distinct, one.violation) == (other.generated, other.distinct, other.violation)


@pytest.mark.tlc
def test_the_state_graph_is_read(tmp_path: Path) -> None:
    """Every distinct state, the initial one, and an edge for every transition, with its action."""
    job = counter(tmp_path, "INVARIANTS FineInv", top=2)
    dump = tmp_path / "graph.dot"
    result = run(Job(job.module, job.config, deadline=50, dump=dump))
    graph = read_graph(dump)
    assert len(graph.states) == result.distinct
    assert [graph.states[state] for state in graph.initial] == [{"n": 0, "seen": frozenset()}]
    assert {edge.action for edge in graph.edges} == {"Up", "Down"}
    for edge in graph.edges:
        step = 1 if edge.action == "Up" else -1
        assert graph.states[edge.target]["n"] == graph.states[edge.source]["n"] + step
