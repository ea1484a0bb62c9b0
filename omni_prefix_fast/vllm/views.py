"""The engine's batch as the cache needs it: which requests, in which order, on which slots.

The V1 model runner keeps its block table on the host, and `omni_prefix_fast.layout.FullAttentionGroupView` reads it
there. The V2 model runner keeps it on the device only; reading it back would stall the engine once a step. So
`HostBlockTables` follows the scheduler's own messages, which is all that the runner's table is made of, and
`ScheduledBatchView` answers from it. It serves every runner that is driven by `SchedulerOutput`.

Guarantees: no device is touched, nothing blocks; one row of work for each request whose table changed. Engine thread
only. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_prefix_fast.errors import OmniPrefixCacheContractError
from omni_prefix_fast.layout import table_slots
from omni_prefix_fast.types import ReqId


class HostBlockTables:
    """Block table of the only KV group and computed-token count of each live request, from scheduler outputs."""

    def __init__(self, rows: int = 16, blocks: int = 16) -> None:
        self._table: npt.NDArray[np.int32] = np.zeros((rows, blocks), dtype=np.int32)
        self._lengths: npt.NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._computed: npt.NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._row_of: dict[ReqId, int] = {}
        self._free = list(range(rows - 1, -1, -1))

    def __contains__(self, req_id: ReqId) -> bool:
        return req_id in self._row_of

    def __len__(self) -> int:
        return len(self._row_of)

    def observe(self, scheduler_output: Any) -> None:
        """Apply one scheduler output, in the order in which the runner does: gone, new, extended.

        Raises:
            OmniPrefixCacheContractError: blocks for a request that was never announced.
        """
        for req_id in getattr(scheduler_output, "finished_req_ids", None) or ():
            self._drop(req_id)
        for req_id in getattr(scheduler_output, "preempted_req_ids", None) or ():
            self._drop(req_id)
        for new in getattr(scheduler_output, "scheduled_new_reqs", None) or ():
            self._drop(new.req_id)
            row = self._take(new.req_id)
            self._append(row, new.block_ids)
            self._computed[row] = new.num_computed_tokens
        self._observe_cached(getattr(scheduler_output, "scheduled_cached_reqs", None))

    def _observe_cached(self, cached: Any) -> None:
        if cached is None or not cached.req_ids:
            return
        resumed = getattr(cached, "resumed_req_ids", None) or ()
        for i, req_id in enumerate(cached.req_ids):
            if req_id in resumed:
                self._drop(req_id)
                row = self._take(req_id)
            elif (known := self._row_of.get(req_id)) is not None:
                row = known
            else:
                raise OmniPrefixCacheContractError(
                    f"the scheduler extends request {req_id!r}, whose block table was never announced"
                )
            self._computed[row] = cached.num_computed_tokens[i]
            if cached.new_block_ids[i] is not None:
                self._append(row, cached.new_block_ids[i])

    def blocks(self, req_id: ReqId) -> npt.NDArray[np.int32]:
        """Block ids of a live request, int32 `(blocks,)`; a view, valid until the next `observe`."""
        row = self._row(req_id)
        return self._table[row, : self._lengths[row]]

    def computed(self, req_id: ReqId) -> int:
        """Tokens already computed when the current step started."""
        return int(self._computed[self._row(req_id)])

    def slots(self, req_ids: Sequence[ReqId], counts: Sequence[int], block_size: int) -> torch.Tensor:
        """Slots of the next `counts[i]` tokens of each request, int64 `(sum(counts),)` on the host."""
        rows = np.fromiter((self._row(r) for r in req_ids), dtype=np.int64, count=len(req_ids))
        needed = -(-(self._computed[rows] + np.asarray(counts, dtype=np.int64)) // block_size)
        if (short := needed > self._lengths[rows]).any():
            i = int(np.flatnonzero(short)[0])
            raise OmniPrefixCacheContractError(
                f"request {req_ids[i]!r} computes {counts[i]} tokens from {self._computed[rows[i]]} on, which takes "
                f"{needed[i]} blocks of {block_size}, but its block table has {self._lengths[rows[i]]}"
            )
        return table_slots(self._table, rows, self._computed[rows], counts, block_size)

    def _row(self, req_id: ReqId) -> int:
        row = self._row_of.get(req_id)
        if row is None:
            raise OmniPrefixCacheContractError(f"request {req_id!r} has no block table: it is not running")
        return row

    def _take(self, req_id: ReqId) -> int:
        if not self._free:
            rows = self._table.shape[0]
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
            self._computed = np.concatenate([self._computed, np.zeros_like(self._computed)])
            self._free = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free.pop()
        self._row_of[req_id] = row
        self._lengths[row] = 0
        return row

    def _drop(self, req_id: ReqId) -> None:
        if (row := self._row_of.pop(req_id, None)) is not None:
            self._free.append(row)

    def _append(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        blocks = block_ids[0]
        start = int(self._lengths[row])
        end = start + len(blocks)
        if (width := self._table.shape[1]) < end:
            more = max(end - width, width)
            self._table = np.pad(self._table, ((0, 0), (0, more)))
        self._table[row, start:end] = blocks
        self._lengths[row] = end


class ScheduledBatchView:
    """`BatchView` of a runner whose tables are on the device: slots from `HostBlockTables`, order from its batch."""

    def __init__(self, tables: HostBlockTables, block_size: int) -> None:
        self._tables = tables
        self._block_size = block_size
        self._req_ids: list[ReqId] = []

    def show(self, req_ids: Sequence[ReqId]) -> None:
        """Set the batch of the step about to be saved, in the order of its rows."""
        self._req_ids = list(req_ids)

    def batch_req_ids(self) -> list[ReqId]:
        """See `BatchView`."""
        return self._req_ids

    def step_slots_cpu(self, req_ids: Sequence[ReqId], num_scheduled: Mapping[ReqId, int]) -> torch.Tensor:
        """See `BatchView`."""
        return self._tables.slots(req_ids, [num_scheduled[r] for r in req_ids], self._block_size)
