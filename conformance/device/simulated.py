"""`SimulatedDevice`: an asynchronous device without hardware, for tests.

As on a real one, `launch` freezes the live rows and returns before anything has landed. Each copy is cut into pieces,
and each piece lands at some moment between the launch and the end of the transfer's wait: chosen by a seeded generator,
or by the test (`directed=True`), piece by piece with `land_next`. Until then the destination holds poison, so that
whoever reads it too early is seen.

Frozen rows and clones stand in memory of the device's own. It is poisoned as soon as nothing refers to it any more,
while a copy that still reads it goes on, as a real copy engine would: whoever lets go of the source too early lands
poison. `live_bytes` says how much is not let go of.

`Fault`s take the guarantees away one by one, so that a test can show that their absence is seen.

Nothing waits for ever: a wait that the test does not end raises `SimulatedDeviceError` after `patience_s`. Locks and
the clock come from a `Runtime`, so that a serial scheduler may stand behind the device, too.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from omni_prefix_fast.device import HostDevice, Transfer
from omni_prefix_fast.runtime import Deadline, Event, Runtime, ThreadRuntime
from omni_prefix_fast.types import IntArray

POISON = 0x7B
"""The byte of released and of not yet landed memory. As a number of any type it is large, never 0 or -1."""

LANDS = 0.3
"""How likely a piece lands whenever time passes."""
CONDITION = "simulated device"
"""Name of the device's condition at its runtime."""

_Memory: TypeAlias = npt.NDArray[np.uint8]


class SimulatedDeviceError(RuntimeError):
    """A copy that was told to fail, or a wait that nobody ended."""


class Fault(Enum):
    """A guarantee that the device does not keep."""

    READS_LIVE_ROWS = auto()
    """`launch` does not freeze: copies read the live buffers, whenever they land."""
    DROPS_FROZEN_ROWS = auto()
    """The transfer does not hold the frozen rows until its wait returns."""
    WAITS_FOR_NOTHING = auto()
    """`wait` returns although nothing has landed."""


@dataclass(frozen=True, slots=True)
class DeviceTotals:
    """What a device has done so far."""

    launches: int = 0
    """Transfers started, one a saved step."""
    copies: int = 0
    """Copies to the host: one a key and launch, and one a piece of a synchronous copy."""
    copied_bytes: int = 0
    clones: int = 0
    """Clones that the code above asked for; frozen rows are not among them."""
    cloned_bytes: int = 0
    waits: int = 0


@dataclass(slots=True)
class Hold:
    """A place where the next thread to start an operation stops until `release`."""

    operation: str
    patience_s: float
    reached: Event
    """Set once a thread stands there."""
    _opened: Event

    def release(self) -> None:
        """Let it go on."""
        self._opened.set()

    def stop(self) -> None:
        """Called by the device, on the thread that is to stop."""
        self.reached.set()
        if not self._opened.wait(self.patience_s):
            raise SimulatedDeviceError(f"nobody released {self.operation} within {self.patience_s:g} s")


@dataclass(slots=True)
class _Progress:
    """How far one transfer is. Outlives the transfer, as copies do."""

    number: int
    left: int = 0


@dataclass(slots=True)
class _Piece:
    """Some rows of one copy, not landed yet."""

    progress: _Progress
    source: Callable[[], torch.Tensor]
    """The rows as they are at that moment."""
    out: torch.Tensor

    def land(self) -> None:
        self.out.copy_(self.source())
        self.progress.left -= 1


class SimulatedTransfer:
    """Copies that land when the device says so, and the frozen rows that they read."""

    def __init__(self, device: SimulatedDevice, progress: _Progress, frozen: list[torch.Tensor]) -> None:
        self._device = device
        self._progress = progress
        self._frozen = frozen

    @property
    def number(self) -> int:
        """How manieth launch of its device this is, from 1."""
        return self._progress.number

    def landed(self) -> bool:
        """See `Transfer`."""
        return self._device.has_landed(self._progress)

    def wait(self) -> None:
        """See `Transfer`."""
        self._device.wait_for(self._progress)
        self._frozen.clear()


class SimulatedDevice(HostDevice):
    """See the module.

    Args:
        seed: of the generator that chooses how copies are cut and when each piece lands.
        directed: nothing lands by itself, only by `land_next` and `land_all`; a wait waits for them.
        faults: guarantees that this device does not keep.
        patience_s: limit of every wait.
        on_call: called with the name of each operation as it starts, on its thread.
        runtime: where locks and the clock come from.
    """

    pins_memory = False

    def __init__(
        self,
        seed: int = 0,
        *,
        directed: bool = False,
        faults: Collection[Fault] = (),
        patience_s: float = 20.0,
        on_call: Callable[[str], None] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.directed = directed
        self.on_call = on_call
        self._random = random.Random(seed)
        self._faults = frozenset(faults)
        self._patience_s = patience_s
        self._runtime = runtime or ThreadRuntime()
        self._changed = self._runtime.condition(CONDITION)
        self._pending: list[_Piece] = []
        self._launches = 0
        self._waiting = 0
        self._totals = dict.fromkeys(DeviceTotals.__slots__, 0)
        self._failures: dict[str, deque[tuple[int, Exception]]] = {}
        self._holds: dict[str, Hold] = {}
        self._allocated = 0
        # A finaliser may run anywhere, inside a locked section too: it only appends.
        self._released: deque[int] = deque()

    # ------------------------------------------------------------------------------------ what the cache calls

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        self._begin("clone")
        private, _ = self._frozen_copy(rows, dtype)
        self._count(clones=1, cloned_bytes=_nbytes(private))
        return private

    def launch(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """See `Device`."""
        self._begin("launch")
        with self._changed:
            self._launches += 1
            progress = _Progress(self._launches)
        frozen: list[torch.Tensor] = []
        pieces: list[_Piece] = []
        for rows, out in copies:
            read = self._source(rows, out, frozen)
            poison(out)
            pieces += self._cut(progress, read, out)
        self._count(launches=1, copies=len(copies), copied_bytes=sum(_nbytes(out) for _, out in copies))
        with self._changed:
            progress.left = len(pieces)
            self._pending += pieces
        return SimulatedTransfer(self, progress, frozen)

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `Device`."""
        self._begin("copy_to_host")
        super().copy_to_host(rows, out)
        self._count(copies=1, copied_bytes=_nbytes(out))

    def rows_to_host(self, rows: torch.Tensor, index: IntArray, out: torch.Tensor) -> None:
        """See `Device`."""
        self._begin("rows_to_host")
        super().rows_to_host(rows, index, out)

    def gather_to_host(self, parts: Sequence[torch.Tensor], chunk_bytes: int) -> torch.Tensor:
        """See `Device`."""
        self._begin("gather_to_host")
        return super().gather_to_host(parts, chunk_bytes)

    # ------------------------------------------------------------------------------------ what its transfers call

    def has_landed(self, progress: _Progress) -> bool:
        """Whether a transfer is over."""
        with self._changed:
            self._drift()
            return progress.left == 0

    def wait_for(self, progress: _Progress) -> None:
        """Wait until a transfer is over; unless directed, land what is left of it."""
        self._count(waits=1)
        self._begin("wait")
        if Fault.WAITS_FOR_NOTHING in self._faults:
            return
        with self._changed:
            if not self.directed:
                own = [piece for piece in self._pending if piece.progress is progress]
                self._random.shuffle(own)
                for piece in own:
                    self._land(piece)
            self._waiting += 1
            self._changed.notify_all()
            try:
                if not self._until(lambda: progress.left == 0, self._patience_s):
                    raise SimulatedDeviceError(
                        f"{progress.left} pieces of launch {progress.number} have not landed within "
                        f"{self._patience_s:g} s; call land_next or land_all"
                    )
            finally:
                self._waiting -= 1

    # ------------------------------------------------------------------------------------ what a test calls

    @property
    def totals(self) -> DeviceTotals:
        """What was done so far."""
        with self._changed:
            return DeviceTotals(**self._totals)

    @property
    def pending(self) -> int:
        """Pieces that have not landed."""
        with self._changed:
            return len(self._pending)

    @property
    def live_bytes(self) -> int:
        """Bytes of clones and frozen rows that something still refers to."""
        with self._changed:
            self._settle()
            return self._allocated

    def land_next(self, *, newest: bool = False) -> bool:
        """Land the oldest piece (or the newest); False if there is none."""
        with self._changed:
            if not self._pending:
                return False
            self._land(self._pending[-1 if newest else 0])
            return True

    def land_all(self) -> None:
        """Land whatever is pending."""
        while self.land_next():
            pass

    def until_waited(self, timeout_s: float | None = None) -> bool:
        """Wait until a thread waits for a transfer; whether one does."""
        with self._changed:
            return self._until(lambda: self._waiting > 0, timeout_s or self._patience_s)

    def fail(self, operation: str, *, after: int = 0, error: Exception | None = None) -> None:
        """Make one call of `operation` raise, once: the next one, or the one `after` more calls.

        Operations: "clone", "launch", "wait", "copy_to_host", "rows_to_host", "gather_to_host".
        """
        failure = error or SimulatedDeviceError(f"{operation} was made to fail")
        self._failures.setdefault(operation, deque()).append((after, failure))

    def hold(self, operation: str) -> Hold:
        """Stop the next thread that starts `operation`, until the result's `release`."""
        reached, opened = (self._runtime.event(f"{operation} is {what}") for what in ("reached", "released"))
        hold = self._holds[operation] = Hold(operation, self._patience_s, reached, opened)
        return hold

    def time_passes(self) -> None:
        """Some pieces may land now, unless directed. Any thread."""
        if self._pending and not self.directed and self._random.random() < LANDS:
            with self._changed:
                if self._pending:
                    self._land(self._random.choice(self._pending))
                self._drift()

    # ------------------------------------------------------------------------------------ inside

    def _begin(self, operation: str) -> None:
        if self.on_call is not None:
            self.on_call(operation)
        with self._changed:
            self._drift()
            hold = self._holds.pop(operation, None) if self._holds else None
            if hold is None:
                self._fail_if_told(operation)
                return
        hold.stop()
        with self._changed:
            self._fail_if_told(operation)

    def _fail_if_told(self, operation: str) -> None:
        failures = self._failures.get(operation)
        if failures:
            after, error = failures[0]
            if after == 0:
                failures.popleft()
                raise error
            failures[0] = (after - 1, error)

    def _until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Wait until something holds; False if the limit passed first. Under the condition."""
        deadline = Deadline(self._runtime, limit_s)
        while not holds():
            remaining = deadline.remaining()
            if remaining <= 0:
                return False
            self._changed.wait(remaining)
        return True

    def _drift(self) -> None:
        """Time passes: some pieces land, whichever."""
        if self.directed:
            return
        while self._pending and self._random.random() < LANDS:
            self._land(self._random.choice(self._pending))

    def _land(self, piece: _Piece) -> None:
        self._pending = [p for p in self._pending if p is not piece]
        piece.land()
        self._changed.notify_all()

    def _source(
        self, rows: torch.Tensor, out: torch.Tensor, frozen: list[torch.Tensor]
    ) -> Callable[[int, int], Callable[[], torch.Tensor]]:
        """What gives some of the rows when they land. Appends what the transfer has to hold to `frozen`."""
        if Fault.READS_LIVE_ROWS in self._faults:
            live = rows.detach()
            return lambda start, stop: lambda: live[start:stop]
        private, memory = self._frozen_copy(rows, out.dtype)
        if Fault.DROPS_FROZEN_ROWS not in self._faults:
            frozen.append(private)
        shape, dtype = tuple(private.shape), private.dtype
        # The memory, not the tensor: a copy under way keeps nothing alive.
        return lambda start, stop: lambda: _as_tensor(memory, shape, dtype)[start:stop]

    def _cut(
        self, progress: _Progress, read: Callable[[int, int], Callable[[], torch.Tensor]], out: torch.Tensor
    ) -> list[_Piece]:
        rows = out.shape[0]
        cuts = sorted({0, rows, *(self._random.randint(0, rows) for _ in range(self._random.randint(0, 2)))})
        return [_Piece(progress, read(start, stop), out[start:stop]) for start, stop in itertools.pairwise(cuts)]

    def _frozen_copy(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, _Memory]:
        """A copy of `rows` in memory of the device's own, which is poisoned once nothing refers to the copy."""
        shape = tuple(rows.shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = np.empty(nbytes, dtype=np.uint8)
        lent = memory[:]
        weakref.finalize(lent, self._release, memory).atexit = False
        with self._changed:
            self._settle()
            self._allocated += nbytes
        private = _as_tensor(lent, shape, dtype)
        private.copy_(rows.detach())
        return private, memory

    def _settle(self) -> None:
        while self._released:
            self._allocated -= self._released.popleft()

    def _release(self, memory: _Memory) -> None:
        memory[:] = POISON
        self._released.append(memory.nbytes)

    def _count(self, **amounts: int) -> None:
        with self._changed:
            for name, amount in amounts.items():
                self._totals[name] += amount


def poison(rows: torch.Tensor) -> None:
    """Fill a contiguous tensor with poison, whatever its type."""
    rows.view(-1).view(torch.uint8).fill_(POISON)


def _as_tensor(memory: _Memory, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if not memory.size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


def _nbytes(rows: torch.Tensor) -> int:
    return rows.numel() * rows.element_size()
