"""Which stages may have a prefix cache: one table of checks, run once when the engine knows its KV cache.

Guarantees:

- `stage_prefix_cache_config` answers None where there is nothing to do (a pooling stage, prefix caching off), a
  configuration where the cache is right, and raises `OmniPrefixCacheConfigError` for every other stage. There is no
  fourth answer: a stage that passes hands over right rows.
- Each refusal says what is wrong, why rows would be wrong, and which setting to change.
- Nothing is imported from vLLM: objects are read by attribute (dictionaries by key), KV cache specs are recognised by
  class name, so the checks run on a machine without it and hold with any release that keeps these names. What is absent
  counts as its harmless default; what is there and not understood refuses the stage.

`CHECKS` is the whole table; `docs` and tests enumerate it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

from omni_prefix_fast.config import PrefixCacheConfig, read_setting
from omni_prefix_fast.errors import OmniPrefixCacheConfigError
from omni_prefix_fast.layout import FullAttentionGroupView

FULL_ATTENTION_SPEC = "FullAttentionSpec"
"""Name of vLLM's spec of a layer that keeps the KV of every token; subclasses are recognised through the MRO."""

PARTIAL_SPEC_ATTRIBUTES = ("sliding_window", "attention_chunk_size", "rswa_window", "sink_len")
"""Attributes of a spec that, when set, drop or shift blocks, so that slots no longer follow positions."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What the checks look at, read once from the engine's configuration objects.

    Attributes:
        block_size: tokens a KV block, or None without any KV group.
        layer_specs: for each KV group, the specs of its layers.
        match_units: token granularities at which this engine may find a prefix: what was asked for and what it made
            of that. Empty where nothing but whole blocks was ever asked for.
        kernel_block_sizes: tokens a block as the attention kernels see it, one a group; empty while unknown.
        kv_role: role in a KV transfer, or None.
        speculative: whether the stage decodes speculatively.
        scheduling_policy: the scheduler's policy.
        decode_context_parallel: ranks that share one request's decode tokens.
        prefill_context_parallel: ranks that share one request's prompt tokens.
    """

    block_size: int | None
    layer_specs: tuple[tuple[Any, ...], ...]
    match_units: tuple[int, ...] = ()
    kernel_block_sizes: tuple[int, ...] = ()
    kv_role: str | None = None
    speculative: bool = False
    scheduling_policy: str = "fcfs"
    decode_context_parallel: int = 1
    prefill_context_parallel: int = 1


@dataclass(frozen=True, slots=True)
class StageCheck:
    """One row of the table: what is refused, why, and what to change.

    Attributes:
        name: a short name, for tests and documents.
        finds: what is wrong with a stage, or None.
        because: why the rows could be wrong.
        change: the setting to change.
    """

    name: str
    finds: Callable[[StageFacts], str | None]
    because: str
    change: str

    def run(self, facts: StageFacts) -> None:
        """Raise `OmniPrefixCacheConfigError` if this check refuses the stage."""
        if found := self.finds(facts):
            because = self.because[0].upper() + self.because[1:]
            raise OmniPrefixCacheConfigError(
                f"no prefix cache of stage outputs for this stage: {found}. {because}. "
                f"{self.change}, or set enable_prefix_caching to False for this stage."
            )


# -------------------------------------------------------------------------------------------- what each check finds


def _received_kv(facts: StageFacts) -> str | None:
    return None if facts.kv_role is None or facts.kv_role == "kv_producer" else f"kv_role is {facts.kv_role!r}"


def _speculation(facts: StageFacts) -> str | None:
    return "speculative decoding is on (speculative_config is set)" if facts.speculative else None


def _priority(facts: StageFacts) -> str | None:
    return None if facts.scheduling_policy == "fcfs" else f"the scheduling policy is {facts.scheduling_policy!r}"


def _decode_context_parallel(facts: StageFacts) -> str | None:
    size = facts.decode_context_parallel
    return f"decode_context_parallel_size is {size}" if size > 1 else None


def _prefill_context_parallel(facts: StageFacts) -> str | None:
    size = facts.prefill_context_parallel
    return f"prefill_context_parallel_size is {size}" if size > 1 else None


def _group_count(facts: StageFacts) -> str | None:
    count = len(facts.layer_specs)
    return None if count == 1 else f"the model has {count} KV cache groups, not one"


def _is_full_attention(spec: Any) -> bool:
    return any(cls.__name__ == FULL_ATTENTION_SPEC for cls in type(spec).__mro__)


def _not_full_attention(facts: StageFacts) -> str | None:
    if not facts.layer_specs[0]:
        return "its KV cache group names no layer (kv_cache_specs is empty)"
    for spec in facts.layer_specs[0]:
        if not _is_full_attention(spec):
            return f"its KV cache group is {type(spec).__name__}, not {FULL_ATTENTION_SPEC}"
        for attribute in PARTIAL_SPEC_ATTRIBUTES:
            if (value := getattr(spec, attribute, None)) is not None:
                return f"its KV cache group keeps only part of the tokens ({attribute}={value})"
    return None


def _mixed_block_sizes(facts: StageFacts) -> str | None:
    for spec in facts.layer_specs[0]:
        size = getattr(spec, "block_size", None)
        if size and size != facts.block_size:
            return f"a layer's KV blocks have {size} tokens while those of its group have {facts.block_size}"
    return None


def _match_unit(facts: StageFacts) -> str | None:
    for unit in facts.match_units:
        if unit != facts.block_size:
            return f"prefixes match every {unit} tokens while a block has {facts.block_size}"
    return None


def _kernel_block_size(facts: StageFacts) -> str | None:
    for size in facts.kernel_block_sizes:
        if size != facts.block_size:
            return f"the attention kernels use blocks of {size} tokens while the allocator's have {facts.block_size}"
    return None


_USE_FULL_ATTENTION = (
    "Serve this stage with full attention in every layer (disable_sliding_window=True where the model allows it)"
)

CHECKS: tuple[StageCheck, ...] = (
    StageCheck(
        "kv_transfer",
        _received_kv,
        "KV received from another engine is counted in num_computed_tokens and cannot be told from a local hit",
        "Set kv_transfer_config.kv_role to 'kv_producer'",
    ),
    StageCheck(
        "speculative_decoding",
        _speculation,
        "the runner counts all draft tokens as accepted during the forward, so rows would be kept under wrong slots",
        "Remove speculative_config",
    ),
    StageCheck(
        "scheduling_policy",
        _priority,
        "scheduling by priority may withdraw a request already placed in the step while its block hashes stay "
        "published, with no rows behind them",
        "Set scheduling_policy to 'fcfs'",
    ),
    StageCheck(
        "decode_context_parallel",
        _decode_context_parallel,
        "each rank holds every other stripe of tokens, so a block's slots are not consecutive positions",
        "Set decode_context_parallel_size to 1",
    ),
    StageCheck(
        "prefill_context_parallel",
        _prefill_context_parallel,
        "each rank computes a part of the prompt, so a step's rows are not its scheduled tokens in order",
        "Set prefill_context_parallel_size to 1",
    ),
    StageCheck(
        "kv_groups",
        _group_count,
        "the cache mirrors exactly one block table",
        _USE_FULL_ATTENTION,
    ),
    StageCheck(
        "full_attention",
        _not_full_attention,
        "blocks behind the window are given to others while the request still needs its rows",
        _USE_FULL_ATTENTION,
    ),
    StageCheck(
        "layer_block_size",
        _mixed_block_sizes,
        "a slot then names different tokens in different layers",
        "Serve this stage with one block_size for all layers",
    ),
    StageCheck(
        "prefix_match_unit",
        _match_unit,
        "a hit inside a block would leave part of the block without rows",
        "Leave prefix_match_unit unset, or set it to the block size",
    ),
    StageCheck(
        "kernel_block_size",
        _kernel_block_size,
        "the runner's block table then names kernel blocks, and slots of the two sizes do not agree",
        "Set block_size to a size that the attention backend supports natively, or choose another attention backend",
    ),
)
"""Every reason for which a stage is refused, in the order in which they are looked at."""

_BY_NAME = {check.name: check for check in CHECKS}
_GROUP_CHECKS = ("kv_groups", "full_attention", "layer_block_size", "prefix_match_unit")


# ------------------------------------------------------------------------------------------------- reading the facts


def _layer_specs(spec: Any) -> Iterator[Any]:
    """The specs of the layers behind a group's spec, which may be one for all or a dictionary of them."""
    nested = read_setting(spec, "kv_cache_specs")
    if isinstance(nested, Mapping):
        for inner in nested.values():
            yield from _layer_specs(inner)
    else:
        yield spec


def _whole(value: Any, name: str) -> int:
    """A whole number of any type. Raises `OmniPrefixCacheConfigError`, naming the setting, for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise OmniPrefixCacheConfigError(
            f"no prefix cache of stage outputs for this stage: {name} is {value!r}, not a whole number. Set {name} to "
            "one, or set enable_prefix_caching to False for this stage."
        ) from None


def _size(config: Any, name: str) -> int:
    """A parallel size; whatever is missing or None is 1."""
    value = read_setting(config, name)
    return 1 if value is None else _whole(value, name)


def _word(value: Any) -> Any:
    """A choice among words, however it is written: an enumeration's member, upper case, with blanks around."""
    value = value.value if isinstance(value, Enum) else value
    return value.strip().lower() if isinstance(value, str) else value


def _read_facts(
    *,
    kv_cache_config: Any = None,
    cache_config: Any = None,
    kv_transfer_config: Any = None,
    scheduler_config: Any = None,
    speculative_config: Any = None,
    parallel_config: Any = None,
    kernel_block_sizes: Iterable[int] = (),
) -> StageFacts:
    groups = tuple(read_setting(kv_cache_config, "kv_cache_groups") or ())
    specs = tuple(read_setting(group, "kv_cache_spec") for group in groups)
    block_size = (read_setting(specs[0], "block_size") if specs else None) or read_setting(cache_config, "block_size")
    units = {
        "prefix_match_unit": read_setting(cache_config, "prefix_match_unit"),
        "hash_block_size": read_setting(kv_cache_config, "hash_block_size"),
        "cache_hit_alignment_tokens": read_setting(kv_cache_config, "cache_hit_alignment_tokens"),
    }
    policy = read_setting(scheduler_config, "policy")
    return StageFacts(
        block_size=None if block_size is None else _whole(block_size, "block_size"),
        layer_specs=tuple(tuple(_layer_specs(spec)) for spec in specs),
        match_units=tuple(_whole(unit, name) for name, unit in units.items() if unit is not None),
        kernel_block_sizes=tuple(_whole(size, "kernel_block_sizes") for size in kernel_block_sizes),
        kv_role=_word(read_setting(kv_transfer_config, "kv_role")),
        speculative=speculative_config is not None,
        scheduling_policy="fcfs" if policy is None else _word(policy),
        decode_context_parallel=_size(parallel_config, "decode_context_parallel_size"),
        prefill_context_parallel=_size(parallel_config, "prefill_context_parallel_size"),
    )


# ------------------------------------------------------------------------------------------------------ public checks


def check_prefix_cache_kv_groups(kv_cache_groups: Any, cache_config: Any = None) -> None:
    """Refuse anything but one KV group of full attention that is matched in whole blocks.

    Args:
        kv_cache_groups: the engine's list of KV groups, or the whole `KVCacheConfig` (which also tells the unit in
            which prefixes match).
        cache_config: the engine's `CacheConfig`, for `prefix_match_unit`.

    Raises:
        OmniPrefixCacheConfigError: naming the group and the setting to change.
    """
    config = kv_cache_groups
    if not hasattr(config, "kv_cache_groups") and not isinstance(config, Mapping):
        config = SimpleNamespace(kv_cache_groups=kv_cache_groups)
    facts = _read_facts(kv_cache_config=config, cache_config=cache_config)
    for name in _GROUP_CHECKS:
        _BY_NAME[name].run(facts)


def check_prefix_cache_kv_transfer(kv_transfer_config: Any) -> None:
    """Refuse a stage that receives KV from elsewhere. One that only produces is unaffected, and so is None.

    Raises:
        OmniPrefixCacheConfigError: naming the role and the setting to change.
    """
    _BY_NAME["kv_transfer"].run(_read_facts(kv_transfer_config=kv_transfer_config))


def check_prefix_cache_kernel_block_size(block_size: int, kernel_block_sizes: Sequence[int]) -> None:
    """Refuse an attention backend that splits allocator blocks.

    Args:
        block_size: tokens a block of the KV cache manager.
        kernel_block_sizes: tokens a block of the attention kernels, one for each KV group.

    Raises:
        OmniPrefixCacheConfigError: naming both sizes and the setting to change.
    """
    sizes = tuple(_whole(size, "kernel_block_sizes") for size in kernel_block_sizes)
    _BY_NAME["kernel_block_size"].run(StageFacts(_whole(block_size, "block_size"), (), kernel_block_sizes=sizes))


def stage_prefix_cache_config(  # noqa: PLR0913 - the call shape is the contract with the engine
    *,
    kv_cache_config: Any,
    cache_config: Any,
    kv_transfer_config: Any,
    scheduler_config: Any,
    model_config: Any,
    is_pooling_model: bool,
    speculative_config: Any = None,
    parallel_config: Any = None,
    kernel_block_sizes: Iterable[int] = (),
    **overrides: Any,
) -> PrefixCacheConfig | None:
    """Decide whether a stage gets a prefix cache, and size it. Called once, when the KV cache is initialised.

    The first eight arguments are the engine's own configuration objects, read by attribute.

    Args:
        kv_cache_config: groups, number of blocks, and what the engine made of `prefix_match_unit`.
        cache_config: `enable_prefix_caching`, `block_size`, `prefix_match_unit`.
        kv_transfer_config: `kv_role`; None without a KV transfer.
        scheduler_config: `policy`, and `max_num_batched_tokens` for the staging pages.
        model_config: `max_model_len`, for an engine without a batch limit.
        is_pooling_model: a pooling stage never saves: it gets no cache, and is not refused.
        speculative_config: anything but None is refused.
        parallel_config: context-parallel sizes; None counts as 1.
        kernel_block_sizes: of the attention kernels, where already known.
        overrides: any field of `PrefixCacheConfig`.

    Returns:
        The configuration of the cache, or None where the stage has no use for one (pooling, prefix caching off).

    Raises:
        OmniPrefixCacheConfigError: the stage has prefix caching on and would hand over wrong rows.
    """
    if is_pooling_model or not read_setting(cache_config, "enable_prefix_caching", False):
        return None
    facts = _read_facts(
        kv_cache_config=kv_cache_config,
        cache_config=cache_config,
        kv_transfer_config=kv_transfer_config,
        scheduler_config=scheduler_config,
        speculative_config=speculative_config,
        parallel_config=parallel_config,
        kernel_block_sizes=kernel_block_sizes,
    )
    for check in CHECKS:
        check.run(facts)
    if facts.block_size is None:
        raise OmniPrefixCacheConfigError("the engine's KV cache has no block size; set cache_config.block_size")
    return PrefixCacheConfig.from_vllm_config(
        num_blocks=read_setting(kv_cache_config, "num_blocks"),
        block_size=facts.block_size,
        scheduler_config=scheduler_config,
        model_config=model_config,
        **overrides,
    )


def get_prefix_cache_group_view(
    input_batch: Any, block_size: int, kv_cache_groups: Any = None
) -> FullAttentionGroupView | None:
    """Make the view of an engine's batch that the cache reads slots from.

    Args:
        input_batch: the model runner's batch.
        block_size: tokens a block of the KV cache manager.
        kv_cache_groups: the engine's KV groups, checked first; None where they were checked before.

    Returns:
        The view, or None while the batch has no block table.

    Raises:
        OmniPrefixCacheConfigError: the groups, or the layout of the block table, cannot be mirrored.
    """
    if kv_cache_groups is not None:
        check_prefix_cache_kv_groups(kv_cache_groups)
    if not getattr(input_batch.block_table, "block_tables", None):
        return None
    return FullAttentionGroupView(input_batch, block_size)
