"""The exported names are the documented ones."""

import re
from pathlib import Path

import omni_prefix_fast

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"


def test_exported_names_are_the_documented_ones() -> None:
    """Every exported name has a row in the page, and every row is an exported name that exists."""
    documented = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(documented) == sorted(omni_prefix_fast.__all__)
    assert [name for name in documented if not hasattr(omni_prefix_fast, name)] == []


def test_each_exported_class_and_function_has_a_docstring() -> None:
    """Names are documented where they are defined, too."""
    objects = {name: getattr(omni_prefix_fast, name) for name in omni_prefix_fast.__all__}
    assert [name for name, value in objects.items() if callable(value) and not value.__doc__] == []
