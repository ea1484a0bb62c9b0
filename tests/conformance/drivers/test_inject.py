"""One failure goes off once, at its place, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from conformance.drivers.inject import (
    JUMP_S,
    Injected,
    InjectedDeviceError,
    InjectedInterrupt,
    InjectedMemoryError,
    Injector,
)
from conformance.schedules.trace import Fail
from omni_prefix_fast.device import HostDevice


def test_a_failure_goes_off_once_behind_so_many_others() -> None:
    """The third launch fails, and no other; other stages never do."""
    injector = Injector()
    device = injector.device(HostDevice())
    injector.arm(Fail(stage="launch", after=2))
    device.clone(torch.ones(1), torch.float32)
    device.launch([])
    device.launch([])
    seen = [injector.went_off]
    with pytest.raises(InjectedDeviceError, match="launch"):
        device.launch([])
    seen.append(injector.went_off)
    assert seen == [None, "launch"]
    device.launch([])


def test_nothing_has_landed_while_a_wait_is_going_to_fail() -> None:
    """So that the cache waits, on a device that is synchronous too."""
    injector = Injector()
    transfer = injector.device(HostDevice()).launch([])
    assert transfer.landed()
    injector.arm(Fail(stage="wait"))
    assert not transfer.landed()
    with pytest.raises(InjectedDeviceError):
        transfer.wait()
    assert transfer.landed()
    transfer.wait()


def test_an_interrupt_comes_to_a_callers_thread_only() -> None:
    """Actions of the committer and of the prefetch thread are passed over, as Python does."""
    thread = ["committer"]
    injector = Injector(thread=lambda: thread[0])
    injector.arm(Fail(stage="interrupt"))
    injector.action("write_pool")
    thread[0] = "builder 0"
    with pytest.raises(InjectedInterrupt):
        injector.action("take_step")
    assert issubclass(InjectedInterrupt, KeyboardInterrupt)
    assert not issubclass(InjectedInterrupt, Exception)


def test_memory_and_clock() -> None:
    """Outputs find no memory; the clock moves on by an hour."""
    moved: list[float] = []
    injector = Injector(jump=moved.append)
    allocate = injector.allocator(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    injector.arm(Fail(stage="outputs"))
    with pytest.raises(InjectedMemoryError):
        allocate((1,), torch.float32)
    assert allocate((1,), torch.float32).shape == (1,)
    injector.arm(Fail(stage="clock"))
    injector.action("claim_page")
    assert moved == [JUMP_S]
    assert issubclass(InjectedMemoryError, Injected)
