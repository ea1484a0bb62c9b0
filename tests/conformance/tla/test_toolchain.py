"""`conformance.tla.toolchain`: the pinned jar and a Java runtime."""

from pathlib import Path

import pytest

from conformance.tla.errors import ToolchainError
from conformance.tla.toolchain import find_jar, find_java


def test_the_packaged_jar_is_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is checked each time it is looked up, and another one is refused by its digest."""
    monkeypatch.delenv("TLA2TOOLS_JAR", raising=False)
    assert find_jar().name == "tla2tools.jar"
    with pytest.raises(ToolchainError, match="SHA-256"):
        find_jar(pinned="0" * 64)


def test_both_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TLA2TOOLS_JAR and JAVA_HOME win over the packages."""
    jar = tmp_path / "other.jar"
    jar.touch()
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch()
    monkeypatch.setenv("TLA2TOOLS_JAR", str(jar))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_jar() == jar
    assert find_java() == java


def test_a_name_that_names_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not a silent return to the packages."""
    monkeypatch.setenv("TLA2TOOLS_JAR", str(tmp_path / "no.jar"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no"))
    with pytest.raises(ToolchainError, match="TLA2TOOLS_JAR"):
        find_jar()
    with pytest.raises(ToolchainError, match="JAVA_HOME"):
        find_java()
