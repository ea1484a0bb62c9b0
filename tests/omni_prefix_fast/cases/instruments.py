"""What the case tests put into a cache to see inside it.

Devices that count or fail, a runtime that tells who waits, a guard against copies under the state lock, and a measure
of everything that an object holds. All of it goes in through public parameters. Nothing sleeps: a test waits for an
event, with a limit.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omni_prefix_fast.device import HostDevice
from omni_prefix_fast.runtime import Condition, Event, Lock, ThreadRuntime

LIMIT_S = 10.0
"""How long a test waits for something that has to happen."""

T = TypeVar("T")


class Background(Generic[T]):
    """A call on another thread. `result` waits for it, with a limit, and raises what it raised."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> T:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the call never came back"
        if self._error is not None:
            raise self._error
        return self._result[0]


def wait_for(event: threading.Event) -> None:
    """Wait for something that has to happen."""
    assert event.wait(LIMIT_S), "it never happened"


class Gate:
    """A place where a thread stops until the test opens it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def stop(self) -> None:
        self.reached.set()
        wait_for(self.opened)


# ------------------------------------------------------------------------------------------------------- runtime


class _WatchedLock:
    def __init__(self, watch: Watch, name: str) -> None:
        self._watch, self._name, self._lock = watch, name, threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._watch.holders[self._name] = threading.get_ident()
        return taken

    def release(self) -> None:
        self._watch.holders.pop(self._name, None)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()


class _WatchedEvent:
    def __init__(self, watch: Watch, name: str) -> None:
        self._watch, self._name, self._event = watch, name, threading.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._event.is_set():
            self._watch.blocked(self._name).set()
        return self._event.wait(timeout)


class _WatchedCondition:
    def __init__(self, watch: Watch, name: str) -> None:
        self._watch, self._name, self._condition = watch, name, threading.Condition(threading.Lock())

    def __enter__(self) -> bool:
        return self._condition.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._condition.__exit__(kind, error, trace)

    def wait(self, timeout: float | None = None) -> bool:
        self._watch.blocked(self._name).set()
        return self._condition.wait(timeout)

    def notify_all(self) -> None:
        self._condition.notify_all()


class Watch(ThreadRuntime):
    """A runtime that knows who holds which lock, and tells when somebody begins to wait for something."""

    STATE = "manager state"

    def __init__(self) -> None:
        self.holders: dict[str, int] = {}
        self._blocked: dict[str, threading.Event] = {}

    def blocked(self, name: str) -> threading.Event:
        """Set once somebody waits for the event or condition of that name."""
        return self._blocked.setdefault(name, threading.Event())

    @property
    def in_state_lock(self) -> bool:
        """Whether this very thread holds the state lock."""
        return self.holders.get(self.STATE) == threading.get_ident()

    def lock(self, name: str) -> Lock:
        return _WatchedLock(self, name)

    def condition(self, name: str) -> Condition:
        return _WatchedCondition(self, name)

    def event(self, name: str) -> Event:
        return _WatchedEvent(self, name)


VIEWS = frozenset({"select", "slice", "view", "detach", "alias", "split", "split_with_sizes", "unsqueeze", "expand"})
"""Torch operations that move no row."""


class NoCopyUnderStateLock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active on a thread, that thread moves no row while it holds the state lock. Counts what it saw moved."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            assert not self._watch.in_state_lock, f"{func} under the state lock"
            self.moved[name] += 1
        return func(*args, **(kwargs or {}))


# -------------------------------------------------------------------------------------------------------- devices


class CountingDevice(HostDevice):
    """Counts copies to the host, one entry a copy: its bytes."""

    def __init__(self) -> None:
        self.clones: list[int] = []
        self.copies: list[int] = []

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        clone = super().clone(rows, dtype)
        self.clones.append(nbytes(clone))
        return clone

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self.copies.append(nbytes(out))
        super().copy_to_host(rows, out)


class FailingDevice(HostDevice):
    """Raises on the calls of `method` whose numbers, from 1, stand in `on`."""

    def __init__(self, method: str, on: int) -> None:
        self._method, self._on, self._calls = method, on, 0

    def _call(self, method: str) -> None:
        if method == self._method:
            self._calls += 1
            if self._calls == self._on:
                raise OSError("the device is gone")

    def clone(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._call("clone")
        return super().clone(rows, dtype)

    def copy_to_host(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self._call("copy_to_host")
        super().copy_to_host(rows, out)

    def gather_to_host(self, parts: Sequence[torch.Tensor], chunk_bytes: int) -> torch.Tensor:
        self._call("gather_to_host")
        return super().gather_to_host(parts, chunk_bytes)


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


# ----------------------------------------------------------------------------------------- what an object holds

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType, BuiltinFunctionType)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [("[]", v) for v in value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [("[]", v) for v in value]
    if isinstance(value, MethodType):
        return [(".__self__", value.__self__)]
    names = [*getattr(value, "__dict__", ())]
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [(f".{name}", getattr(value, name)) for name in names if hasattr(value, name)]


def walk(root: Any, *, leave_out: Sequence[Any] = ()) -> list[tuple[str, Any]]:
    """Every object that `root` holds, however deep, once, with a path that leads to it."""
    found: list[tuple[str, Any]] = []
    seen = {id(thing) for thing in leave_out}
    queue = deque([("", root)])
    while queue:
        path, value = queue.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        found.append((path, value))
        if not isinstance(value, (torch.Tensor, np.ndarray)):
            queue.extend((path + part, inner) for part, inner in _parts(value))
    return found


def container_sizes(root: Any, *, leave_out: Sequence[Any] = ()) -> Counter[str]:
    """Entries of all containers and arrays that `root` holds, by path; elements of a container share one path."""
    sizes: Counter[str] = Counter()
    for path, value in walk(root, leave_out=leave_out):
        if isinstance(value, (Mapping, list, tuple, set, frozenset, deque, np.ndarray, torch.Tensor)):
            sizes[path] += len(value)
    return +sizes


def tensor_bytes(root: Any) -> int:
    """Bytes of the storages behind all tensors that `root` holds, each storage once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for _, t in walk(root)
        if isinstance(t, torch.Tensor)
    }
    return sum(storages.values())


def census(*modules: str) -> Counter[str]:
    """Live objects that the collector knows, by type: tensors, arrays, and types of the given packages."""
    counted: Counter[str] = Counter()
    for thing in gc.get_objects():
        cls = type(thing)
        if cls is torch.Tensor or str(cls.__module__).startswith(modules):
            counted[cls.__qualname__] += 1
    return counted
