"""The mm outputs of the test model: hashes of token prefixes, read from the model runner's own tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conformance.vllm.truth import (
    CODES_KEY,
    HASH_KEY,
    LIST_KEY,
    PLANE_KEY,
    REFERENCE_KEY,
    SOMETIMES_KEY,
    asks_for_sometimes,
    true_reference,
    true_rows,
)
from omni_prefix_fast.vllm.runner import StepBatch

EMITTED_SOMETIMES: list[tuple[str, int, int]] = []
"""Positions `(req_id, start, end)` that were computed in steps which emitted `SOMETIMES_KEY`. A run clears it."""


_TOKENS: dict[str, npt.NDArray[np.int64]] = {}
"""Tokens of each request as far as forwards computed them, from their inputs; -1 where none did (a hit)."""


def forget_tokens() -> None:
    """Begin anew: a run on another engine starts. Ids of engines do not repeat, so this only saves memory."""
    _TOKENS.clear()


def _tokens(batch: StepBatch, i: int) -> npt.NDArray[np.int64]:
    """Tokens of the batch's i-th request up to the last one that this forward computed.

    What forwards computed is taken from their inputs: with asynchronous scheduling the runner's own list of a
    request's tokens has placeholders for sampled ones. What was hit is taken from that list, which then has it.
    """
    runner: Any = batch.runner
    req_id, start, end = batch.req_ids[i], batch.starts[i], batch.starts[i] + batch.counts[i]
    if hasattr(runner, "input_batch"):
        listed = runner.input_batch.token_ids_cpu[runner.input_batch.req_id_to_index[req_id]]
        inputs = runner.input_ids.gpu
    else:
        states = runner.req_states
        listed = states.all_token_ids.gpu[states.req_id_to_index[req_id]].cpu().numpy()
        inputs = runner.execute_model_state.input_batch.input_ids
    known = _TOKENS.get(req_id, np.empty(0, dtype=np.int64))
    tokens = np.full(max(end, len(known)), -1, dtype=np.int64)
    tokens[: len(known)] = known
    offset = sum(batch.counts[:i])
    tokens[start:end] = inputs[offset : offset + batch.counts[i]].cpu().numpy()
    missing = np.flatnonzero(tokens[:start] < 0)
    tokens[missing] = listed[missing]
    _TOKENS[req_id] = tokens
    return tokens[:end]


def prefix_hashes(hidden_states: torch.Tensor, batch: StepBatch) -> dict[str, Any]:  # noqa: ARG001 - the hook's shape
    """Every kind of mm output at once: per token (three shapes, one only sometimes), per request, one each."""
    tokens = [_tokens(batch, i) for i in range(len(batch.req_ids))]

    def stack(key: str) -> torch.Tensor:
        rows = [true_rows(key, t, start) for t, start in zip(tokens, batch.starts, strict=True)]
        return torch.from_numpy(np.concatenate(rows))

    outputs: dict[str, Any] = {
        HASH_KEY: stack(HASH_KEY),
        PLANE_KEY: stack(PLANE_KEY),
        CODES_KEY: stack(CODES_KEY),
        REFERENCE_KEY: torch.from_numpy(true_reference()),
        LIST_KEY: [torch.tensor([int(t[0])]) for t in tokens],
    }
    if any(asks_for_sometimes(int(t[0])) for t in tokens):
        outputs[SOMETIMES_KEY] = stack(SOMETIMES_KEY)
        EMITTED_SOMETIMES.extend(
            (r, start, start + count) for r, start, count in zip(batch.req_ids, batch.starts, batch.counts, strict=True)
        )
    return outputs
