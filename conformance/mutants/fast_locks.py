"""Faults of the production package in which a table is touched without the lock that guards it."""

from __future__ import annotations

from conformance.mutants.fast_edit import Edit, FastMutant
from omni_prefix_fast.machine import PrefixCacheMachine

_LOCKED = "with self.lock, self.held:"


def _unlocked(action: str, fault: str, behind: str = "") -> FastMutant:
    """`behind`: what follows the lock, where it is not the action's only one."""
    edit = Edit(PrefixCacheMachine, action, f"{_LOCKED}{behind}", f"if True:{behind}")
    return FastMutant(f"{action.strip('_')}_without_lock", fault, "tables_under_lock", (edit,), "fast-async")


LOCKS = (
    _unlocked("finish_request", "a request is forgotten without the state lock"),
    _unlocked("publish", "a step is published without the state lock"),
    _unlocked("commit_tasks", "a write is committed without the state lock", "\n                if task.state"),
    _unlocked("let_go", "a consumed step lets go of its reads without the state lock"),
    _unlocked(
        "_gather", "a fetched read lets go of its rows without the state lock", "\n            if read.generation"
    ),
    _unlocked("take_step", "a step is taken without the state lock"),
    _unlocked("cancel", "a reservation is given back without the state lock"),
)
