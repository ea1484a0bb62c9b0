"""Hypothesis for this folder, and the modes: engine tests run eagerly, asynchronously and on a late device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

from conformance.device import SimulatedDevice
from omni_prefix_fast import (
    OmniPrefixCacheClosedError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheWriteError,
)
from tests.omni_prefix_fast.harness import MODE, Engine, Mode

# No deadline an example, since the machine is shared, and few enough to stay quick.
settings.register_profile("omni_prefix_fast", deadline=None, max_examples=60)
settings.load_profile("omni_prefix_fast")

SETTLE_S = 5.0
"""How long a test's engines may take to come to rest behind it."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each mode for each test of a module that drives engines, except those marked `eager_only`."""
    drives = getattr(metafunc.module, "Engine", None) is Engine
    if drives and "engine_mode" in metafunc.fixturenames and not metafunc.definition.get_closest_marker("eager_only"):
        metafunc.parametrize("engine_mode", list(Mode), indirect=True, ids=lambda mode: mode.value)


def _failed(engine: Engine) -> bool:
    try:
        engine.cache.drain(SETTLE_S)
    except (OmniPrefixCacheClosedError, OmniPrefixCacheStagingTimeoutError):
        return False
    except OmniPrefixCacheWriteError:
        return True
    return False


@pytest.fixture(autouse=True)
def engine_mode(request: pytest.FixtureRequest) -> Iterator[Mode]:
    """Mode of the test's engines. They are shut down behind it, and hold no device memory then."""
    chosen: Mode = getattr(request, "param", Mode.EAGER)
    token = MODE.set(chosen)
    Engine.made.clear()
    yield chosen
    MODE.reset(token)
    engines = [engine for engine in Engine.made if not engine.eager]
    Engine.made.clear()
    # What failed keeps its failure, and with it whatever stood on the stack.
    whole = [engine for engine in engines if not _failed(engine)]
    for engine in engines:
        engine.cache.shutdown()
    devices = [engine.device for engine in whole if isinstance(engine.device, SimulatedDevice)]
    del engines, whole
    if any(device.live_bytes for device in devices):
        gc.collect()
    assert [device.live_bytes for device in devices] == [0] * len(devices)
