"""The driver for CUDA keeps time with real threads; where there is no device it says so."""

from __future__ import annotations

import pytest
import torch

from conformance.drivers.cuda import CudaFast
from conformance.schedules import generate

SEEDS = [0, 1, 2, 4]


class OnHost(CudaFast):
    """The same driver and threads, with the host as the device."""

    device = "cpu"


@pytest.mark.parametrize("seed", SEEDS)
def test_traces_run_with_real_threads(seed: int) -> None:
    """Outcomes are the ones due, and nothing is left behind at rest, however the machine runs the threads."""
    assert OnHost().run(generate(seed).trace).failure is None


@pytest.mark.cuda
def test_traces_run_on_the_device() -> None:
    """The same on the device."""
    if (why := CudaFast.missing()) is not None:
        pytest.skip(why)
    for seed in range(40):
        ran = CudaFast().run(generate(seed).trace)
        assert ran.failure is None, f"seed {seed}: {ran.failure}"


def test_it_says_where_there_is_no_device() -> None:
    """A reason without a device, none with one."""
    assert (CudaFast.missing() is None) == torch.cuda.is_available()
