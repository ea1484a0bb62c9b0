"""Subjects by the names that commands take."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from conformance.drivers.cuda import CudaFast
from conformance.drivers.module import ModuleSubject
from conformance.drivers.subject import Subject

MODULE = "module:"
"""What a name begins with that is any module's: `module:package.of.it`."""

BUILT_IN = {
    "reference": "conformance.drivers.subjects:ReferenceModel",
    "fast-eager": "conformance.drivers.subjects:EagerFast",
    "fast-async": "conformance.drivers.asynchronous:AsynchronousFast",
    "cuda": "conformance.drivers.cuda:CudaFast",
}
"""Where each subject's class is; it is imported once it is asked for."""


def names() -> list[str]:
    """The names of the built-in subjects; beside them there is `module:NAME`."""
    return list(BUILT_IN)


def subject(name: str) -> Subject:
    """The subject of a name, made anew.

    Raises:
        ValueError: nothing has this name, or the module that it names cannot be taken.
    """
    if name.startswith(MODULE):
        return ModuleSubject(name.removeprefix(MODULE))
    if name not in BUILT_IN:
        known = ", ".join([*BUILT_IN, f"{MODULE}NAME"])
        raise ValueError(f"no driver is called {name!r}; there are: {known} (any module that keeps the contract)")
    module, _, attribute = BUILT_IN[name].partition(":")
    return cast("Subject", getattr(import_module(module), attribute)())


def missing(name: str) -> str | None:
    """Why a built-in subject cannot run on this machine; None if it can."""
    return CudaFast.missing() if name == CudaFast.name else None
