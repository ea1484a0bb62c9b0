"""What is handed over with prefix caching off: the forward's rows, each request's own, with their positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_prefix_fast.config import ModelCachePolicy
from omni_prefix_fast.errors import OmniPrefixCacheContractError
from omni_prefix_fast.vllm.forward_only import ForwardOnly

BATCH = ["b", "a"]


def starts(scheduled: dict[str, int], new: dict[str, int], **more: Any) -> SimpleNamespace:
    """A scheduler output in which `new` maps requests to their computed tokens."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=n, block_ids=([0],)) for r, n in new.items()],
        num_scheduled_tokens=scheduled,
        **more,
    )


def forward_only(**policy: Any) -> ForwardOnly:
    """A stage without a cache whose batch is `BATCH`."""
    return ForwardOnly(lambda: BATCH, ModelCachePolicy(**policy))


def test_each_request_gets_its_own_rows_and_positions() -> None:
    """Rows follow the batch's order, padding is cut off, positions go on where the request left off."""
    stage = forward_only()
    stage.new_step_starts(starts({"a": 2, "b": 3}, {"a": 0, "b": 0}))
    hidden = torch.arange(8.0).reshape(8, 1)
    step = stage.save_outputs(hidden, {"k": hidden * 10}, num_tokens_unpadded=5, num_tokens_padded=8)
    hidden.fill_(99)
    outs = stage.materialize(step, ["a", "b"])
    assert outs.hidden_states is not None
    assert outs.hidden_states["b"].flatten().tolist() == [0, 1, 2]
    assert outs.hidden_states["a"].flatten().tolist() == [3, 4]
    assert outs.mm_outputs["k"]["a"].flatten().tolist() == [30, 40]
    assert outs.spans == {"a": (0, 2), "b": (0, 3)}
    assert outs.mm_spans == {"k": outs.spans}
    cached = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[2, 3])
    stage.new_step_starts(starts({"a": 1, "b": 1}, {}, scheduled_cached_reqs=cached))
    step = stage.save_outputs(torch.ones(2, 1), {}, num_tokens_unpadded=2, num_tokens_padded=2)
    assert stage.materialize(step, ["b"]).spans == {"b": (3, 4)}


def test_hidden_states_are_left_out_where_the_model_says_so() -> None:
    """None, not an empty mapping: the consumer is told that there never will be any."""
    stage = forward_only(needs_full_hidden_states=False)
    stage.new_step_starts(starts({"a": 1, "b": 1}, {"a": 0, "b": 0}))
    outs = stage.materialize(stage.save_outputs(None, {}, num_tokens_unpadded=2, num_tokens_padded=2), BATCH)
    assert outs.hidden_states is None


def test_a_step_is_consumed_exactly_once() -> None:
    """Materialized or discarded, never both, never twice."""
    stage = forward_only()
    for consume in (lambda s: stage.materialize(s, BATCH), stage.discard_step):
        stage.new_step_starts(starts({"a": 1, "b": 1}, {"a": 0, "b": 0}))
        step = stage.save_outputs(torch.ones(2, 1), None, num_tokens_unpadded=2, num_tokens_padded=2)
        consume(step)
        with pytest.raises(OmniPrefixCacheContractError, match=f"step {step}.*consumed before"):
            stage.materialize(step, BATCH)
        with pytest.raises(OmniPrefixCacheContractError, match=f"step {step}.*consumed before"):
            stage.discard_step(step)


def test_counts_that_do_not_fit_are_refused() -> None:
    """Rows of a batch other than the scheduled one would go to the wrong requests."""
    stage = forward_only()
    stage.new_step_starts(starts({"a": 1, "b": 1}, {"a": 0, "b": 0}))
    with pytest.raises(OmniPrefixCacheContractError, match="2 tokens are scheduled but num_tokens_unpadded=3"):
        stage.save_outputs(torch.ones(3, 1), None, num_tokens_unpadded=3, num_tokens_padded=3)
