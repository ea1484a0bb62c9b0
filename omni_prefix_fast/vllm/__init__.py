"""The cache on a real vLLM engine: the only part of the package that knows vLLM.

In:  `worker_cls="omni_prefix_fast.vllm.cpu_worker.OmniPrefixCPUWorker"` (or `gpu_worker.OmniPrefixGPUWorker`), and
     settings in `additional_config["omni_prefix"]` (`settings.OmniPrefixSettings`).
Out: a `sinks.Delivery` for each step and `sinks.Finished`, to a callback or a directory of safetensors files.

============== ==================================================================================================
module         purpose
============== ==================================================================================================
settings       what may stand in `additional_config`
sinks          what is handed over, and the callback sink
files          the directory sink: one file a request, whole or not at all
views          the batch and its slots, for runners that keep their block table on the device
footprint      what a stage costs in memory, from the engine's configuration
forward_only   what stands in for the cache when prefix caching is off
handover       the queue from saved steps to sinks: inline or on a thread, at once or late
runner         the hooks in the model runner
worker         what the two workers have in common
cpu_worker     the worker class for vLLM on a CPU (imports vLLM)
gpu_worker     the worker class for vLLM on a GPU (imports vLLM)
============== ==================================================================================================
"""
