"""What a stage will cost in memory, worked out before there is a cache.

Agrees with what is allocated: `StageFootprint.allocated` equals `OmniPrefixCacheManager.footprint()` after `warm_up` of
the same keys. What depends on the load (rows on the device, outputs kept for use again) is given as its upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from omni_prefix_fast.config import PrefixCacheConfig
from omni_prefix_fast.metrics import Footprint
from omni_prefix_fast.pool import RowSpec
from omni_prefix_fast.slots import SlotTable
from omni_prefix_fast.types import Key


@dataclass(frozen=True, slots=True)
class StageFootprint:
    """Memory of one stage's cache, in bytes."""

    allocated: Footprint
    """What is there from the first request on: pools, staging pages, tables. Host memory."""
    recycled_bytes: int
    """At most this much host memory of handed-over tensors is kept for use again."""
    deferred_bytes: int
    """At most this much memory, where the engine's tensors are, holds clones of deferred rows."""
    frozen_bytes: int
    """At most this much device memory holds rows that are on their way to the host."""
    accelerator: bool
    """Whether the engine's tensors are on a device of their own."""

    @property
    def host_bytes(self) -> int:
        """Host memory at most."""
        allocated = self.allocated.host_bytes + self.allocated.table_bytes
        return allocated + self.recycled_bytes + (0 if self.accelerator else self.deferred_bytes)

    @property
    def device_bytes(self) -> int:
        """Device memory at most."""
        return self.frozen_bytes + (self.deferred_bytes if self.accelerator else 0)


def stage_footprint(
    config: PrefixCacheConfig,
    keys: Mapping[Key, tuple[torch.dtype, Sequence[int]]],
    deferred: Iterable[Key] = (),
    *,
    accelerator: bool = True,
) -> StageFootprint:
    """Work out what a cache will take.

    Args:
        config: its sizes and bounds.
        keys: dtype and feature shape of a row, by key, as `warm_up` takes them; the hidden states' is `HIDDEN_KEY`.
        deferred: the keys of these that are deferred.
        accelerator: whether the engine's tensors are on a device of their own. Without one all of it is host memory.

    Raises:
        OmniPrefixCacheContractError: a key's row is not described by a dtype and a feature shape.
    """
    specs = {key: RowSpec.declared(key, row) for key, row in keys.items()}
    page_rows = config.staging_depth * config.staging_capacity_tokens
    staging = {key: page_rows * spec.nbytes for key, spec in specs.items()}
    deferred_keys = frozenset(deferred) & specs.keys()
    return StageFootprint(
        allocated=Footprint(
            pool_bytes={key: config.num_slots * spec.nbytes for key, spec in specs.items()},
            staging_bytes=staging,
            table_bytes=_slot_bytes(specs, deferred_keys) * config.num_slots,
            device_bytes=0,
            pending_bytes=0,
        ),
        recycled_bytes=config.output_recycle_bytes,
        deferred_bytes=config.gpu_staging_bytes if deferred_keys else 0,
        frozen_bytes=sum(staging.values()) if accelerator else 0,  # a step in flight has a page
        accelerator=accelerator,
    )


def _slot_bytes(keys: Iterable[Key], deferred: frozenset[Key]) -> int:
    """Bytes of the tables a slot: those of a table of one slot."""
    table = SlotTable(1)
    for key in keys:
        table.prepare_key(key, deferred=key in deferred)
    return table.nbytes
