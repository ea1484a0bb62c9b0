"""A runtime for a cache that runs alone: nothing waits."""

from __future__ import annotations

import pytest

from conformance.drivers.standing import StandingRuntime


def test_nothing_waits() -> None:
    """Waits end at once and empty-handed; one without a limit, or a lock taken twice, is an error."""
    runtime = StandingRuntime()
    event = runtime.event("done")
    assert not event.wait(30.0)
    event.set()
    assert event.wait(30.0)
    condition = runtime.condition("pages")
    with condition:
        assert not condition.wait(30.0)
        with pytest.raises(AssertionError, match="no limit"):
            condition.wait()
        with pytest.raises(AssertionError, match="twice"):
            condition.__enter__()
    with pytest.raises(AssertionError, match="thread"):
        runtime.spawn("committer", lambda: None)
