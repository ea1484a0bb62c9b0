"""The worker and the weights of the test engine. Imports vLLM: prepare the environment first.

vLLM's own dummy weights are within a thousandth of zero, so that a row hardly depends on its context and a wrong row
may look right. `SpreadWeights` draws weights with a spread.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from conformance.vllm.observer import Observer
from omni_prefix_fast.vllm.cpu_worker import OmniPrefixCPUWorker

LOAD_FORMAT = "omni_prefix_spread"


@register_model_loader(LOAD_FORMAT)
class SpreadWeights(DummyModelLoader):
    """Weights of 1.2 / sqrt(fan-in), norms at one, the same in every process: drawn from each parameter's name."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Fill every parameter in place."""
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            with torch.no_grad():
                if parameter.dim() < 2:
                    parameter.fill_(1.0)
                else:
                    drawn = torch.randn(parameter.shape, generator=generator) * (1.2 / parameter.shape[-1] ** 0.5)
                    parameter.copy_(drawn)


class ObservedWorker(OmniPrefixCPUWorker):
    """The worker under test, with an observer that sees each scheduler output first."""

    observer: Observer | None = None

    def execute_model(self, scheduler_output: Any) -> Any:
        """Count, then run."""
        if self.observer is not None:
            self.observer.observe(scheduler_output)
        return super().execute_model(scheduler_output)
