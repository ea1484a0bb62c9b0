import pytest

from conformance.drivers.fast import FastDriver
from conformance.drivers.subject import Moment
from conformance.page.tables import Tables
from conformance.schedules import generate
from conformance.schedules.trace import WRITE, Shutdown

NAMES = {"absent": "absent", "transit": "in_transit", "committed": "committed"}


@pytest.mark.parametrize("seed", range(24))
def test_followed_tables_are_the_caches_own(seed: int) -> None:
    """Versions, owners' rows and occupancy followed from the actions are those that the cache has, event by event."""
    trace = generate(seed).trace
    tables, index = Tables(trace), 0
    driver = FastDriver(
        trace.header, observe=lambda action, on: tables.apply(Moment(0, "engine", action, dict(on), index))
    )
    for index, event in enumerate(trace.events):  # noqa: B007 - the observer looks at it
        outcome = driver.apply(event)
        if outcome.error == WRITE or isinstance(event, Shutdown):
            return  # everything is let go of, which is no action
        seen = driver.snapshot()
        assert tuple(tables.version) == seen.version
        told = {key: tuple(NAMES[o] for o in column) for key, column in tables.occupancy.items()}
        assert {key: column for key, column in told.items() if any(o != "absent" for o in column)} == seen.occupancy
