"""Tests of a CUDA device, skipped where there is none.

`OMNI_PREFIX_DEVICE=cpu-simulated` runs those that can on the simulated device instead: it shows that the tests work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from conformance.device.backends import BACKENDS, Backend

CHOSEN = os.environ.get("OMNI_PREFIX_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs the device."""
    absent = CHOSEN == "cuda" and not torch.cuda.is_available()
    for item in items:
        if item.path.parent.name == "cuda":
            item.add_marker("cuda")
            if absent:
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))
            elif CHOSEN != "cuda" and item.get_closest_marker("hardware"):
                item.add_marker(pytest.mark.skip(reason="asks the hardware"))


@pytest.fixture
def backend() -> Iterator[Backend]:
    """The device. Everything on it has ended before and after the test."""
    made = BACKENDS[CHOSEN]()
    made.sync()
    yield made
    made.sync()
