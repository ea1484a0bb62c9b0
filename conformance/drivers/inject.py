"""One failure of the environment, armed by a trace's `Fail` event, that goes off once, at its place."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence

import torch

from conformance.schedules.trace import Fail, Stage
from omni_prefix_fast import OmniPrefixCacheManager
from omni_prefix_fast.device import Device, Transfer
from omni_prefix_fast.recycler import OutputAllocator
from omni_prefix_fast.types import IntArray

STICKY: frozenset[Stage] = frozenset({"copy", "write", "wait", "gather_to_host"})
"""Stages of the committer: what fails there is a failed write, and every call tells of it from then on."""
AT_ACTION: Mapping[Stage, str] = {"copy": "finish_copy", "write": "write_pool"}
"""Stages that are an action of the machine."""
OWN_THREADS = ("committer", "prefetch")
"""Threads of the cache, which nobody interrupts: an interrupt comes to the thread of a caller."""
JUMP_S = 3600.0


class Injected(BaseException):
    """The failure that a trace asked for. Never raised as such."""


class InjectedDeviceError(Injected, OSError):
    """A copy fails."""


class InjectedMemoryError(Injected, MemoryError):
    """There is no memory."""


class InjectedInterrupt(Injected, KeyboardInterrupt):
    """The user is impatient."""


class Injector:
    """Holds what is armed, and how often its place is still passed before it goes off.

    Args:
        thread: names the thread that asks.
        jump: moves the clock on by so many seconds.
    """

    def __init__(
        self, thread: Callable[[], str] = lambda: "engine", jump: Callable[[float], None] = lambda _: None
    ) -> None:
        self._thread = thread
        self._jump = jump
        self._armed: Fail | None = None
        self._left = 0
        self.went_off: Stage | None = None
        """The last stage that failed."""

    @property
    def armed(self) -> Stage | None:
        """The stage that is going to fail."""
        return None if self._armed is None else self._armed.stage

    def arm(self, fail: Fail) -> None:
        """From now on its stage fails, once it has been passed `fail.after` times."""
        self._armed, self._left = fail, fail.after

    def passes(self, stage: Stage) -> bool:
        """A place of `stage` is passed; whether it is to fail now."""
        if self._armed is None or self._armed.stage != stage:
            return False
        self._left -= 1
        if self._left >= 0:
            return False
        self._armed, self.went_off = None, stage
        return True

    def action(self, action: str) -> None:
        """An action of the machine: fails if that is its place."""
        if self._armed is None:
            return
        stage = self._armed.stage
        if stage in AT_ACTION:
            if action == AT_ACTION[stage] and self.passes(stage):
                raise InjectedDeviceError(errno.EIO, f"the {stage} was made to fail")
        elif stage == "interrupt":
            if not self._thread().startswith(OWN_THREADS) and self.passes(stage):
                raise InjectedInterrupt(f"interrupted at {action}")
        elif stage == "clock" and self.passes(stage):
            self._jump(JUMP_S)

    def device(self, device: Device) -> Device:
        """A device that fails where it is told to."""
        return _Device(device, self)

    def allocator(self, allocate: OutputAllocator) -> OutputAllocator:
        """An allocator of outputs that fails where it is told to."""

        def limited(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            if self.passes("outputs"):
                raise InjectedMemoryError(f"no memory for outputs of shape {tuple(shape)}")
            return allocate(shape, dtype)

        return limited

    def limit_growth(self, cache: OmniPrefixCacheManager) -> None:
        """Make the allocation of pool, pages and table of a key, at its first sight, fail where it is told to."""
        machine = cache._machine  # noqa: SLF001 - there is no interface for the memory that numpy and torch hand out
        for part, name in ((machine.pool, "open"), (machine.staging, "open"), (machine.table, "prepare_key")):
            setattr(part, name, self._growing(getattr(part, name)))

    def _growing(self, grow: Callable[..., None]) -> Callable[..., None]:
        def limited(*args: object, **kwargs: object) -> None:
            if self.passes("keys"):
                raise InjectedMemoryError("no memory for rows of a key")
            grow(*args, **kwargs)

        return limited


class _Device:
    """Another device, which fails where it is told to."""

    def __init__(self, device: Device, injector: Injector) -> None:
        self._device = device
        self._injector = injector
        self.pins_memory = device.pins_memory

    def _pass(self, stage: Stage) -> None:
        if self._injector.passes(stage):
            raise InjectedDeviceError(errno.EIO, f"{stage} was made to fail")

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        if self._injector.passes("clone"):
            raise InjectedMemoryError("no device memory for a clone")
        return self._device.clone(rows, dtype)

    def launch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """See `Device`."""
        self._pass("launch")
        return _Transfer(self._device.launch(copies), self._injector)

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Device`."""
        self._device.copy_to_host(rows, out)

    def rows_to_host(self, rows: torch.Tensor, index: IntArray, out: torch.Tensor) -> None:
        """See `Device`."""
        self._pass("rows_to_host")
        self._device.rows_to_host(rows, index, out)

    def gather_to_host(self, parts: Sequence[torch.Tensor], chunk_bytes: int) -> torch.Tensor:
        """See `Device`."""
        self._pass("gather_to_host")
        return self._device.gather_to_host(parts, chunk_bytes)


class _Transfer:
    """Another transfer, whose wait may fail. While that is going to happen, nothing has landed."""

    def __init__(self, transfer: Transfer, injector: Injector) -> None:
        self._transfer = transfer
        self._injector = injector

    def landed(self) -> bool:
        """See `Transfer`."""
        return self._injector.armed != "wait" and self._transfer.landed()

    def wait(self) -> None:
        """See `Transfer`."""
        if self._injector.passes("wait"):
            raise InjectedDeviceError(errno.EIO, "the wait was made to fail")
        self._transfer.wait()
