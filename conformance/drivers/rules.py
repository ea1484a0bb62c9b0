"""Rules that an interleaved run is held to, beside its outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from omni_prefix_fast import OmniPrefixCacheManager
from omni_prefix_fast.log import BudgetTicket


class OneWriter:
    """`one_writer`: between two writes that are claimed, the first has been written or has failed."""

    def __init__(self) -> None:
        self._writing: object = None
        self.broken: str | None = None
        """What broke the rule first."""

    def see(self, action: str, acted_on: Mapping[str, object]) -> None:
        """An action of the machine. Never raises: it is asked in the middle of what it watches."""
        task = acted_on.get("task")
        if action == "claim_copy":
            before, self._writing = self._writing, task
            if before is not None and self.broken is None:
                self.broken = f"write {task} is claimed while write {before} is being written"
        elif action in {"write_pool", "fail_task"} and task == self._writing:
            self._writing = None


class UnderLock:
    """Tables are touched under the state lock: what a lock guards is atomic here anyway, so nobody else would miss it.

    Args:
        cache: whose tables are watched from now on.
        holds: names of the locks that the running thread has.
    """

    LOCK = "manager state"
    GUARDED: Mapping[str, tuple[str, ...]] = {
        "table": (
            *("any_pinned", "claim", "close_key", "commit", "log_append", "log_rows", "occupancy", "open_key"),
            *("pin", "stamp", "stamped", "unpin"),
        ),
        "log": ("append", "clear", "hold", "oldest", "release", "seal", "seal_chunk", "sealed_of", "written"),
        "steps": ("clear", "open", "take"),
        "requests": ("advance", "clear", "finish", "next_write_n", "start"),
        "budget": ("reserve",),
    }
    """By part of the machine, what is called under the lock only."""

    def __init__(self, cache: OmniPrefixCacheManager, holds: Callable[[], list[str]]) -> None:
        self._holds = holds
        self.broken: str | None = None
        """What broke the rule first."""
        machine = cache._machine  # noqa: SLF001 - nothing public says who touches a table
        for part, names in self.GUARDED.items():
            setattr(machine, part, _Watched(getattr(machine, part), part, names, self._look))

    def _look(self, what: str) -> None:
        if self.broken is None and self.LOCK not in self._holds():
            self.broken = f"{what} is called without the lock {self.LOCK!r}"


class _Watched:
    """Another object, some of whose methods are told as they are called."""

    def __init__(self, watched: object, part: str, names: Iterable[str], look: Callable[[str], None]) -> None:
        self._watched = watched
        for name in names:
            setattr(self, name, partial(self._call, getattr(watched, name), f"{part}.{name}", look))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watched, name)

    def _call(self, method: Callable[..., Any], what: str, look: Callable[[str], None], *args: Any, **kw: Any) -> Any:
        look(what)
        made = method(*args, **kw)
        return _Watched(made, "budget", ("release",), look) if isinstance(made, BudgetTicket) else made
