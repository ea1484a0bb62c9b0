"""vLLM's GPU worker with the cache.

Select it with `worker_cls="omni_prefix_fast.vllm.gpu_worker.OmniPrefixGPUWorker"`.
"""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from omni_prefix_fast.vllm.worker import OmniPrefixWorkerMixin


class OmniPrefixGPUWorker(OmniPrefixWorkerMixin, Worker):
    """`Worker` whose model runner, V1 or V2, keeps and hands over the outputs of whole prompts."""
