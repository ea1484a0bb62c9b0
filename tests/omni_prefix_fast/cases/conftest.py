"""What every case test shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _uninitialised_memory_shows() -> Iterator[None]:
    """Torch fills every uninitialised tensor with NaN or the largest integer, so that a forgotten row is never 0."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
