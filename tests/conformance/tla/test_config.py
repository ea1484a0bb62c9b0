"""`conformance.tla.config`: configurations read, written and derived."""

import pytest

from conformance.tla.config import Config, Definitions
from conformance.tla.errors import ManifestError

TEXT = """SPECIFICATION Spec
VIEW View
CONSTANTS
    N = 3
    Text <- Given
    Mutants = {}
INVARIANTS
    AInv
    BInv
PROPERTIES
    CProp
"""


def test_a_configuration_survives_being_read_and_written() -> None:
    """The house style is exactly what `render` writes."""
    config = Config.parse(TEXT)
    assert config.render() == TEXT
    assert config.checks == ("AInv", "BInv", "CProp")


def test_a_fault_changes_one_line() -> None:
    """Seeding a fault touches nothing but the constant Mutants."""
    seeded = Config.parse(TEXT).with_faults(["skip"]).render().splitlines()
    changed = [(a, b) for a, b in zip(TEXT.splitlines(), seeded, strict=True) if a != b]
    assert changed == [("    Mutants = {}", '    Mutants = {"skip"}')]


def test_one_check_alone() -> None:
    """An invariant or a property by itself."""
    config = Config.parse(TEXT)
    assert config.checking("BInv").checks == ("BInv",)
    assert config.checking("CProp").properties == ("CProp",)


@pytest.mark.parametrize(
    "text",
    ["CONSTANTS\n N = 1\n", "SPECIFICATION A B\n", "SPECIFICATION S\nCONSTANTS\n N\n", "SYMMETRY Perms\n"],
)
def test_what_is_not_in_the_house_style_is_refused(text: str) -> None:
    """Nothing is skipped in silence."""
    with pytest.raises(ManifestError):
        Config.parse(text)


def test_a_seeded_model_is_not_seeded_again() -> None:
    """Faults are seeded into the real machine only."""
    with pytest.raises(ManifestError, match="Mutants"):
        Config.parse(TEXT).with_faults(["skip"]).with_faults(["other"])


def test_definitions_of_a_module_are_found() -> None:
    """Operators with and without parameters, variables and constants; not what stands in comments."""
    found = Definitions.of(
        "---- MODULE M ----\nCONSTANTS\n    A, \\* B\n    C\nVARIABLE x\n(* Old == 1 *)\n\\* Gone == 2\n"
        "Op(a, b) ==\n    a\nAInv == x = A\n====\n"
    )
    assert found.operators == {"Op", "AInv"}
    assert found.constants == {"A", "C"}
    assert found.variables == {"x"}
