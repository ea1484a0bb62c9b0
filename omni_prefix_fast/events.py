"""What a step's scheduler output says, read once. Nothing deeper ever sees a vLLM object.

Read with `getattr`, every field optional, so that older and newer engines and test doubles all serve. A request whose
entry is unusable becomes a `problems` entry and harms no other request.

Sources: `vllm.v1.core.sched.output.SchedulerOutput`, `NewRequestData`, `CachedRequestData` (vLLM 0.32.0).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_prefix_fast.errors import OmniPrefixCacheContractError
from omni_prefix_fast.types import ReqId


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request placed in the batch with `computed` tokens already computed, `block_ids` its whole block table."""

    req_id: ReqId
    computed: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Started(Admitted):
    """A new request; for a live id a continuation, or a resume as the V2 model runner tells it."""

    prompt_tokens: int | None
    """Length of the prompt, where the engine tells."""


@dataclass(frozen=True, slots=True)
class Resumed(Admitted):
    """A preempted request that came back through the cached requests (V1 model runner)."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """One scheduler output, in the order in which it is to be applied: `finished` first."""

    finished: tuple[ReqId, ...]
    admitted: tuple[Admitted, ...]
    num_scheduled: Mapping[ReqId, int]
    """Tokens to compute, by request; only requests with at least one."""
    computed: Mapping[ReqId, int]
    """Tokens already computed when the step starts, by request, where the engine tells."""
    total: int
    problems: tuple[str, ...]
    """Why a request's entry cannot be used, one line each."""


def read_scheduler_output(scheduler_output: Any) -> StepEvents:
    """Read a scheduler output. Raises `OmniPrefixCacheContractError` where it makes no sense."""
    try:
        return _read(scheduler_output)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise OmniPrefixCacheContractError(
            f"the scheduler output (a {type(scheduler_output).__name__}) cannot be read: {error}; its fields have to "
            "be those of vLLM's SchedulerOutput, each optional"
        ) from error


def _read(scheduler_output: Any) -> StepEvents:
    scheduled: dict[ReqId, int] = dict(getattr(scheduler_output, "num_scheduled_tokens", None) or {})
    if scheduled and min(scheduled.values()) < 1:  # rare: not worth a look at each request of each step
        if negative := [r for r, n in scheduled.items() if n < 0]:
            raise OmniPrefixCacheContractError(f"num_scheduled_tokens is negative for requests {negative}")
        scheduled = {r: n for r, n in scheduled.items() if n}
    total = operator.index(sum(scheduled.values()))
    told = getattr(scheduler_output, "total_num_scheduled_tokens", None)
    if told is not None and int(told) != total:
        raise OmniPrefixCacheContractError(
            f"total_num_scheduled_tokens is {told}, but num_scheduled_tokens adds up to {total}"
        )
    problems: list[str] = []
    admitted: list[Admitted] = []
    computed: dict[ReqId, int] = {}
    for new in getattr(scheduler_output, "scheduled_new_reqs", None) or ():
        _read_new(new, admitted, computed, problems)
    _read_cached(getattr(scheduler_output, "scheduled_cached_reqs", None), admitted, computed, problems)
    return StepEvents(
        finished=tuple(getattr(scheduler_output, "finished_req_ids", None) or ()),
        admitted=tuple(admitted),
        num_scheduled=scheduled,
        computed=computed,
        total=total,
        problems=tuple(problems),
    )


def _read_new(new: Any, admitted: list[Admitted], computed: dict[ReqId, int], problems: list[str]) -> None:
    req_id: ReqId = new.req_id
    done = int(getattr(new, "num_computed_tokens", 0) or 0)
    if done < 0:
        problems.append(f"new request {req_id!r} has num_computed_tokens={done}")
        return
    computed[req_id] = done
    table = _first_group(getattr(new, "block_ids", None))
    if table is None and done:
        problems.append(f"new request {req_id!r} has {done} computed tokens but no block_ids")
        return
    prompt = getattr(new, "prompt_token_ids", None)
    admitted.append(Started(req_id, done, table or (), None if prompt is None else len(prompt)))


def _read_cached(cached: Any, admitted: list[Admitted], computed: dict[ReqId, int], problems: list[str]) -> None:
    req_ids: Sequence[ReqId] = getattr(cached, "req_ids", None) or ()
    if not req_ids:
        return
    counts = getattr(cached, "num_computed_tokens", None)
    if counts is not None:
        computed.update(zip(req_ids, counts, strict=True))
    resumed = _resumed_ids(cached, req_ids)
    if not resumed:
        return
    tables = getattr(cached, "new_block_ids", None)
    for i, req_id in enumerate(req_ids):
        if req_id not in resumed:
            continue
        table = _first_group(tables[i]) if tables is not None else None
        if table is None or counts is None:
            missing = "block ids" if table is None else "num_computed_tokens"
            problems.append(f"resumed request {req_id!r} came back without {missing}")
            continue
        admitted.append(Resumed(req_id, int(counts[i]), table))


def _resumed_ids(cached: Any, req_ids: Sequence[ReqId]) -> frozenset[ReqId]:
    told = getattr(cached, "resumed_req_ids", None)
    if told is not None:
        return frozenset(told)
    flags = getattr(cached, "resumed_from_preemption", None) or ()  # before vLLM 0.12
    return frozenset(r for r, flag in zip(req_ids, flags, strict=False) if flag)


def _first_group(block_ids: Any) -> Sequence[int] | None:
    """Block table of the only KV group. vLLM gives one list a group; a flat list is taken as that list."""
    if block_ids is None:
        return None
    if len(block_ids) == 0:
        return ()
    table: Sequence[int] = block_ids[0] if hasattr(block_ids[0], "__len__") else block_ids
    return table
