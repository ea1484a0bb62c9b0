"""Rules that an interleaved run is held to, beside its outcomes."""

from __future__ import annotations

from collections.abc import Mapping


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
