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
from omni_prefix_fast.vllm.runner import StageLink

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
    """The worker under test: an observer sees each scheduler output, and slots are checked against the engine's own."""

    observer: Observer | None = None
    slots_checked: int = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        """Count, run, check."""
        if self.observer is not None:
            self.observer.observe(scheduler_output)
        result = super().execute_model(scheduler_output)
        link = self.model_runner.omni_prefix
        if link is not None and link.cached and self.model_runner.execute_model_state is not None:
            self._check_slots(link, scheduler_output)
        return result

    def _check_slots(self, link: StageLink, scheduler_output: Any) -> None:
        """The slots that the cache reads from the batch are those where the forward put its keys and values."""
        view: Any = link.adapter.view
        ours = view.step_slots_cpu(view.batch_req_ids(), scheduler_output.num_scheduled_tokens)
        runner = self.model_runner
        if hasattr(runner, "input_batch"):
            theirs = runner.input_batch.block_table[0].slot_mapping.cpu
        else:
            theirs = runner.block_tables.slot_mappings[0].cpu()
        if not torch.equal(ours, theirs[: len(ours)].to(torch.int64)):
            raise AssertionError(
                f"the cache reads slots {ours.tolist()}, the engine used {theirs[: len(ours)].tolist()}"
            )
        self.slots_checked += len(ours)
