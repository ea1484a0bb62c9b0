"""Settings of one cache (`PrefixCacheConfig`) and what a model asks of it (`ModelCachePolicy`)."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from omni_prefix_fast.errors import OmniPrefixCacheConfigError
from omni_prefix_fast.types import HIDDEN_KEY, Key

_MIB = 1024 * 1024


class _Settings(BaseModel):
    """Frozen pydantic model whose validation errors are the cache's own, so that one `except` catches all."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors())
            raise OmniPrefixCacheConfigError(f"{type(self).__name__}: {'; '.join(lines)}") from error


class PrefixCacheConfig(_Settings):
    """Sizes and bounds of one cache. Frozen."""

    num_blocks: PositiveInt
    """KV blocks of the engine, the null block included; the pool mirrors each of them."""
    block_size: PositiveInt
    """Tokens a block."""
    gpu_staging_bytes: int = Field(default=512 * _MIB, ge=0)
    """Device bytes that clones of deferred rows may take in all. Under pressure open writes are forced out."""
    staging_depth: PositiveInt = 4
    """How many saved steps may be unconsumed at once; each holds one staging page."""
    staging_capacity_tokens: PositiveInt = 1024
    """Tokens a staging page holds: the largest step (`max_num_batched_tokens`)."""
    staging_claim_timeout_s: float = Field(default=30.0, gt=0, le=threading.TIMEOUT_MAX)
    """Deadline in seconds of every wait: for a free page, for a write, for a read in progress. Finite."""
    copy_chunk_bytes: PositiveInt = 16 * _MIB
    """Deferred rows are copied to the host at most this many bytes at a time."""

    output_recycle_bytes: int = Field(default=512 * _MIB, ge=0)
    """Host memory of handed-over tensors that is kept, once the consumer has dropped them, to be used again."""

    @property
    def num_slots(self) -> int:
        """Token slots in all, `num_blocks * block_size`."""
        return self.num_blocks * self.block_size

    @classmethod
    def from_vllm_config(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        scheduler_config: Any = None,
        model_config: Any = None,
        **overrides: Any,
    ) -> Self:
        """Size the staging pages from the engine's settings.

        A page holds one step of the whole batch: `scheduler_config.max_num_batched_tokens`, or
        `model_config.max_model_len` where the former is missing. `overrides` set any other field.

        Raises:
            OmniPrefixCacheConfigError: a size is no whole number, naming the field it was for.
        """
        if "staging_capacity_tokens" not in overrides:
            capacity = read_setting(scheduler_config, "max_num_batched_tokens")
            if not capacity:
                capacity = read_setting(model_config, "max_model_len")
            if capacity:
                overrides["staging_capacity_tokens"] = _plain_int(capacity)
        return cls(num_blocks=_plain_int(num_blocks), block_size=_plain_int(block_size), **overrides)


def read_setting(config: Any, name: str, default: Any = None) -> Any:
    """A setting of an engine's configuration, which is an object or a dictionary; `default` if it is absent."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def _plain_int(value: Any) -> Any:
    """Any kind of whole number as an int; whatever else as it is, for the field's own check to refuse by name."""
    try:
        return operator.index(value)
    except TypeError:
        return value


def _names(model: object, attribute: str) -> frozenset[Key]:
    value = getattr(model, attribute, None)
    if value is None:
        return frozenset()
    if isinstance(value, str):
        return frozenset((value,))
    names = tuple(value) if isinstance(value, Iterable) else (value,)
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise OmniPrefixCacheConfigError(
            f"{type(model).__name__}.{attribute} is {value!r}: {wrong[0]!r} is no key; it has to be a collection of "
            "strings"
        )
    return frozenset(names)


class ModelCachePolicy(_Settings):
    """What a model hands over and how: which keys are per token, per request, or deferred. Frozen.

    Whether a tensor holds one row a token cannot be told from its shape in general: a reference tensor may happen
    to have as many rows as the step. Undeclared keys are judged by their shape at first sight and dropped from
    the cache for good, with a warning, when a later step contradicts it. The first `intake.MAX_REMEMBERED` of them
    are remembered; a later one is never cached. A model that can should declare its keys.
    """

    needs_full_hidden_states: bool = True
    """Cache and hand over hidden states of whole prompts. False: hidden states are ignored."""
    deferred_keys: frozenset[Key] = frozenset()
    """Per-token mm keys written once, when the request finishes."""
    token_keys: frozenset[Key] | None = None
    """Per-token mm keys. None: judge undeclared keys by shape. A set: these and the deferred ones, no others."""
    request_keys: frozenset[Key] = frozenset()
    """Keys that are never per token; each request gets its own whole copy."""
    request_list_keys: frozenset[Key] = frozenset()
    """Keys whose value is a list with one entry for each request of the batch, in batch order."""

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        per_token = self.deferred_keys | (self.token_keys or frozenset())
        if clash := per_token & (self.request_keys | self.request_list_keys):
            raise ValueError(f"declared both per token and per request: {sorted(clash)}")
        if clash := self.request_keys & self.request_list_keys:
            raise ValueError(f"declared in request_keys and in request_list_keys: {sorted(clash)}")
        if HIDDEN_KEY in per_token | self.request_keys | self.request_list_keys:
            raise ValueError(f"{HIDDEN_KEY!r} is the hidden states' own key; use needs_full_hidden_states")
        return self

    def is_declared_per_token(self, key: Key) -> bool:
        """Whether the model says that `key` has one row a token."""
        return key in self.deferred_keys or (self.token_keys is not None and key in self.token_keys)

    def is_declared_per_request(self, key: Key) -> bool:
        """Whether the model says that `key` never has one row a token."""
        return key in self.request_keys or key in self.request_list_keys

    @classmethod
    def from_model(cls, model: object) -> Self:
        """Read the policy from a model's attributes; each is optional.

        `requires_full_prefix_cached_hidden_states` and `deferred_prefix_cache_mm_keys` are what models carry today;
        `prefix_cache_token_keys`, `prefix_cache_request_keys` and `prefix_cache_request_list_keys` declare keys.

        Raises:
            OmniPrefixCacheConfigError: an attribute is of another type, or they contradict each other.
        """
        needs_hidden = getattr(model, "requires_full_prefix_cached_hidden_states", True)
        if isinstance(needs_hidden, str):  # 'no' would be true
            raise OmniPrefixCacheConfigError(
                f"{type(model).__name__}.requires_full_prefix_cached_hidden_states is {needs_hidden!r}; "
                "it has to be True or False"
            )
        has_tokens = getattr(model, "prefix_cache_token_keys", None) is not None
        return cls(
            needs_full_hidden_states=bool(needs_hidden),
            deferred_keys=_names(model, "deferred_prefix_cache_mm_keys"),
            token_keys=_names(model, "prefix_cache_token_keys") if has_tokens else None,
            request_keys=_names(model, "prefix_cache_request_keys"),
            request_list_keys=_names(model, "prefix_cache_request_list_keys"),
        )
