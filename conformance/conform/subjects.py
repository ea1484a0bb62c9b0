"""The subjects of a session: those of the registry, or the same with a seeded fault."""

from __future__ import annotations

from conformance.drivers.registry import missing, subject
from conformance.drivers.subject import Run, Subject
from conformance.mutants.fast_edit import FastMutant
from conformance.mutants.fast_table import FAST_MUTANTS
from conformance.schedules.trace import Interleaving, Trace


class FaultySubject:
    """A subject of the production package, run with a fault in the package. One run at a time in a process."""

    def __init__(self, subject: Subject, mutant: FastMutant) -> None:
        self.subject = subject
        self.mutant = mutant
        self.name = subject.name
        self.interleaves = subject.interleaves

    def run(
        self, trace: Trace, *, seed: int = 0, interleaving: Interleaving | None = None, record: bool = False
    ) -> Run:
        """See `Subject`."""
        with self.mutant.applied():
            return self.subject.run(trace, seed=seed, interleaving=interleaving, record=record)


def make_subject(driver: str, *, mutant: str | None = None) -> Subject:
    """The subject of a driver's name. Raises `ValueError` for one that nothing has or that cannot run here."""
    made = subject(driver)
    if (why := missing(driver)) is not None:
        raise ValueError(f"the driver {driver} cannot run here: {why}")
    if mutant is None:
        return made
    known = {fault.name: fault for fault in FAST_MUTANTS}
    if mutant not in known:
        raise ValueError(f"no fault of the production package is called {mutant!r}; `omni-prefix mutants` lists them")
    if not driver.startswith("fast-"):
        raise ValueError(f"--mutant is a fault of the production package, which {driver} does not run; leave it out")
    return FaultySubject(made, known[mutant])
