"""`conformance.onoff`: the comparison passes for the cache, and fails for each kind of wrong answer."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from conformance.onoff import Cache, Round, RoundResult, Tally, draw_round, run_round
from conformance.onoff.run import make_cache
from omni_prefix_fast import StageCacheOutputs

SEED = 4
REQUESTS = 60


def _round(seed: int = SEED) -> Round:
    return draw_round(seed, REQUESTS)


class _Faulty:
    """The cache, with one call's answer or argument spoilt."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def register_policy(self, policy: Any) -> None:
        self.cache.register_policy(policy)

    def new_step_starts(self, scheduler_output: Any) -> None:
        self.cache.new_step_starts(scheduler_output)

    def save_outputs(self, hidden: Any, mm_outputs: Any, *, num_tokens_unpadded: int, num_tokens_padded: int) -> int:
        return self.cache.save_outputs(
            hidden, mm_outputs, num_tokens_unpadded=num_tokens_unpadded, num_tokens_padded=num_tokens_padded
        )

    def materialize(self, step_id: int, req_ids: list[str]) -> StageCacheOutputs:
        return self.spoil(self.cache.materialize(step_id, req_ids))

    def discard_step(self, step_id: int) -> None:
        self.cache.discard_step(step_id)

    def shutdown(self) -> None:
        self.cache.shutdown()

    def spoil(self, outs: StageCacheOutputs) -> StageCacheOutputs:
        return outs


class _OneBit(_Faulty):
    """Flips the lowest bit of the first code that each request is handed."""

    def spoil(self, outs: StageCacheOutputs) -> StageCacheOutputs:
        for rows in outs.mm_outputs["codes"].values():
            rows[0, 0] ^= 1
        return outs


class _Swapped(_Faulty):
    """Hands the rows of two requests to each other where they have equally many."""

    def spoil(self, outs: StageCacheOutputs) -> StageCacheOutputs:
        codes = dict(outs.mm_outputs["codes"])
        names = list(codes)
        for one, other in pairwise(names):
            if codes[one].shape == codes[other].shape:
                codes[one], codes[other] = codes[other], codes[one]
        return replace(outs, mm_outputs={**outs.mm_outputs, "codes": codes})


class _ZeroPrefix(_Faulty):
    """Reads zeros where rows were owed: the deferred key of the first position of whatever spans more than a step."""

    def spoil(self, outs: StageCacheOutputs) -> StageCacheOutputs:
        for rows in outs.mm_outputs["features"].values():
            if len(rows) > 4:
                rows[0] = 0
        return outs


class _ForwardOnly(_Faulty):
    """Does what a stage without this cache does: only the rows of this step, and a span to match."""

    def spoil(self, outs: StageCacheOutputs) -> StageCacheOutputs:
        return replace(outs, spans={req_id: (end - 1, end) for req_id, (_, end) in outs.spans.items()})


class _NoVoice(_Faulty):
    """Leaves out the key that only some tokens emit."""

    def spoil(self, outs: StageCacheOutputs) -> StageCacheOutputs:
        keep = {key: payload for key, payload in outs.mm_outputs.items() if key != "voice"}
        return replace(outs, mm_outputs=keep, mm_spans={k: v for k, v in outs.mm_spans.items() if k != "voice"})


class _OthersTags(_Faulty):
    """Gives every request the first request's entry of a list."""

    def spoil(self, outs: StageCacheOutputs) -> StageCacheOutputs:
        tags = outs.mm_outputs.get("tags", {})
        first = next(iter(tags.values()), None)
        return replace(outs, mm_outputs={**outs.mm_outputs, "tags": dict.fromkeys(tags, first)})


class _Recycled(_Faulty):
    """Writes to what it handed over a hundred steps ago."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self.handed_over: deque[torch.Tensor] = deque()

    def spoil(self, outs: StageCacheOutputs) -> StageCacheOutputs:
        self.handed_over.extend(outs.mm_outputs["codes"].values())
        while len(self.handed_over) > 100:
            self.handed_over.popleft().zero_()
        return outs


class _Rounded(_Faulty):
    """Hands hidden rows over in another dtype, whose values compare equal."""

    def spoil(self, outs: StageCacheOutputs) -> StageCacheOutputs:
        assert outs.hidden_states is not None
        return replace(outs, hidden_states={r: rows.to(torch.float64) for r, rows in outs.hidden_states.items()})


def _run(setup: Round, fault: Callable[[Cache], Cache] | None = None) -> RoundResult:
    return run_round(setup, cache_factory=lambda s, view: fault(make_cache(s, view)) if fault else make_cache(s, view))


def test_the_cache_hands_over_what_a_run_without_it_does() -> None:
    """Ten rounds of different settings: no difference, nothing missing, and every event that matters occurred."""
    total = Tally()
    for seed in range(10):
        result = _run(_round(seed))
        assert (result.tally.differences, result.tally.missing, result.notes) == (0, 0, []), f"round {seed}"
        total.add(result.tally)
    counts = {name: getattr(total, name) for name in Tally.__slots__ if name not in {"missing", "differences"}}
    assert all(counts.values()), counts


@pytest.mark.parametrize(
    "fault", [_OneBit, _Swapped, _ZeroPrefix, _OthersTags, _Rounded, _Recycled], ids=lambda fault: fault.__name__
)
def test_wrong_rows_are_seen(fault: Callable[[Cache], Cache]) -> None:
    """One bit, another request's row, zeros, another dtype, a change afterwards: each is a difference, with a note."""
    setup = _round()
    setup = replace(setup, policy=setup.policy.model_copy(update={"needs_full_hidden_states": True}))
    result = _run(setup, fault)
    assert result.tally.differences > 0
    assert result.notes


@pytest.mark.parametrize("fault", [_ForwardOnly, _NoVoice], ids=lambda fault: fault.__name__)
def test_missing_rows_are_seen(fault: Callable[[Cache], Cache]) -> None:
    """Positions that nobody hands over are counted, and the notes say which."""
    result = _run(_round(), fault)
    assert result.tally.missing > 0
    assert result.notes


def test_a_round_is_decided_by_its_seed() -> None:
    """The same seed gives the same counts, threads included."""
    assert _run(_round(11)).tally == _run(_round(11)).tally


def test_progress_counts_every_request_once() -> None:
    """Finished or aborted, each request is reported."""
    ended: list[int] = []
    run_round(_round(7), on_progress=ended.append)
    assert sum(ended) == REQUESTS
