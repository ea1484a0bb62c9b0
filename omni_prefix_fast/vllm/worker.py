"""What the workers have in common: they put the hooks in front of their model runner, and keep its warm-up out.

Nothing here imports vLLM; `cpu_worker` and `gpu_worker` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_prefix_fast.vllm.runner import attach
from omni_prefix_fast.vllm.settings import OmniPrefixSettings

if TYPE_CHECKING:
    _Worker: Any
else:
    _Worker = object


class OmniPrefixWorkerMixin(_Worker):
    """Goes in front of a vLLM worker class."""

    def init_device(self) -> Any:
        """Let vLLM choose and make its model runner, V1 or V2, then hook into it.

        Raises:
            OmniPrefixCacheConfigError: the settings in `additional_config` are wrong. Nothing was allocated yet.
        """
        OmniPrefixSettings.from_vllm_config(self.vllm_config)
        result = super().init_device()
        attach(self.model_runner)
        return result

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Warm up without the cache: the requests of a warm-up are made up."""
        with self.model_runner.omni_prefix_paused():
            return super().compile_or_warm_up_model(*args, **kwargs)
