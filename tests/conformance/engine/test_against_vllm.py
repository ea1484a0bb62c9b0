"""The built-in engine's scheduler against vLLM's own: the same requests, step for step the same decisions.

vLLM's `Scheduler` and `KVCacheManager` run alone here, without an engine; what they sample is what the built-in model
samples. So every rule that the built-in scheduler claims to follow is held against the original.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.vllm.environment import prepare, vllm_is_installed

if not vllm_is_installed():
    pytest.skip("vLLM is not installed here; `make test-vllm` runs this", allow_module_level=True)
prepare("v1")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from conformance.engine import Engine, EngineConfig, SchedulerOutput, WorkloadConfig, make_workload

# Warnings of vLLM and of its dependencies at import are not this project's to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
MAX_LEN = 256


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is a configuration and nothing else."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


class _VllmScheduler:
    """vLLM's scheduler with the calls that the comparison makes."""

    def __init__(self, model_dir: Path, config: EngineConfig) -> None:

        vllm_config = VllmConfig(
            model_config=ModelConfig(
                model=str(model_dir), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=MAX_LEN
            ),
            cache_config=CacheConfig(block_size=config.block_size, enable_prefix_caching=config.caching),
            scheduler_config=SchedulerConfig(
                max_model_len=MAX_LEN,
                max_num_batched_tokens=config.token_budget,
                max_num_seqs=config.max_num_seqs,
                long_prefill_token_threshold=config.chunk_limit,
                enable_chunked_prefill=True,
                async_scheduling=False,
                is_encoder_decoder=False,
            ),
            device_config=DeviceConfig("cpu"),
        )
        vllm_config.cache_config.block_size = config.block_size
        spec = FullAttentionSpec(config.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        vllm_config.cache_config.num_gpu_blocks = config.num_blocks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(config.block_size, sha256)
        self._scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(config.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=config.block_size,
            log_stats=False,
        )
        self._scheduler.use_v2_model_runner = config.resumed_as_new

    def add_request(self, req_id: str, prompt: list[int], max_tokens: int) -> None:

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        self._scheduler.add_request(Request(req_id, prompt, sampling, None, block_hasher=self._hasher))

    def abort(self, req_id: str) -> None:

        self._scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        return self._scheduler.schedule()

    def update(self, sched: Any, sampled: dict[str, list[int]]) -> None:

        req_ids = list(sched.num_scheduled_tokens)
        self._scheduler.update_from_output(
            sched,
            ModelRunnerOutput(
                req_ids, {r: i for i, r in enumerate(req_ids)}, sampled_token_ids=[sampled[r] for r in req_ids]
            ),
        )


def _decisions(sched: SchedulerOutput | Any) -> dict[str, Any]:
    """What a step's output says, in plain values."""
    cached = sched.scheduled_cached_reqs
    return {
        "tokens": list(sched.num_scheduled_tokens.items()),
        "new": [(new.req_id, new.num_computed_tokens, list(new.block_ids[0])) for new in sched.scheduled_new_reqs],
        "known": [
            (req_id, computed, list(ids[0]) if ids else None, req_id in cached.resumed_req_ids)
            for req_id, computed, ids in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            )
        ],
        "finished": set(sched.finished_req_ids),
        "preempted": set(sched.preempted_req_ids or ()),
    }


CONFIGS = [
    EngineConfig(num_blocks=60, block_size=4, max_num_seqs=8, token_budget=48),
    EngineConfig(num_blocks=22, block_size=4, max_num_seqs=6, token_budget=24, chunk_limit=6),
    EngineConfig(num_blocks=31, block_size=2, max_num_seqs=4, token_budget=12, resumed_as_new=True),
    EngineConfig(num_blocks=14, block_size=8, max_num_seqs=8, token_budget=48, chunk_limit=8),
    EngineConfig(num_blocks=22, block_size=4, max_num_seqs=6, token_budget=24, caching=False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.num_blocks}x{config.block_size}")
def test_the_built_in_scheduler_decides_as_vllm_does(model_dir: Path, config: EngineConfig) -> None:
    """Block tables, hits, chunks, preemptions, resumes and what is reported are equal in every step."""
    ours, theirs = Engine(config), _VllmScheduler(model_dir, config)
    workload = WorkloadConfig(num_requests=150, block_size=config.block_size, vocab_size=61, requests_per_step=0.7)
    coming = list(reversed(make_workload(5, workload)))
    requests = {}
    aborts: dict[int, list[str]] = {}
    step = 0
    while coming or ours.has_work:
        while coming and coming[-1].arrival <= step:
            each = coming.pop()
            requests[each.req_id] = ours.add_request(each.req_id, list(each.prompt), each.max_tokens)
            theirs.add_request(each.req_id, list(each.prompt), each.max_tokens)
            if each.abort_after is not None:
                aborts.setdefault(step + each.abort_after, []).append(each.req_id)
        for req_id in aborts.pop(step, ()):
            if requests[req_id].is_live:
                ours.abort(req_id)
                theirs.abort(req_id)
        sched, their_sched = ours.schedule(), theirs.schedule()
        assert _decisions(sched) == _decisions(their_sched), f"step {step}"
        ours.update_batch(sched)
        lengths = {req_id: requests[req_id].num_tokens for req_id in sched.num_scheduled_tokens}
        if sched.total_num_scheduled_tokens:
            ours.forward(sched)
            ours.finish_step(sched)
        theirs.update(their_sched, {req_id: requests[req_id].tokens[length:] for req_id, length in lengths.items()})
        step += 1
    stats = ours.scheduler.stats
    print(f"\n{config.num_blocks} blocks of {config.block_size}: {stats}")
    assert stats.finished + stats.aborts == len(requests)
    assert stats.aborts > 0
    if config.caching:
        assert min(stats.hits, stats.same_step_hits) > 0
    if config.num_blocks < 60:
        assert min(stats.preemptions, stats.resumes) > 0
