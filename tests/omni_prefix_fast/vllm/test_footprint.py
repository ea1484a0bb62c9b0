"""What a stage costs, from an engine's own configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_prefix_fast import HIDDEN_KEY, OmniPrefixCacheConfigError, PrefixCacheConfig, stage_footprint
from omni_prefix_fast.vllm.footprint import footprint_of_vllm_config, read_vllm_config

CODES = (torch.int64, (16,))
ROWS = {HIDDEN_KEY: (torch.bfloat16, (64,)), "codes": CODES}
EXPECTED = stage_footprint(
    PrefixCacheConfig(num_blocks=100, block_size=16, staging_capacity_tokens=512, staging_depth=3), ROWS, ["codes"]
)
SETTINGS = {"omni_prefix": {"cache": {"staging_depth": 3}, "policy": {"deferred_keys": ["codes"]}}}

LIVE = SimpleNamespace(
    cache_config=SimpleNamespace(num_gpu_blocks=100, num_gpu_blocks_override=None, block_size=16),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
    model_config=SimpleNamespace(dtype=torch.bfloat16, get_hidden_size=lambda: 64, max_model_len=4096),
    additional_config=SETTINGS,
)
ARGUMENTS: dict[str, Any] = {
    "block-size": 16,
    "num-gpu-blocks-override": 100,
    "max-num-batched-tokens": 512,
    "dtype": "bfloat16",
    "hidden_size": 64,
    "additional-config": SETTINGS,
}
SECTIONS: dict[str, Any] = {
    "cache_config": {"num_gpu_blocks": 100, "block_size": 16},
    "scheduler_config": {"max_num_batched_tokens": 512},
    "model_config": {"dtype": "torch.bfloat16", "hf_config": {"text_config": {"hidden_size": 64}}},
    "additional_config": SETTINGS,
}


@pytest.mark.parametrize(
    "vllm_config",
    [
        LIVE,
        read_vllm_config(ARGUMENTS),
        read_vllm_config(SECTIONS),
        read_vllm_config({"stages": [{"stage_id": 4, **ARGUMENTS}]}),
        read_vllm_config({**ARGUMENTS, "stages": [{"block_size": 1}, {"engine_args": {"block_size": 16}}]}, 1),
    ],
    ids=["live", "arguments", "sections", "only stage", "second stage"],
)
def test_every_form_of_the_configuration_says_the_same(vllm_config: Any) -> None:
    """Sizes, the model's rows, and the settings of the integration are taken from wherever they stand."""
    assert footprint_of_vllm_config(vllm_config, keys={"codes": CODES}) == EXPECTED


def test_what_is_given_beside_the_configuration_wins() -> None:
    """Number of blocks, rows of the hidden states, sizes of the cache."""
    stage = footprint_of_vllm_config(LIVE, num_blocks=7, keys={HIDDEN_KEY: (torch.float32, (3,))}, staging_depth=1)
    config = PrefixCacheConfig(num_blocks=7, block_size=16, staging_capacity_tokens=512, staging_depth=1)
    assert stage == stage_footprint(config, {HIDDEN_KEY: (torch.float32, (3,))})


def test_a_model_in_a_folder_tells_its_hidden_size(tmp_path: Path) -> None:
    """Its `config.json` is read."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}), encoding="utf-8")
    arguments = {**ARGUMENTS, "hidden_size": None, "model": str(tmp_path)}
    assert footprint_of_vllm_config(read_vllm_config(arguments), keys={"codes": CODES}) == EXPECTED


def test_without_hidden_states_nothing_is_asked_of_the_model() -> None:
    """The policy of the settings decides."""
    settings = {"omni_prefix": {"policy": {"needs_full_hidden_states": False}}}
    live = SimpleNamespace(**{**vars(LIVE), "model_config": None, "additional_config": settings})
    assert footprint_of_vllm_config(live, keys={"codes": CODES}).allocated.pool_bytes.keys() == {"codes"}


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ("num-gpu-blocks-override", "number of KV blocks"),
        ("block-size", "block_size"),
        ("hidden_size", "hidden_size"),
        ("dtype", "dtype"),
    ],
)
def test_what_is_missing_is_named(left_out: str, named: str) -> None:
    """Each size that the answer depends on."""
    arguments = {name: value for name, value in ARGUMENTS.items() if name != left_out}
    with pytest.raises(OmniPrefixCacheConfigError, match=named):
        footprint_of_vllm_config(read_vllm_config(arguments))


def test_a_type_that_is_decided_later_is_no_type() -> None:
    """`auto` says nothing."""
    with pytest.raises(OmniPrefixCacheConfigError, match="'auto'"):
        footprint_of_vllm_config(read_vllm_config({**ARGUMENTS, "dtype": "auto"}))


@pytest.mark.parametrize(("stage", "named"), [(None, "no stage is named"), (2, "no stage 2")])
def test_a_deployment_wants_a_stage_that_it_has(stage: int | None, named: str) -> None:
    """The error lists them."""
    with pytest.raises(OmniPrefixCacheConfigError, match=rf"{named}.*\[0, 1\]"):
        read_vllm_config({"stages": [ARGUMENTS, ARGUMENTS]}, stage)


def test_no_object_is_no_configuration() -> None:
    """A list, say."""
    wrong: Any = [ARGUMENTS]
    with pytest.raises(OmniPrefixCacheConfigError, match="list"):
        read_vllm_config(wrong)
