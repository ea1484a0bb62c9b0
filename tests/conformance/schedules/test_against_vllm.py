"""The traces' environment against vLLM: the same requests, and in every step the same decisions.

vLLM's `Scheduler` and `KVCacheManager` run alone, without an engine; what they sample is what the environment samples.
The environment decides as vLLM does here (`Limits.faithful`, blocks in vLLM's order); what it does otherwise in traces
is to draw shorter chunks, earlier admissions, another order of blocks, and preemptions of its own.
"""

# vLLM can only be imported after the process has been prepared for it:
# ruff: noqa: E402

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from conformance.vllm.environment import prepare, vllm_is_installed

if not vllm_is_installed():
    pytest.skip("vLLM is not installed here; `make test-vllm` runs this", allow_module_level=True)
prepare("v1")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from conformance.schedules.arrivals import Arrivals
from conformance.schedules.blocks import Blocks
from conformance.schedules.content import next_token
from conformance.schedules.scheduler import Limits, Placed, Request, Scheduler

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
PLACEHOLDER = 60
"""What vLLM finds in the prompt wherever an item is, whichever it is. No text holds it."""
ROOM = 1 << 20
"""Enough for every item: what an encoder can take bounds no step here."""
NULL_BLOCKS = 1
"""vLLM keeps block 0 for itself, so its first block is 1 where the environment's is 0."""


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """A configuration without a model behind it."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODEL))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(path), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=MAX_LEN
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_LEN,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            enable_chunked_prefill=True,
            async_scheduling=False,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig("cpu"),
    )


class _Theirs:
    """vLLM's scheduler, with the calls that the comparison makes."""

    def __init__(self, vllm_config: VllmConfig, num_blocks: int, block_size: int, limits: Limits) -> None:
        config = replace(
            vllm_config,
            cache_config=replace(vllm_config.cache_config, block_size=block_size),
            scheduler_config=replace(
                vllm_config.scheduler_config,
                max_model_len=MAX_LEN,
                is_encoder_decoder=False,
                max_num_batched_tokens=limits.max_tokens,
                max_num_seqs=limits.max_requests,
                long_prefill_token_threshold=limits.max_chunk,
            ),
        )
        config.cache_config.block_size = block_size
        config.cache_config.num_gpu_blocks = num_blocks + NULL_BLOCKS
        spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self.scheduler = VllmScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks + NULL_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=False,
        )
        self.scheduler.max_num_encoder_input_tokens = ROOM
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=ROOM)

    def add(self, request: Request) -> None:
        """The request with all that it will ever be given: streaming chunks wait in vLLM's own queue."""
        salt, *prompt = request.content
        streams = bool(request.chunks)
        self._add(request.req, prompt, request.length - len(prompt) + 1, salt, resumable=streams)
        for chunk in request.chunks:
            self._add(request.req, list(chunk.tokens), chunk.outputs + 1, salt, resumable=True)
        if streams:
            self._add(request.req, [0], 1, salt, resumable=False)

    def _add(self, req: str, tokens: list[int], max_tokens: int, salt: int, *, resumable: bool) -> None:
        items, at = [], 0
        for token, run in groupby(tokens):
            count = len(list(run))
            if token < 0:
                place = PlaceholderRange(offset=at, length=count)
                items.append(MultiModalFeatureSpec(None, "image", f"item {token}", place))
            at += count
        self.scheduler.add_request(
            VllmRequest(
                req,
                [PLACEHOLDER if token < 0 else token for token in tokens],
                SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0),
                None,
                mm_features=items or None,
                cache_salt=str(salt) if salt else None,
                block_hasher=self._hasher,
                resumable=resumable,
            )
        )

    def abort(self, req: str) -> None:
        """The request ends."""
        self.scheduler.finish_requests(req, RequestStatus.FINISHED_ABORTED)

    def table(self, req: str) -> tuple[int, ...]:
        """The request's blocks, numbered as the environment does."""
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(req)
        return tuple(block - NULL_BLOCKS for block in blocks)

    def free_order(self) -> list[int]:
        """Free blocks, next to be handed out first."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id - NULL_BLOCKS for block in queue.get_all_free_blocks()]

    def update(self, output: Any, sampled: dict[str, list[int]]) -> None:
        """The step is computed."""
        reqs = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(reqs, {r: i for i, r in enumerate(reqs)}, sampled_token_ids=[sampled[r] for r in reqs]),
        )


class _Both:
    """One seed's requests, on both."""

    def __init__(self, vllm_config: VllmConfig, seed: int) -> None:
        rng = self.rng = random.Random(f"against vLLM {seed}")
        block_size, num_blocks = rng.choice((1, 2, 4, 8)), rng.randint(5, 14)
        max_requests = rng.randint(1, 5)
        max_tokens = rng.randint(max(3, max_requests), 20)
        self.limits = Limits(
            max_tokens, max_requests, rng.choice((2, 4, max_tokens)), rng.choice((2, 3)), faithful=True
        )
        self.ours = Scheduler(Blocks(num_blocks, block_size, any_order=None), self.limits, rng)
        self.theirs = _Theirs(vllm_config, num_blocks, block_size, self.limits)
        capacity = num_blocks * block_size
        self.arrivals = Arrivals(rng, capacity=capacity, vocabulary=self.limits.vocabulary, stream=0.25, item=0.5)
        self.abort_chance = rng.choice((0.0, 0.03, 0.1))
        self.holding: set[str] = set()
        """Held blocks before the step: one of these that comes in as new continues."""
        self.ended: set[str] = set()
        """Ended since the last step, and told by the next."""
        self.counts: Counter[str] = Counter()

    def step(self, arrivals: bool) -> None:
        """Arrivals, aborts, a step, and aborts while it is computed."""
        while arrivals and len(self.ours.requests) + len(self.ended) < 7 and self.rng.random() < 0.5:
            # vLLM's rule, too: an id is free again once its end was told.
            request = self.arrivals.draw({each.req for each in self.ours.requests} | self.ended)
            self.counts["with an item"] += min(request.content) < 0
            self.ours.add(request)
            self.theirs.add(request)
        self._abort_some("aborts between steps")
        preempted = self.ours.preemptions
        self.holding = {request.req for request in self.ours.requests if request.blocks}
        placed, output = self.ours.schedule(), self.theirs.scheduler.schedule()
        assert {p.request.req: p.count for p in placed} == output.num_scheduled_tokens
        assert self._reqs(placed) == list(output.num_scheduled_tokens)
        assert {p.request.req: p.blocks for p in placed} == {r: self.theirs.table(r) for r in self._reqs(placed)}
        assert {p.request.req: (p.kind, p.start) for p in placed} == self._admissions(output)
        assert self.ended == set(output.finished_req_ids)
        assert self.ours.preemptions - preempted == len(output.preempted_req_ids or ())
        self.ended = set()
        self._count(placed)
        self._abort_some("aborts while a step is computed")
        sampled = {p.request.req: self._sampled(p.request) for p in placed}
        self.ended |= {request.req for request in self.ours.forward_done(placed)}
        self.theirs.update(output, sampled)
        for request in self.ours.requests:
            assert tuple(request.blocks) == self.theirs.table(request.req)
        assert self.ours.blocks.free_order == self.theirs.free_order()

    @staticmethod
    def _reqs(placed: list[Placed]) -> list[str]:
        return [part.request.req for part in placed]

    def _sampled(self, request: Request) -> list[int]:
        return [next_token(request.content, self.limits.vocabulary)] if request.computed >= request.known else []

    def _admissions(self, output: Any) -> dict[str, tuple[str, int]]:
        """By request: how it comes into the step, and the tokens already computed."""
        cached = output.scheduled_cached_reqs
        told = {
            r: ("resumed" if r in cached.resumed_req_ids else "running", computed)
            for r, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        }
        for new in output.scheduled_new_reqs:
            kind = "continued" if new.req_id in self.holding else "new"
            told[new.req_id] = (kind, new.num_computed_tokens)
        return told

    def _abort_some(self, what: str) -> None:
        for request in list(self.ours.requests):
            if self.rng.random() < self.abort_chance:
                self.ours.remove(request)
                self.theirs.abort(request.req)
                self.ended.add(request.req)
                self.counts[what] += 1

    def _count(self, placed: list[Placed]) -> None:
        writers = {b for p in placed for b in p.blocks[p.start // self.ours.blocks.block_size :]}
        for part in placed:
            self.counts[part.kind] += 1
            self.counts["chunks"] += part.request.computed < part.request.known
            if part.kind in {"new", "resumed"} and part.start:
                self.counts["hits"] += 1
                hit = part.blocks[: part.start // self.ours.blocks.block_size]
                self.counts["same-step hits"] += bool(writers & set(hit))
                self.counts["hits on an item"] += min(part.request.content[: part.start + 1]) < 0


SEEDS = 120
STEPS = 40


def test_the_environment_decides_as_vllm_does(vllm_config: VllmConfig) -> None:
    """Tokens, block tables, hits, admissions, preemptions, ends and the order of free blocks are equal step by step."""
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        both = _Both(vllm_config, seed)
        for step in range(STEPS):
            try:
                both.step(arrivals=step < STEPS - 10)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {step}: {error}") from error
        counts.update(both.counts)
        counts["preemptions"] += both.ours.preemptions
    print(f"\n{SEEDS} seeds: {dict(counts)}")
    wanted = {
        "hits",
        "same-step hits",
        "hits on an item",
        "chunks",
        "preemptions",
        "resumed",
        "continued",
        "aborts between steps",
        "aborts while a step is computed",
    }
    assert not {name for name in wanted if counts[name] < SEEDS // 10}, counts
