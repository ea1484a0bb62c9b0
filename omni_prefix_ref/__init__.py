"""The reference model of the prefix cache: the machine of `docs/machine.md` in plain Python.

Start with `state` (the variables), then `machine` (the actions), `rules` (what must hold) and `driver` (the order of
the actions behind the public contract). Standard library only.
"""

from omni_prefix_ref.driver import Admission, EagerDriver, Observer, StepStart
from omni_prefix_ref.machine import Machine
from omni_prefix_ref.rules import Rules
from omni_prefix_ref.state import HIDDEN_KEY, ZEROS, BatchItem, KeySpec, Outputs, Settings

__all__ = [
    "HIDDEN_KEY",
    "ZEROS",
    "Admission",
    "BatchItem",
    "EagerDriver",
    "KeySpec",
    "Machine",
    "Observer",
    "Outputs",
    "Rules",
    "Settings",
    "StepStart",
]
