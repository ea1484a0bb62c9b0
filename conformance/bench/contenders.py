"""Who is measured: this cache in both modes, and the two others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TypeAlias

from conformance.bench import other
from conformance.bench.baseline import StraightforwardCache
from conformance.bench.feed import Batch, Cache, Feed
from omni_prefix_fast import FullAttentionGroupView, ModelCachePolicy, OmniPrefixCacheManager, PrefixCacheConfig

EAGER, ASYNC, PLAIN, OMNI, COPY = "eager", "async", "straightforward", "vllm-omni", "copy"
OURS = (EAGER, ASYNC)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the caches of one piece of work."""

    num_blocks: int
    max_requests: int
    max_blocks: int
    """Longest block table."""
    capacity: int
    """Tokens of the largest step."""
    block_size: int = 16
    depth: int = 4
    deferred: frozenset[str] = frozenset()


Contender: TypeAlias = Callable[[Sizes], Feed]


def contenders(module: ModuleType | None) -> Mapping[str, Contender]:
    """Every implementation, by name. `module`: vllm-omni's prefix cache, or None where there is none."""
    makers: dict[str, Callable[[Sizes, Batch], Cache]] = {
        EAGER: partial(_ours, True),
        ASYNC: partial(_ours, False),
        PLAIN: _straightforward,
    }
    if module is not None:
        makers[OMNI] = partial(_other, module)
    return {name: partial(_feed, make) for name, make in makers.items()}


def _feed(make: Callable[[Sizes, Batch], Cache], sizes: Sizes) -> Feed:
    batch = Batch(sizes.max_requests, sizes.max_blocks)
    return Feed(batch, make(sizes, batch))


def _ours(eager: bool, sizes: Sizes, batch: Batch) -> Cache:
    config = PrefixCacheConfig(
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        staging_depth=sizes.depth,
        staging_capacity_tokens=sizes.capacity,
    )
    cache = OmniPrefixCacheManager(config, FullAttentionGroupView(batch, sizes.block_size), eager=eager)
    cache.register_policy(ModelCachePolicy(deferred_keys=sizes.deferred))
    return cache


def _straightforward(sizes: Sizes, batch: Batch) -> Cache:
    return StraightforwardCache(sizes.num_blocks, sizes.block_size, batch, sizes.deferred)


def _other(module: ModuleType, sizes: Sizes, batch: Batch) -> Cache:
    return other.make(
        module,
        batch,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        depth=sizes.depth,
        capacity=sizes.capacity,
        deferred=sizes.deferred,
    )
