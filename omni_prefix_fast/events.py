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

_LARGEST = 2**62


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
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
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
    total = _whole(sum(scheduled.values()), "sum of num_scheduled_tokens")
    told = getattr(scheduler_output, "total_num_scheduled_tokens", None)
    if told is not None and _whole(told, "total_num_scheduled_tokens") != total:
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
        finished=_finished_ids(getattr(scheduler_output, "finished_req_ids", None)),
        admitted=tuple(admitted),
        num_scheduled=scheduled,
        computed=computed,
        total=total,
        problems=tuple(problems),
    )


def _read_new(new: Any, admitted: list[Admitted], computed: dict[ReqId, int], problems: list[str]) -> None:
    req_id: ReqId = new.req_id
    told = getattr(new, "num_computed_tokens", None)
    try:
        done = 0 if told is None else _whole(told, "num_computed_tokens")
        table = _first_group(getattr(new, "block_ids", None))
    except TypeError as error:
        problems.append(f"new request {req_id!r}: {error}")
        return
    if done < 0:
        problems.append(f"new request {req_id!r} has num_computed_tokens={done}")
        return
    computed[req_id] = done
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
        total = sum(counts)  # one look at all of them: a fraction anywhere makes the sum one
        if type(total) is not int or total > _LARGEST:
            counts = [_whole(n, "num_computed_tokens") for n in counts]
        computed.update(zip(req_ids, counts, strict=True))
    resumed = _resumed_ids(cached, req_ids)
    if not resumed:
        return
    tables = getattr(cached, "new_block_ids", None)
    for i, req_id in enumerate(req_ids):
        if req_id not in resumed:
            continue
        try:
            table = _first_group(tables[i]) if tables is not None else None
        except TypeError as error:
            problems.append(f"resumed request {req_id!r}: {error}")
            continue
        if table is None or counts is None:
            missing = "block ids" if table is None else "num_computed_tokens"
            problems.append(f"resumed request {req_id!r} came back without {missing}")
            continue
        admitted.append(Resumed(req_id, computed[req_id], table))


def _resumed_ids(cached: Any, req_ids: Sequence[ReqId]) -> frozenset[ReqId]:
    told = getattr(cached, "resumed_req_ids", None)
    if told is not None:
        return frozenset(told)
    flags = getattr(cached, "resumed_from_preemption", None) or ()  # before vLLM 0.12
    return frozenset(r for r, flag in zip(req_ids, flags, strict=False) if flag)


def _whole(value: Any, name: str) -> int:
    """A count, of any type of whole number. Raises `TypeError`, naming it, for anything else."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, not a whole number") from None
    if abs(count) > _LARGEST:
        raise TypeError(f"{name} is {count}, which is no count of tokens")
    return count


def _finished_ids(told: Any) -> tuple[ReqId, ...]:
    if isinstance(told, str):
        raise TypeError(f"finished_req_ids is {told!r}, not a collection of ids")
    finished: tuple[ReqId, ...] = () if told is None else tuple(told)
    frozenset(finished)  # raises where one cannot be an id
    return finished


def _first_group(block_ids: Any) -> Sequence[int] | None:
    """Block table of the only KV group. vLLM gives one list a group; a flat list is taken as that list.

    Arrays and host tensors serve as lists. Raises `TypeError` for anything else; what the entries are is checked where
    they are used, see `RequestTable.owed`.
    """
    if block_ids is None:
        return None
    groups = _as_list(block_ids)
    if len(groups) == 0:
        return ()
    first = groups[0]
    is_group = hasattr(first, "__len__") and not isinstance(first, str) and getattr(first, "ndim", 1) > 0
    return _as_list(first) if is_group else groups


def _as_list(table: Any) -> Sequence[Any]:
    if hasattr(table, "ndim") and hasattr(table, "tolist"):
        table = table.tolist()
    if isinstance(table, (str, bytes, Mapping)) or not hasattr(table, "__getitem__"):
        raise TypeError(f"block_ids hold a {type(table).__name__}; they have to be a list of blocks for each KV group")
    listed: Sequence[Any] = table
    return listed
