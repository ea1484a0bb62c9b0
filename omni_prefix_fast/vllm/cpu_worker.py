"""vLLM's CPU worker with the cache.

Select it with `worker_cls="omni_prefix_fast.vllm.cpu_worker.OmniPrefixCPUWorker"`.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from omni_prefix_fast.vllm.worker import OmniPrefixWorkerMixin


class OmniPrefixCPUWorker(OmniPrefixWorkerMixin, CPUWorker):
    """`CPUWorker` whose model runner, V1 or V2, keeps and hands over the outputs of whole prompts."""
