"""A round: one engine, one cache, one workload. Their settings are drawn, so that no one shape hides a fault."""

from dataclasses import dataclass
from random import Random

import torch

from conformance.engine import EngineConfig, ModelConfig, WorkloadConfig
from conformance.engine.engine import REFERENCE, TAGS
from conformance.engine.model import FEATURES, TOKEN_KEYS
from conformance.onoff.consumer import Manners
from omni_prefix_fast.config import ModelCachePolicy, PrefixCacheConfig


@dataclass(frozen=True, slots=True)
class Round:
    """Everything that decides a run."""

    seed: int
    engine: EngineConfig
    model: ModelConfig
    workload: WorkloadConfig
    cache: PrefixCacheConfig
    policy: ModelCachePolicy
    manners: Manners
    eager: bool
    """Whether the cache writes inline, or on threads of its own."""


def draw_round(seed: int, num_requests: int) -> Round:
    """Draw a round. KV blocks are few, so that requests are preempted and blocks change hands all the time."""
    rng = Random(seed)
    block_size = rng.choice((2, 3, 4, 4, 8))
    max_prompt, max_output = 40, rng.choice((4, 8, 12))
    longest = -(-(max_prompt + max_output) // block_size)
    engine = EngineConfig(
        num_blocks=1 + rng.randint(longest + 1, 3 * longest),
        block_size=block_size,
        max_num_seqs=rng.choice((4, 6, 8)),
        token_budget=rng.choice((12, 24, 48)),
        chunk_limit=rng.choice((0, 5, 8)),
        resumed_as_new=rng.random() < 0.3,
        pad_to=rng.choice((1, 1, 8)),
    )
    model = ModelConfig(hidden_size=rng.choice((2, 8)), hidden_dtype=rng.choice((torch.float32, torch.bfloat16)))
    depth = rng.choice((2, 4))
    return Round(
        seed=seed,
        engine=engine,
        model=model,
        workload=WorkloadConfig(
            num_requests=num_requests,
            block_size=block_size,
            vocab_size=model.vocab_size,
            max_prompt=max_prompt,
            max_output=max_output,
            requests_per_step=rng.choice((0.5, 0.7)),
        ),
        cache=PrefixCacheConfig(
            num_blocks=engine.num_blocks,
            block_size=block_size,
            staging_depth=depth,
            staging_capacity_tokens=engine.max_padded_tokens,
            gpu_staging_bytes=rng.choice((256, 2048, 1 << 20)),
            copy_chunk_bytes=rng.choice((64, 1 << 20)),
        ),
        policy=ModelCachePolicy(
            needs_full_hidden_states=rng.random() < 0.85,
            deferred_keys=frozenset({FEATURES}),
            token_keys=frozenset(TOKEN_KEYS) if rng.random() < 0.5 else None,
            request_keys=frozenset({REFERENCE}),
            request_list_keys=frozenset({TAGS}),
        ),
        manners=Manners(max_open=depth - 1),
        eager=rng.random() < 0.5,
    )
