"""The engine's configuration objects of one stage, as the gate reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from omni_prefix_fast import PrefixCacheConfig, stage_prefix_cache_config


class FullAttentionSpec:
    """Stands for vLLM's spec of that name, which the gate recognises by it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


def kv_cache(block_size: int, **attributes: Any) -> SimpleNamespace:
    """The engine's KV cache with one group of full attention."""
    groups = [SimpleNamespace(kv_cache_spec=FullAttentionSpec(block_size))]
    return SimpleNamespace(num_blocks=8, kv_cache_groups=groups, **attributes)


def gate(
    *,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    prefix_match_unit: int | None = None,
    kv_role: str | None = None,
    max_num_batched_tokens: int | None = 64,
    max_model_len: int = 128,
    is_pooling_model: bool = False,
    **changes: Any,
) -> PrefixCacheConfig | None:
    """`stage_prefix_cache_config` of a stage that the cache is built for, with some of it changed."""
    return stage_prefix_cache_config(
        kv_cache_config=kv_cache(block_size),
        cache_config=SimpleNamespace(
            enable_prefix_caching=enable_prefix_caching, block_size=block_size, prefix_match_unit=prefix_match_unit
        ),
        kv_transfer_config=None if kv_role is None else SimpleNamespace(kv_role=kv_role),
        scheduler_config=SimpleNamespace(policy="fcfs", max_num_batched_tokens=max_num_batched_tokens),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        is_pooling_model=is_pooling_model,
        **changes,
    )
