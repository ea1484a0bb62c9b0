"""Omni prefix cache: a host copy of a stage's per-token outputs that mirrors the engine's KV blocks, slot for slot.

::

    cache = OmniPrefixCacheManager(config, view)
    cache.register_policy(ModelCachePolicy.from_model(model))
    cache.new_step_starts(scheduler_output)              # each step, before the batch drops finished requests
    step_id = cache.save_outputs(hidden, mm_outputs, num_tokens_unpadded=n, num_tokens_padded=n_pad)
    outs = cache.materialize(step_id, req_ids)           # or cache.discard_step(step_id): exactly one, once
    cache.shutdown()

Imports and runs without a GPU and without vLLM. The integration is `omni_prefix_fast.vllm`.
"""

from omni_prefix_fast.committer import OmniPrefixCacheController
from omni_prefix_fast.config import ModelCachePolicy, PrefixCacheConfig
from omni_prefix_fast.errors import (
    OmniPrefixCacheClosedError,
    OmniPrefixCacheConfigError,
    OmniPrefixCacheContractError,
    OmniPrefixCacheRowError,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheUnmatchError,
    OmniPrefixCacheWriteError,
)
from omni_prefix_fast.footprint import StageFootprint, stage_footprint
from omni_prefix_fast.gate import (
    check_prefix_cache_kv_groups,
    check_prefix_cache_kv_transfer,
    get_prefix_cache_group_view,
    stage_prefix_cache_config,
)
from omni_prefix_fast.layout import FullAttentionGroupView
from omni_prefix_fast.manager import OmniPrefixCacheManager
from omni_prefix_fast.pool import PrefixBlockPool
from omni_prefix_fast.types import HIDDEN_KEY, StageCacheOutputs, WriteSchedule

__all__ = [
    "HIDDEN_KEY",
    "FullAttentionGroupView",
    "ModelCachePolicy",
    "OmniPrefixCacheClosedError",
    "OmniPrefixCacheConfigError",
    "OmniPrefixCacheContractError",
    "OmniPrefixCacheController",
    "OmniPrefixCacheManager",
    "OmniPrefixCacheRowError",
    "OmniPrefixCacheStagingTimeoutError",
    "OmniPrefixCacheUnmatchError",
    "OmniPrefixCacheWriteError",
    "PrefixBlockPool",
    "PrefixCacheConfig",
    "StageCacheOutputs",
    "StageFootprint",
    "WriteSchedule",
    "check_prefix_cache_kv_groups",
    "check_prefix_cache_kv_transfer",
    "get_prefix_cache_group_view",
    "stage_footprint",
    "stage_prefix_cache_config",
]
