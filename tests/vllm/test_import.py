"""The worker classes, without an engine."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from omni_prefix_fast.vllm.cpu_worker import OmniPrefixCPUWorker
from omni_prefix_fast.vllm.gpu_worker import OmniPrefixGPUWorker
from omni_prefix_fast.vllm.runner import OmniPrefixRunnerMixin, with_prefix_cache
from omni_prefix_fast.vllm.worker import OmniPrefixWorkerMixin


def test_worker_classes_import_on_a_machine_without_a_gpu() -> None:
    """Both are vLLM's own with the same mixin in front."""
    assert OmniPrefixCPUWorker.__mro__[1:3] == (OmniPrefixWorkerMixin, CPUWorker)
    assert OmniPrefixGPUWorker.__mro__[1:3] == (OmniPrefixWorkerMixin, Worker)


def test_the_same_mixin_serves_every_model_runner() -> None:
    """V1 and V2, CPU and GPU: each has the five methods that the hooks wrap, and keeps all else."""
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner as CPUModelRunnerV2  # noqa: PLC0415
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: PLC0415
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2  # noqa: PLC0415
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415

    for runner_class in (GPUModelRunner, CPUModelRunner, GPUModelRunnerV2, CPUModelRunnerV2):
        hooked = with_prefix_cache(runner_class)
        assert hooked.__mro__[1:3] == (OmniPrefixRunnerMixin, runner_class)
        for name in ("initialize_kv_cache", "execute_model", "sample_tokens", "get_model", "shutdown"):
            assert callable(getattr(runner_class, name))
