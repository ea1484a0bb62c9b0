"""The gate: every row of the table of stages, and what each refusal says."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from omni_prefix_fast.errors import OmniPrefixCacheConfigError, OmniPrefixCacheUnmatchError
from omni_prefix_fast.gate import (
    CHECKS,
    check_prefix_cache_kernel_block_size,
    check_prefix_cache_kv_groups,
    check_prefix_cache_kv_transfer,
    stage_prefix_cache_config,
)


class AttentionSpec:
    """Stands for vLLM's spec of the same name: recognised, like the others here, by class name."""

    def __init__(self, block_size: int = 16, **attributes: Any) -> None:
        self.block_size = block_size
        for name, value in attributes.items():
            setattr(self, name, value)


class FullAttentionSpec(AttentionSpec): ...


class MLAAttentionSpec(FullAttentionSpec): ...


class SlidingWindowSpec(AttentionSpec): ...


class ChunkedLocalAttentionSpec(AttentionSpec): ...


class MambaSpec(AttentionSpec): ...


class UniformTypeKVCacheSpecs(AttentionSpec): ...


def kv_cache(*specs: Any, num_blocks: int = 8, **attributes: Any) -> SimpleNamespace:
    """An engine's KV cache configuration with one group for each spec."""
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"]) for spec in specs]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups, **attributes)


def stage(**changes: Any) -> dict[str, Any]:
    """The keyword arguments of a stage that the cache is built for, with some changed."""
    good: dict[str, Any] = {
        "kv_cache_config": kv_cache(FullAttentionSpec(16)),
        "cache_config": SimpleNamespace(enable_prefix_caching=True, block_size=16, prefix_match_unit=None),
        "kv_transfer_config": None,
        "scheduler_config": SimpleNamespace(policy="fcfs", max_num_batched_tokens=2048),
        "model_config": SimpleNamespace(max_model_len=4096),
        "is_pooling_model": False,
    }
    return good | changes


def test_the_stage_the_cache_is_built_for_gets_its_sizes_from_the_engine() -> None:
    """One full-attention group: blocks, block size and the largest step come from the engine's own objects."""
    config = stage_prefix_cache_config(**stage())
    assert config is not None
    assert (config.num_blocks, config.block_size, config.staging_capacity_tokens) == (8, 16, 2048)


def test_e38_staging_capacity_is_the_batch_limit_and_falls_back_to_the_model_length() -> None:
    """Batch limit 8192 against model length 32768 gives 8192; without a batch limit it is the model length."""
    model = SimpleNamespace(max_model_len=32768)
    limited = stage_prefix_cache_config(
        **stage(model_config=model, scheduler_config=SimpleNamespace(policy="fcfs", max_num_batched_tokens=8192))
    )
    unlimited = stage_prefix_cache_config(
        **stage(model_config=model, scheduler_config=SimpleNamespace(policy="fcfs", max_num_batched_tokens=None))
    )
    assert limited is not None
    assert unlimited is not None
    assert (limited.staging_capacity_tokens, unlimited.staging_capacity_tokens) == (8192, 32768)


def test_overrides_reach_the_configuration() -> None:
    """Any field of the cache's configuration can be set beside what the engine says."""
    config = stage_prefix_cache_config(**stage(), staging_depth=7)
    assert config is not None
    assert config.staging_depth == 7


def test_engine_objects_without_optional_attributes_are_fine() -> None:
    """Older engines lack match units, hash block sizes and parallel sizes; their absence refuses nothing."""
    assert stage_prefix_cache_config(
        **stage(
            cache_config=SimpleNamespace(enable_prefix_caching=True, block_size=16),
            scheduler_config=SimpleNamespace(),
            parallel_config=SimpleNamespace(decode_context_parallel_size=None),
        )
    )


class Policy(Enum):
    """A policy as an enumeration tells it."""

    FIRST = "fcfs"
    PRIORITY = "priority"


OFF = SimpleNamespace(enable_prefix_caching=False, block_size=16, prefix_match_unit=None)
BAD_GROUPS = kv_cache(FullAttentionSpec(16), SlidingWindowSpec(16, sliding_window=8))


@pytest.mark.parametrize(
    "changes",
    (
        {"is_pooling_model": True},
        {"is_pooling_model": True, "kv_transfer_config": SimpleNamespace(kv_role="kv_consumer")},
        {"cache_config": OFF},
        {"cache_config": OFF, "kv_transfer_config": SimpleNamespace(kv_role="kv_both")},
        {"cache_config": OFF, "kv_cache_config": BAD_GROUPS, "speculative_config": object()},
        {"cache_config": SimpleNamespace()},
    ),
)
def test_no_cache_and_no_refusal_where_there_is_nothing_to_cache(changes: dict[str, Any]) -> None:
    """A pooling stage, or one with prefix caching off, is ignored whatever else it has set (E41, scenario 3)."""
    assert stage_prefix_cache_config(**stage(**changes)) is None


ACCEPTED: dict[str, dict[str, Any]] = {
    "producer only": {"kv_transfer_config": SimpleNamespace(kv_role="kv_producer")},
    "producer in a dictionary": {"kv_transfer_config": {"kv_role": "kv_producer"}},
    "producer in capitals": {"kv_transfer_config": SimpleNamespace(kv_role="KV_PRODUCER")},
    "policy as an enumeration": {"scheduler_config": SimpleNamespace(policy=Policy.FIRST)},
    "everything in dictionaries": {
        "cache_config": {"enable_prefix_caching": True, "block_size": 16, "prefix_match_unit": 16},
        "scheduler_config": {"policy": "fcfs", "max_num_batched_tokens": 8},
        "parallel_config": {"decode_context_parallel_size": 1},
    },
    "a transfer without a role": {"kv_transfer_config": SimpleNamespace(kv_role=None)},
    "MLA keeps every token": {"kv_cache_config": kv_cache(MLAAttentionSpec(16))},
    "window attributes unset": {
        "kv_cache_config": kv_cache(FullAttentionSpec(16, sliding_window=None, attention_chunk_size=None))
    },
    "one group of several layers": {
        "kv_cache_config": kv_cache(
            UniformTypeKVCacheSpecs(16, kv_cache_specs={"a": FullAttentionSpec(16), "b": MLAAttentionSpec(16)})
        )
    },
    "match unit equal to the block": {
        "cache_config": SimpleNamespace(enable_prefix_caching=True, block_size=16, prefix_match_unit=16)
    },
    "hash block equal to the block": {
        "kv_cache_config": kv_cache(FullAttentionSpec(16), hash_block_size=16, cache_hit_alignment_tokens=16)
    },
    "kernel blocks equal to the block": {"kernel_block_sizes": [16]},
    "context parallel of one": {
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    },
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(changes: dict[str, Any]) -> None:
    """Stages that look unusual but hand over right rows get a cache."""
    assert stage_prefix_cache_config(**stage(**changes)) is not None


UNIT_8 = SimpleNamespace(enable_prefix_caching=True, block_size=16, prefix_match_unit=8)
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "e41 consumer": (
        "kv_transfer",
        {"kv_transfer_config": SimpleNamespace(kv_role="kv_consumer")},
        ("'kv_consumer'", "kv_transfer_config.kv_role"),
    ),
    "e41 both": (
        "kv_transfer",
        {"kv_transfer_config": SimpleNamespace(kv_role="kv_both")},
        ("'kv_both'", "kv_transfer_config.kv_role"),
    ),
    "both in a dictionary": ("kv_transfer", {"kv_transfer_config": {"kv_role": "kv_both"}}, ("'kv_both'",)),
    "both in capitals": ("kv_transfer", {"kv_transfer_config": SimpleNamespace(kv_role=" KV_BOTH ")}, ("'kv_both'",)),
    "unknown role": ("kv_transfer", {"kv_transfer_config": SimpleNamespace(kv_role="kv_other")}, ("'kv_other'",)),
    "speculation": ("speculative_decoding", {"speculative_config": object()}, ("speculative_config",)),
    "priority": (
        "scheduling_policy",
        {"scheduler_config": SimpleNamespace(policy="priority", max_num_batched_tokens=8)},
        ("scheduling_policy", "'fcfs'"),
    ),
    "priority as an enumeration": (
        "scheduling_policy",
        {"scheduler_config": SimpleNamespace(policy=Policy.PRIORITY)},
        ("'priority'",),
    ),
    "priority in capitals": ("scheduling_policy", {"scheduler_config": {"policy": "PRIORITY"}}, ("'priority'",)),
    "unknown policy": ("scheduling_policy", {"scheduler_config": {"policy": "lottery"}}, ("'lottery'",)),
    "decode context parallel in a dictionary": (
        "decode_context_parallel",
        {"parallel_config": {"decode_context_parallel_size": 2}},
        ("decode_context_parallel_size is 2",),
    ),
    "e10 decode context parallel": (
        "decode_context_parallel",
        {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)},
        ("decode_context_parallel_size is 2", "decode_context_parallel_size to 1"),
    ),
    "prefill context parallel": (
        "prefill_context_parallel",
        {"parallel_config": SimpleNamespace(prefill_context_parallel_size=4)},
        ("prefill_context_parallel_size is 4",),
    ),
    "hybrid": ("kv_groups", {"kv_cache_config": BAD_GROUPS}, ("2 KV cache groups", "full attention")),
    "no group": ("kv_groups", {"kv_cache_config": kv_cache()}, ("0 KV cache groups",)),
    "sliding window": (
        "full_attention",
        {"kv_cache_config": kv_cache(SlidingWindowSpec(16, sliding_window=8))},
        ("SlidingWindowSpec", "disable_sliding_window"),
    ),
    "chunked": (
        "full_attention",
        {"kv_cache_config": kv_cache(ChunkedLocalAttentionSpec(16, attention_chunk_size=8))},
        ("ChunkedLocalAttentionSpec",),
    ),
    "state space": ("full_attention", {"kv_cache_config": kv_cache(MambaSpec(16))}, ("MambaSpec",)),
    "window recorded on a full spec": (
        "full_attention",
        {"kv_cache_config": kv_cache(FullAttentionSpec(16, sliding_window=4096))},
        ("sliding_window=4096",),
    ),
    "chunks recorded on a full spec": (
        "full_attention",
        {"kv_cache_config": kv_cache(FullAttentionSpec(16, attention_chunk_size=512))},
        ("attention_chunk_size=512",),
    ),
    "window over generated tokens": (
        "full_attention",
        {"kv_cache_config": kv_cache(FullAttentionSpec(16, rswa_window=64))},
        ("rswa_window=64",),
    ),
    "one bad layer in a group": (
        "full_attention",
        {
            "kv_cache_config": kv_cache(
                UniformTypeKVCacheSpecs(16, kv_cache_specs={"a": FullAttentionSpec(16), "b": SlidingWindowSpec(16)})
            )
        },
        ("SlidingWindowSpec",),
    ),
    "group of no layers": (
        "full_attention",
        {"kv_cache_config": kv_cache(UniformTypeKVCacheSpecs(16, kv_cache_specs={}))},
        ("names no layer",),
    ),
    "group without a spec": ("full_attention", {"kv_cache_config": kv_cache(None)}, ("NoneType",)),
    "layers of other blocks": (
        "layer_block_size",
        {
            "kv_cache_config": kv_cache(
                UniformTypeKVCacheSpecs(16, kv_cache_specs={"a": FullAttentionSpec(16), "b": FullAttentionSpec(32)})
            )
        },
        ("have 32 tokens", "group have 16"),
    ),
    "e06 e43 match unit": ("prefix_match_unit", {"cache_config": UNIT_8}, ("every 8 tokens", "prefix_match_unit")),
    "hash block": (
        "prefix_match_unit",
        {"kv_cache_config": kv_cache(FullAttentionSpec(16), hash_block_size=4)},
        ("every 4 tokens", "block has 16"),
    ),
    "hit alignment": (
        "prefix_match_unit",
        {"kv_cache_config": kv_cache(FullAttentionSpec(16), cache_hit_alignment_tokens=2)},
        ("every 2 tokens",),
    ),
    "kernel block": ("kernel_block_size", {"kernel_block_sizes": [8]}, ("blocks of 8 tokens", "block_size")),
}


@pytest.mark.parametrize(("check", "changes", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(check: str, changes: dict[str, Any], said: tuple[str, ...]) -> None:
    """Every refused stage raises one error class, which says what is wrong and names the setting to change."""
    with pytest.raises(OmniPrefixCacheConfigError) as caught:
        stage_prefix_cache_config(**stage(**changes))
    message = str(caught.value)
    assert isinstance(caught.value, OmniPrefixCacheUnmatchError)
    assert next(row for row in CHECKS if row.name == check).change in message
    assert "enable_prefix_caching" in message
    for words in said:
        assert words in message


def test_every_check_of_the_table_is_exercised_here() -> None:
    """A check added to the table without a test of its refusal fails here."""
    assert {check for check, _, _ in REFUSED.values()} == {row.name for row in CHECKS}


def test_single_checks_can_be_asked_alone() -> None:
    """The two checks that the seed names, and the one of the first step, answer without a whole configuration."""
    check_prefix_cache_kv_groups(kv_cache(FullAttentionSpec(16)))
    check_prefix_cache_kv_transfer(None)
    check_prefix_cache_kv_transfer(SimpleNamespace(kv_role="kv_producer"))
    check_prefix_cache_kernel_block_size(16, [16])
    check_prefix_cache_kernel_block_size(16, [])
    with pytest.raises(OmniPrefixCacheConfigError, match="2 KV cache groups"):
        check_prefix_cache_kv_groups(BAD_GROUPS)
    with pytest.raises(OmniPrefixCacheConfigError, match="every 8 tokens"):
        check_prefix_cache_kv_groups(kv_cache(FullAttentionSpec(16)), UNIT_8)
    with pytest.raises(OmniPrefixCacheConfigError, match="kv_consumer"):
        check_prefix_cache_kv_transfer(SimpleNamespace(kv_role="kv_consumer"))
    with pytest.raises(OmniPrefixCacheConfigError, match="blocks of 64 tokens"):
        check_prefix_cache_kernel_block_size(256, [64])


def test_an_engine_without_a_block_size_is_refused() -> None:
    """A group whose spec and configuration both lack a block size cannot be mirrored."""
    with pytest.raises(OmniPrefixCacheConfigError, match="no block size"):
        stage_prefix_cache_config(
            **stage(
                kv_cache_config=kv_cache(FullAttentionSpec(0)),
                cache_config=SimpleNamespace(enable_prefix_caching=True),
            )
        )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"cache_config": {"enable_prefix_caching": True, "prefix_match_unit": "auto"}}, "prefix_match_unit"),
        ({"cache_config": {"enable_prefix_caching": True, "prefix_match_unit": 16.0}}, "prefix_match_unit"),
        ({"kv_cache_config": kv_cache(FullAttentionSpec(16), hash_block_size="16")}, "hash_block_size"),
        ({"kv_cache_config": kv_cache(FullAttentionSpec("16"))}, "block_size"),  # type: ignore[arg-type]
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size="2")}, "decode_context_parallel_size"),
        ({"kernel_block_sizes": [None]}, "kernel_block_sizes"),
        ({"kv_cache_config": kv_cache(FullAttentionSpec(16), num_blocks=None)}, "num_blocks"),  # type: ignore[arg-type]
    ],
)
def test_setting_that_is_no_whole_number_is_named(changes: dict[str, Any], name: str) -> None:
    """A size that is a word, a fraction or missing refuses the stage by its name, whatever reads it."""
    with pytest.raises(OmniPrefixCacheConfigError, match=rf"\b{name}\b"):
        stage_prefix_cache_config(**stage(**changes))
