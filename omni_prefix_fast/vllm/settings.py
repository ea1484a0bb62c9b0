"""Settings of the integration, read from vLLM's `additional_config`.

They stand under one name, so that other plug-ins can use the same dictionary::

    --additional-config '{"omni_prefix": {"sinks": [{"kind": "directory", "path": "rows"}]}}'

Guarantees: an unknown key, a wrong type, or settings that contradict each other are refused when the engine starts,
by name, with `OmniPrefixCacheConfigError`. Nothing here imports vLLM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, ValidationError, model_validator

from omni_prefix_fast.config import ModelCachePolicy, PrefixCacheConfig
from omni_prefix_fast.errors import OmniPrefixCacheConfigError

SETTINGS_KEY = "omni_prefix"
"""Name of this project's settings inside `additional_config`."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CallbackSinkSettings(_Strict):
    """Hand every step over to a callable in the engine's process."""

    kind: Literal["callback"]
    target: str
    """`package.module:name` of a callable that takes one `Delivery`."""


class DirectorySinkSettings(_Strict):
    """Write one safetensors file for each request, when it finishes."""

    kind: Literal["directory"]
    path: Path
    """Directory, made if it is missing."""
    fsync: StrictBool = True
    """Wait until a file is on the disk before it gets its name."""


SinkSettings: TypeAlias = Annotated[CallbackSinkSettings | DirectorySinkSettings, Field(discriminator="kind")]


class CacheSettings(_Strict):
    """Fields of `PrefixCacheConfig` that the engine does not know; what is left out keeps its default."""

    gpu_staging_bytes: StrictInt | None = None
    staging_depth: StrictInt | None = None
    staging_capacity_tokens: StrictInt | None = None
    staging_claim_timeout_s: StrictFloat | None = None
    copy_chunk_bytes: StrictInt | None = None

    def overrides(self) -> dict[str, Any]:
        """The fields that were set, by name."""
        return self.model_dump(exclude_none=True)


class PolicySettings(_Strict):
    """Fields of `ModelCachePolicy` that take precedence over what the model itself declares."""

    needs_full_hidden_states: StrictBool | None = None
    deferred_keys: frozenset[str] | None = None
    token_keys: frozenset[str] | None = None
    request_keys: frozenset[str] | None = None
    request_list_keys: frozenset[str] | None = None

    def apply(self, policy: ModelCachePolicy) -> ModelCachePolicy:
        """The model's policy with these fields in place of its own."""
        own = {name: getattr(policy, name) for name in ModelCachePolicy.model_fields}
        return ModelCachePolicy(**(own | self.model_dump(exclude_none=True)))


class RecordSettings(_Strict):
    """Write down every call of the cache, to be replayed elsewhere. For debugging: rows are hashed on the way."""

    path: Path
    """The file, written anew."""
    recorder: str = "conformance.vllm.tracing:record"
    """`package.module:name` of a callable `(cache, view, config, policy, path)` that returns what is called instead."""


class OmniPrefixSettings(_Strict):
    """What may stand under `additional_config["omni_prefix"]`."""

    enabled: StrictBool = True
    """False: the worker behaves exactly like vLLM's own, and hands nothing over."""
    eager: StrictBool | None = None
    """True: every copy and pool write runs inline. None: the cache decides by the device."""
    materialize_lag: StrictInt = Field(default=0, ge=0)
    """How many steps later a step's rows are handed over. Must be below `cache.staging_depth`."""
    materialize_on: Literal["engine", "thread"] = "engine"
    """Whether rows are merged and handed over on the engine's thread or on a builder thread of their own."""
    handover_timeout_s: StrictFloat = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Deadline in seconds of every wait for the builder thread."""
    mm_outputs: str | None = None
    """`package.module:name` of a callable `(hidden_states, StepBatch) -> mapping`; None: the model's own hook."""
    sinks: tuple[SinkSettings, ...] = ()
    """Where rows go, in order."""
    record: RecordSettings | None = None
    """Write a trace of the cache's calls."""
    cache: CacheSettings = CacheSettings()
    policy: PolicySettings = PolicySettings()

    @model_validator(mode="after")
    def _lag_fits_the_staging_pages(self) -> Self:
        depth = self.cache.staging_depth or PrefixCacheConfig.model_fields["staging_depth"].default
        if self.materialize_lag >= depth:
            raise ValueError(
                f"materialize_lag is {self.materialize_lag}, but at most staging_depth - 1 = {depth - 1} steps can "
                "wait for their handover; raise cache.staging_depth or lower materialize_lag"
            )
        return self

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Self:
        """Validate the settings in vLLM's `additional_config`; without any the defaults hold.

        Raises:
            OmniPrefixCacheConfigError: naming each key that is unknown or wrong.
        """
        given: object = {}
        if isinstance(additional_config, Mapping):
            given = additional_config.get(SETTINGS_KEY, {})
        if not isinstance(given, Mapping):
            raise OmniPrefixCacheConfigError(
                f"additional_config[{SETTINGS_KEY!r}] must be a dictionary, not {type(given).__name__}"
            )
        try:
            return cls(**given)
        except ValidationError as error:
            raise OmniPrefixCacheConfigError(_explain(error)) from error

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> Self:
        """The settings of an engine; see `from_additional_config`."""
        return cls.from_additional_config(getattr(vllm_config, "additional_config", None))


def _explain(error: ValidationError) -> str:
    lines = []
    for one in error.errors():
        where = ".".join(str(part) for part in (SETTINGS_KEY, *one["loc"]))
        hint = " (unknown key; see OmniPrefixSettings)" if one["type"] == "extra_forbidden" else ""
        lines.append(f"additional_config: {where}: {one['msg']}{hint}")
    return "; ".join(lines)


def load_callable(target: str, setting: str) -> Callable[..., Any]:
    """Import `package.module:name`.

    Args:
        target: what to import.
        setting: name of the setting it stands in, for the error.

    Raises:
        OmniPrefixCacheConfigError: the name is malformed, cannot be imported, or is no callable.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise OmniPrefixCacheConfigError(f"{setting} is {target!r}; write it as 'package.module:name'")
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise OmniPrefixCacheConfigError(f"{setting} is {target!r}, which cannot be imported: {error}") from error
    if not callable(found):
        raise OmniPrefixCacheConfigError(f"{setting} is {target!r}, which is no callable")
    return found
