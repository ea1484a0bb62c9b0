"""A real vLLM engine with a tiny random model, stepped by hand.

The model is a `config.json` alone: a Qwen3 of hidden size 64 and 2 layers. An engine starts in a second or two once
vLLM is imported, which takes some ten seconds the first time.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from conformance.vllm.environment import RunnerKind, allow_asynchronous_scheduling, prepare
from conformance.vllm.observer import Counts, Observer
from conformance.vllm.recorder import Recorder
from conformance.vllm.truth import CODES_KEY, HASH_KEY, LIST_KEY, PLANE_KEY, REFERENCE_KEY, SOMETIMES_KEY
from omni_prefix_fast.vllm.runner import StageLink
from omni_prefix_fast.vllm.settings import SETTINGS_KEY
from omni_prefix_fast.vllm.sinks import CallbackSink

_UNFREEZE_AT_EXIT = functools.cache(lambda: atexit.register(gc.unfreeze))
"""What `StepEngine.close` froze is let go before the interpreter looks for leaks."""

BLOCK_SIZE = 32
"""CPU attention wants a multiple of 32."""
VOCABULARY = 512

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

DECLARED_KEYS: dict[str, Any] = {
    "token_keys": [HASH_KEY, PLANE_KEY, CODES_KEY, SOMETIMES_KEY],
    "request_keys": [REFERENCE_KEY],
    "request_list_keys": [LIST_KEY],
}
"""What the test model's keys are, as its policy settings."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What differs between the engines of the workloads."""

    num_blocks: int = 128
    max_model_len: int = 512
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 16
    long_prefill_token_threshold: int = 0
    prefix_caching: bool = True
    omni_prefix: Mapping[str, Any] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Any further argument of `vllm.LLM`."""


REFERENCE = EngineSettings(num_blocks=512, prefix_caching=False)
"""The engine to compare with: prefix caching off, room for everything, nothing late, nothing deferred."""


@dataclass(slots=True)
class Request:
    """A request of a run."""

    req_id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    finished: bool = False
    aborted: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt + self.output

    @property
    def computed(self) -> int:
        """Positions that a finished request has rows for: the last token is sampled and never computed."""
        return len(self.tokens) - 1


def model_directory(parent: Path) -> Path:
    """Make the directory of the test model."""
    directory = parent / "tiny-qwen3"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    return directory


@contextmanager
def _quiet_unless_it_fails() -> Iterator[None]:
    """Keep what vLLM and its libraries write to standard error while they start, and show it only if they fail."""
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(shown, kept.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)


class StepEngine:
    """One engine: requests in, one step at a time, rows out into `recorder`."""

    def __init__(self, settings: EngineSettings, kind: RunnerKind) -> None:
        """Start the engine. The process must be one for that kind of runner."""
        prepare(kind)
        with _quiet_unless_it_fails():
            from vllm import LLM  # noqa: PLC0415 - only once the environment is prepared

            from conformance.vllm.worker import LOAD_FORMAT  # noqa: PLC0415

        if settings.engine_args.get("async_scheduling"):
            allow_asynchronous_scheduling()
        self.settings = settings
        self.recorder = Recorder()
        self.requests: dict[str, Request] = {}
        self._parent = tempfile.TemporaryDirectory(prefix="omni-prefix-")
        omni_prefix = {"mm_outputs": "conformance.vllm.hooks:prefix_hashes", "policy": DECLARED_KEYS}
        arguments: dict[str, Any] = {
            "model": str(model_directory(Path(self._parent.name))),
            "load_format": LOAD_FORMAT,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": settings.max_model_len,
            "enable_prefix_caching": settings.prefix_caching,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_num_seqs": settings.max_num_seqs,
            "num_gpu_blocks_override": settings.num_blocks,
            "seed": 0,
            "worker_cls": "conformance.vllm.worker.ObservedWorker",
            "disable_log_stats": True,
            "async_scheduling": False,
            "additional_config": {SETTINGS_KEY: omni_prefix | dict(settings.omni_prefix)},
        }
        if settings.long_prefill_token_threshold:
            arguments["long_prefill_token_threshold"] = settings.long_prefill_token_threshold
        try:
            with _quiet_unless_it_fails():
                self.llm: Any = LLM(**(arguments | dict(settings.engine_args)))
        except BaseException:
            self._parent.cleanup()
            raise
        self._engine = self.llm.llm_engine
        self.worker: Any = self._engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.worker.observer = Observer(BLOCK_SIZE)
        self._link: StageLink | None = self.worker.model_runner.omni_prefix
        if self._link is not None:
            self._link.handover.add_sink(CallbackSink(self.recorder.receive))
        self._open = True

    @property
    def link(self) -> StageLink:
        """The link to cache and sinks. Raises `RuntimeError` for an engine that has none."""
        if self._link is None:
            raise RuntimeError(
                "this engine hands nothing over: omni_prefix.enabled is false, or the stage is a pooling one"
            )
        return self._link

    @property
    def counts(self) -> Counts:
        """What happened so far."""
        counts: Counts = self.worker.observer.counts
        return counts

    def add(self, req_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Submit a request. Ids must not repeat within an engine."""
        from vllm import SamplingParams  # noqa: PLC0415

        self.requests[req_id] = Request(req_id, tuple(prompt))
        params = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, max_tokens=max_tokens)
        self._engine.add_request(req_id, {"prompt_token_ids": list(prompt)}, params)

    def abort(self, req_id: str) -> None:
        """Abort a request that has not finished."""
        self.requests[req_id].aborted = True
        self._engine.abort_request([req_id])

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished."""
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> None:
        """One step of the engine."""
        for output in self._engine.step():
            request = self.requests[output.request_id]
            request.output = tuple(output.outputs[0].token_ids)
            request.finished = request.finished or output.finished

    def received(self) -> dict[str, Any]:
        """What the consumer got, by the ids that requests were submitted under (the engine appends to them)."""
        return {internal.rpartition("-")[0]: got for internal, got in self.recorder.requests.items()}

    def close(self) -> None:
        """Shut the engine down, which hands over whatever waits. Twice is fine."""
        if self._open:
            self._open = False
            try:
                self._engine.engine_core.shutdown()
            finally:
                self._parent.cleanup()
            _UNFREEZE_AT_EXIT()
            gc.freeze()  # vLLM collects garbage seven times from one engine to the next; this makes most of them short

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
