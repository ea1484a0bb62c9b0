"""The production cache on a CUDA device, with its own threads, driven by its public calls.

Nothing is interleaved here: threads and copies run as the machine lets them. That writes have landed is waited for only
where the trace says that everything is at rest.
"""

from __future__ import annotations

import torch

import omni_prefix_fast
from conformance.drivers.module import ModuleDriver
from conformance.drivers.subject import Run
from conformance.drivers.subjects import run_events
from conformance.schedules.driver import Outcome
from conformance.schedules.trace import Event, Header, Interleaving, Rest, Trace

WAIT_S = 0.5
"""A full staging pool is waited for so long; a copy that lands later than this is told as a time-out."""


class ThreadedDriver(ModuleDriver):
    """Applies a trace to the production cache with real threads, its rows on a device of torch."""

    def __init__(self, header: Header, device: str) -> None:
        super().__init__(omni_prefix_fast, header, eager=False, device=device, wait_s=WAIT_S)

    def apply(self, event: Event) -> Outcome | None:
        """Apply one event."""
        if isinstance(event, Rest):
            self.cache.drain(30.0)
            seen = self.cache.inspect()
            left = {"tasks": seen.tasks, "charged": seen.charged, "steps": seen.unconsumed, "reads": seen.reads}
            found = {name: value for name, value in left.items() if value}
            assert not found, f"left behind at rest: {found}"
        return super().apply(event)


class CudaFast:
    """The production cache on the first CUDA device."""

    name = "cuda"
    interleaves = False
    device = "cuda"

    @staticmethod
    def missing() -> str | None:
        """Why it cannot run here, or None."""
        return None if torch.cuda.is_available() else "torch finds no CUDA device here"

    def run(
        self,
        trace: Trace,
        *,
        seed: int = 0,  # noqa: ARG002 - the machine interleaves
        interleaving: Interleaving | None = None,  # noqa: ARG002
        record: bool = False,  # noqa: ARG002
    ) -> Run:
        """Run a trace."""
        driver = ThreadedDriver(trace.header, self.device)
        try:
            return run_events(trace, driver)
        finally:
            driver.close()
