"""What the check of a device runs on: a CUDA device, or the simulated one, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import perf_counter
from typing import Protocol

import torch

from conformance.device.simulated import Fault, SimulatedDevice
from omni_prefix_fast.cuda import CudaDevice
from omni_prefix_fast.device import Device


class Backend(Protocol):
    """A device, as the check needs it."""

    name: str
    """What a reader calls it."""
    real: bool
    """Whether its times and bandwidths mean anything."""
    torch_device: torch.device
    """Where the forward's tensors are."""

    def make_device(self) -> Device:
        """A device for a cache."""
        ...

    def sync(self) -> None:
        """Wait until the forward has ended."""
        ...

    def time(self, work: Callable[[], object], repeats: int) -> list[float]:
        """Seconds of device time that each call of `work` took, oldest first."""
        ...

    def host(self, rows: int, width: int) -> torch.Tensor:
        """A host tensor that copies from the device land in fastest, bf16."""
        ...


class CudaBackend:
    """The first CUDA (or ROCm) device."""

    real = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "torch sees no CUDA device here; run on a machine with one, or try the check itself with "
                "--device cpu-simulated"
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)

    def make_device(self) -> Device:
        """See `Backend`."""
        return CudaDevice()

    def sync(self) -> None:
        """See `Backend`. Only the forward's stream: copies of the cache go on."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    def time(self, work: Callable[[], object], repeats: int) -> list[float]:
        """See `Backend`."""
        seconds = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self.torch_device)
            begin.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
        return seconds

    def host(self, rows: int, width: int) -> torch.Tensor:
        """See `Backend`."""
        return torch.empty((rows, width), dtype=torch.bfloat16, pin_memory=True)


class SimulatedBackend:
    """No hardware: shows that the check itself works. Copies land late, as `SimulatedDevice` has them."""

    name = "simulated on the CPU"
    real = False
    torch_device = torch.device("cpu")

    def __init__(self, faults: Collection[Fault] = ()) -> None:
        self._faults = faults

    def make_device(self) -> Device:
        """See `Backend`."""
        return SimulatedDevice(0, faults=self._faults)

    def sync(self) -> None:
        """See `Backend`."""

    def time(self, work: Callable[[], object], repeats: int) -> list[float]:
        """See `Backend`."""
        seconds = []
        for _ in range(repeats):
            began = perf_counter()
            work()
            seconds.append(perf_counter() - began)
        return seconds

    def host(self, rows: int, width: int) -> torch.Tensor:
        """See `Backend`."""
        return torch.empty((rows, width), dtype=torch.bfloat16)


BACKENDS: dict[str, Callable[[], Backend]] = {"cuda": CudaBackend, "cpu-simulated": SimulatedBackend}
