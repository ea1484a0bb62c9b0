"""A process in which vLLM runs on a CPU, and gives the same bits each time.

`prepare` has to be called before vLLM is imported anywhere in the process; it is idempotent. One process runs one
kind of model runner: the V2 runner's kernels are Triton's, which on a CPU run in Triton's interpreter, and whether they
do is decided when they are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from importlib.util import find_spec
from typing import Any, Literal

import torch

RunnerKind = Literal["v1", "v2"]

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    # With more than one thread a decode row differs in its last bits with the batch that it was in.
    "OMP_NUM_THREADS": "1",
    # The engine's own warnings (a deprecated name, NUMA binding) say nothing about this project.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def vllm_is_installed() -> bool:
    """Whether this environment has vLLM."""
    return find_spec("vllm") is not None


def prepare(kind: RunnerKind) -> None:
    """Set the process up for an engine with that model runner.

    Raises:
        RuntimeError: vLLM was already imported, or the process was set up for the other runner.
    """
    if (former := os.environ.get("OMNI_PREFIX_RUNNER")) is not None and "vllm" in sys.modules:
        if former != kind:
            raise RuntimeError(f"this process runs the {former} model runner; start another one for {kind}")
        return
    if "vllm" in sys.modules:
        raise RuntimeError("vllm was imported before its environment was prepared")
    os.environ.update(_VARIABLES)
    os.environ["OMNI_PREFIX_RUNNER"] = kind
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if kind == "v2" else "0"
    torch.set_num_threads(1)
    if kind == "v2":
        os.environ["TRITON_INTERPRET"] = "1"
        _add_cpu_backend_to_triton()


def _add_cpu_backend_to_triton() -> None:
    """Make Triton's interpreter usable without an accelerator: it asks the active backend for the device's name."""
    # By name: Triton comes with vLLM, and types are checked without it.
    backends: Any = importlib.import_module("triton.backends")
    targets: Any = importlib.import_module("triton.backends.compiler")
    base: type = backends.DriverBase

    class InterpreterDriver(base):
        """Answers what the interpreter and vLLM ask of a driver."""

        def __init__(self) -> None:
            """Nothing to set up."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return targets.GPUTarget("cpu", 0, 0)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> None:
            return None

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=InterpreterDriver)


class _NoWait:
    """Stands for an event or a stream of an accelerator: everything that it orders has happened."""

    device = torch.device("cpu")

    def __init__(self, *_: object, **__: object) -> None:
        """Whatever an accelerator's takes."""

    def record(self, *_: object) -> None:
        """Nothing to mark."""

    def wait(self, *_: object) -> None:
        """Nothing to wait for."""

    def wait_stream(self, *_: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, *_: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether it has happened: yes."""
        return True


def allow_asynchronous_scheduling() -> None:
    """Let a CPU engine schedule the next step before it has the tokens of this one, as GPU engines do by default.

    vLLM's CPU platform switches that off, since its streams and events are an accelerator's. With stand-ins for them
    scheduling is really asynchronous, the forward still inline. For the whole process, once; the engine still has to
    ask for it (`async_scheduling=True`).
    """
    platform: Any = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    if getattr(platform, "omni_prefix_keeps_async_scheduling", False):
        return
    check_and_update: Any = platform.check_and_update_config

    def keep_async_scheduling(vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check_and_update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = bool(asked)

    platform.check_and_update_config = staticmethod(keep_async_scheduling)
    platform.omni_prefix_keeps_async_scheduling = True
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = _NoWait
    cuda.current_stream = _NoWait
    cuda.stream = lambda _: contextlib.nullcontext()
