"""What a stage will cost in memory, from the engine's own configuration: a live one, or the JSON of one.

Nothing here imports vLLM: configurations are read by attribute or by name. The engine decides the number of KV blocks
when it has measured its memory, and which mm keys a model emits stands in no configuration, so both can be given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from omni_prefix_fast.config import ModelCachePolicy, PrefixCacheConfig
from omni_prefix_fast.errors import OmniPrefixCacheConfigError
from omni_prefix_fast.footprint import StageFootprint, stage_footprint
from omni_prefix_fast.types import HIDDEN_KEY, Key
from omni_prefix_fast.vllm.settings import OmniPrefixSettings

_SECTIONS = ("cache_config", "scheduler_config", "model_config")


def footprint_of_vllm_config(
    vllm_config: Any,
    *,
    num_blocks: int | None = None,
    keys: Mapping[Key, tuple[torch.dtype, Sequence[int]]] | None = None,
    deferred: Iterable[Key] = (),
    accelerator: bool = True,
    **overrides: int,
) -> StageFootprint:
    """Work out what the cache of a vLLM engine will take.

    Args:
        vllm_config: vLLM's configuration, or what `read_vllm_config` made of one.
        num_blocks: KV blocks; None: what the engine measured, or was told to use (`num_gpu_blocks_override`).
        keys: rows of the mm keys, and of the hidden states if they differ from the model's hidden size and dtype.
        deferred: deferred keys, besides those of the settings in `additional_config`.
        accelerator: see `stage_footprint`.
        overrides: any field of `PrefixCacheConfig`, in place of what the settings say.

    Raises:
        OmniPrefixCacheConfigError: a size is missing or wrong; says which.
    """
    settings = OmniPrefixSettings.from_vllm_config(vllm_config)
    policy = settings.policy.apply(ModelCachePolicy(deferred_keys=frozenset(deferred)))
    cache_config = getattr(vllm_config, "cache_config", None)
    model_config = getattr(vllm_config, "model_config", None)
    blocks = num_blocks or getattr(cache_config, "num_gpu_blocks", None)
    blocks = blocks or getattr(cache_config, "num_gpu_blocks_override", None)
    config = PrefixCacheConfig.from_vllm_config(
        num_blocks=_needed(blocks, "the number of KV blocks (num_gpu_blocks_override, or num_blocks)"),
        block_size=_needed(getattr(cache_config, "block_size", None), "block_size"),
        scheduler_config=getattr(vllm_config, "scheduler_config", None),
        model_config=model_config,
        **settings.cache.overrides() | overrides,
    )
    rows = dict(keys or {})
    if policy.needs_full_hidden_states and HIDDEN_KEY not in rows:
        rows[HIDDEN_KEY] = (_dtype(model_config), (_hidden_size(model_config),))
    return stage_footprint(config, rows, policy.deferred_keys, accelerator=accelerator)


def read_vllm_config(given: Mapping[str, Any], stage: int | None = None) -> Any:
    """Make of parsed JSON an object with the attributes that `footprint_of_vllm_config` reads.

    Understood are a vLLM configuration (`cache_config`, `scheduler_config`, `model_config` with their fields), engine
    arguments (`max_num_batched_tokens`, `block_size`, ..., also with dashes), and a deployment with a list `stages` of
    engine arguments, which take precedence over those beside the list.

    Raises:
        OmniPrefixCacheConfigError: no object, or a deployment of which the stage is not named or not there.
    """
    if not isinstance(given, Mapping):
        raise OmniPrefixCacheConfigError(f"the configuration is a {type(given).__name__}, not an object")
    flat = _plain(given)
    stages = flat.pop("stages", None) or flat.pop("stage_args", None)
    if stages is not None:
        flat |= _stage(stages, stage)
    flat |= _plain(flat.pop("engine_args", None) or {})
    for section in _SECTIONS:
        flat |= _plain(flat.pop(section, None) or {})
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=flat.get("block_size"),
            num_gpu_blocks=flat.get("num_gpu_blocks"),
            num_gpu_blocks_override=flat.get("num_gpu_blocks_override"),
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=flat.get("max_num_batched_tokens")),
        model_config=SimpleNamespace(**{"max_model_len": None, **flat}),
        additional_config=flat.get("additional_config"),
    )


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in options.items() if value is not None}


def _stage(stages: Sequence[Mapping[str, Any]], wanted: int | None) -> dict[str, Any]:
    by_id = {int(stage.get("stage_id", i)): stage for i, stage in enumerate(stages)}
    if wanted is None and len(by_id) == 1:
        wanted = next(iter(by_id))
    if wanted not in by_id:
        asked = "no stage is named" if wanted is None else f"there is no stage {wanted}"
        raise OmniPrefixCacheConfigError(f"{asked}; the deployment has stages {sorted(by_id)}")
    return _plain(by_id[wanted])


def _hidden_size(model_config: Any) -> int:
    if callable(ask := getattr(model_config, "get_hidden_size", None)):
        return int(ask())
    size = getattr(model_config, "hidden_size", None)
    hf_config: Any = getattr(model_config, "hf_text_config", None) or getattr(model_config, "hf_config", None)
    if size is None and hf_config is None:
        hf_config = _model_file(getattr(model_config, "model", None))
    for source in (hf_config, _get(hf_config, "text_config")):
        size = size or _get(source, "hidden_size")
    return _needed(size, "the width of the hidden states (hidden_size)")


def _model_file(model: Any) -> Any:
    """The model's own `config.json`, where the model is a folder here."""
    path = Path(model) / "config.json" if isinstance(model, str) else None
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else None


def _dtype(model_config: Any) -> torch.dtype:
    told = getattr(model_config, "dtype", None)
    dtype = getattr(torch, told.removeprefix("torch."), None) if isinstance(told, str) else told
    if not isinstance(dtype, torch.dtype):
        raise OmniPrefixCacheConfigError(
            f"the configuration does not say the dtype of the hidden states: it is {told!r}"
        )
    return dtype


def _get(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _needed(value: Any, what: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise OmniPrefixCacheConfigError(f"the configuration does not say {what}: it is {value!r}")
    return value
