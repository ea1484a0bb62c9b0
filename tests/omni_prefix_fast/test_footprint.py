"""`stage_footprint`: what it works out is what is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_prefix_fast import (
    HIDDEN_KEY,
    ModelCachePolicy,
    OmniPrefixCacheContractError,
    OmniPrefixCacheManager,
    PrefixCacheConfig,
    StageFootprint,
    stage_footprint,
)
from omni_prefix_fast.metrics import Footprint

VIEW: Any = SimpleNamespace()
KEYS = {
    HIDDEN_KEY: (torch.bfloat16, (24,)),
    "feature": (torch.float32, (3, 5)),
    "flag": (torch.bool, ()),
    "codes": (torch.int64, (16,)),
    "late": (torch.float8_e4m3fn, (7,)),
}
DEFERRED = frozenset({"codes", "late"})


def warmed_up(config: PrefixCacheConfig) -> Footprint:
    """What a cache has allocated once every key is open."""
    cache = OmniPrefixCacheManager(config, VIEW, eager=True)
    cache.register_policy(ModelCachePolicy(deferred_keys=DEFERRED, token_keys=frozenset({"feature", "flag"})))
    cache.warm_up(KEYS)
    footprint = cache.footprint()
    cache.shutdown()
    return footprint


@pytest.mark.parametrize(
    "config",
    [
        PrefixCacheConfig(num_blocks=1, block_size=1),
        PrefixCacheConfig(num_blocks=37, block_size=16, staging_depth=3, staging_capacity_tokens=100),
        PrefixCacheConfig(num_blocks=1000, block_size=4, staging_depth=1, staging_capacity_tokens=1),
    ],
    ids=["smallest", "odd", "many blocks"],
)
def test_it_equals_what_warm_up_allocates(config: PrefixCacheConfig) -> None:
    """Pools, staging pages and tables, to the byte, for every kind of key."""
    assert stage_footprint(config, KEYS, DEFERRED).allocated == warmed_up(config)


def test_the_bounds_are_those_of_the_configuration() -> None:
    """Deferred rows up to the budget, outputs up to what is recycled, one frozen step a page."""
    config = PrefixCacheConfig(
        num_blocks=2, block_size=4, staging_capacity_tokens=8, gpu_staging_bytes=1000, output_recycle_bytes=500
    )
    stage = stage_footprint(config, KEYS, DEFERRED)
    assert (stage.deferred_bytes, stage.recycled_bytes) == (1000, 500)
    assert stage.frozen_bytes == sum(stage.allocated.staging_bytes.values())
    assert stage.device_bytes == 1000 + stage.frozen_bytes
    assert stage.host_bytes == stage.allocated.host_bytes + stage.allocated.table_bytes + 500


def test_without_deferred_keys_no_budget_is_counted() -> None:
    """A key that is not among the keys is not deferred either."""
    config = PrefixCacheConfig(num_blocks=2, block_size=4)
    stage = stage_footprint(config, {HIDDEN_KEY: (torch.float32, (2,))}, ["codes"])
    assert stage.deferred_bytes == 0


def test_without_an_accelerator_all_of_it_is_host_memory() -> None:
    """Clones of deferred rows stand beside the engine's tensors, wherever these are."""
    config = PrefixCacheConfig(num_blocks=2, block_size=4, gpu_staging_bytes=1000)
    with_one = stage_footprint(config, KEYS, DEFERRED)
    without = stage_footprint(config, KEYS, DEFERRED, accelerator=False)
    assert without.device_bytes == 0
    assert without.host_bytes == with_one.host_bytes + 1000
    assert isinstance(without, StageFootprint)


@pytest.mark.parametrize("row", [None, torch.float32, (torch.float32,), ("float32", (2,)), (torch.float32, (-1,))])
def test_a_row_that_is_none_is_refused_by_name(row: Any) -> None:
    """As `warm_up` refuses it."""
    with pytest.raises(OmniPrefixCacheContractError, match="'k'"):
        stage_footprint(PrefixCacheConfig(num_blocks=2, block_size=4), {"k": row})
