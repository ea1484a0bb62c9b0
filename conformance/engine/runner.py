"""The worker's side of a step: the order of the batch, each request's block table, and the slots of a step's tokens.

The batch is kept from step to step as vLLM's V1 runner keeps it: whoever is not scheduled leaves, newcomers take the
first free places, and remaining gaps are closed with the requests from the end. Rows of a step therefore come in an
order of their own, neither that of arrival nor that of the scheduler's output.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from conformance.engine.scheduler import SchedulerOutput


class RunnerBatch:
    """The view that the cache asks: ``batch_req_ids`` and ``step_slots_cpu``. Live: it changes with each step."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._places: list[str | None] = []
        self._tables: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}

    def batch_req_ids(self) -> list[str]:
        """The requests of this step, in the order of their rows."""
        return [req_id for req_id in self._places if req_id is not None]

    def num_computed(self, req_id: str) -> int:
        """How many tokens of the request were computed when this step began."""
        return self._computed[req_id]

    def block_table(self, req_id: str) -> list[int]:
        """The request's blocks, in the order of their positions."""
        return list(self._tables[req_id])

    def slots(self, req_id: str, start: int, end: int) -> list[int]:
        """The slots of positions ``start`` to ``end`` (excluded)."""
        size, table = self.block_size, self._tables[req_id]
        return [table[position // size] * size + position % size for position in range(start, end)]

    def step_slots_cpu(self, req_ids: Sequence[str], num_scheduled: Mapping[str, int]) -> torch.Tensor:
        """The slots of this step's tokens, request after request."""
        slots = [
            slot
            for req_id in req_ids
            for slot in self.slots(req_id, self._computed[req_id], self._computed[req_id] + num_scheduled[req_id])
        ]
        return torch.from_numpy(np.asarray(slots, dtype=np.int64))

    def update(self, sched: SchedulerOutput) -> None:
        """Take a step's changes: who left, whose blocks grew or were replaced, who came."""
        for req_id in sched.finished_req_ids:
            self._tables.pop(req_id, None)
            self._computed.pop(req_id, None)
        self._places = [req_id if req_id in sched.num_scheduled_tokens else None for req_id in self._places]
        newcomers = self._update_known(sched)
        for new in sched.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._computed[new.req_id] = new.num_computed_tokens
            newcomers.append(new.req_id)
        for req_id in newcomers:
            self._seat(req_id)
        self._close_gaps()

    def _update_known(self, sched: SchedulerOutput) -> list[str]:
        """Apply the cached requests' changes; return those that are back after a step without them."""
        cached = sched.scheduled_cached_reqs
        seated = set(self._places)
        back = []
        for req_id, new_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._computed[req_id] = computed
            if req_id in cached.resumed_req_ids:
                if new_ids is None:
                    raise ValueError(f"resumed request {req_id!r} came without its block table")
                self._tables[req_id] = list(new_ids[0])
            elif new_ids is not None:
                self._tables[req_id].extend(new_ids[0])
            if req_id not in seated:
                back.append(req_id)
        return back

    def _seat(self, req_id: str) -> None:
        if None in self._places:
            self._places[self._places.index(None)] = req_id
        else:
            self._places.append(req_id)

    def _close_gaps(self) -> None:
        while None in self._places:
            last = self._places.pop()
            if last is not None:
                self._places[self._places.index(None)] = last
