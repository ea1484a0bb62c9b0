"""The command `omni-prefix footprint`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from omni_prefix_fast import HIDDEN_KEY, PrefixCacheConfig, StageFootprint, stage_footprint
from omni_prefix_fast.errors import OmniPrefixCacheConfigError, OmniPrefixCacheUnmatchError
from omni_prefix_fast.vllm.footprint import footprint_of_vllm_config, read_vllm_config

Rows = tuple[torch.dtype, tuple[int, ...]]


def parse_rows(text: str) -> Rows:
    """`bfloat16:2048` or `int64:4x16`: what a row is."""
    name, _, widths = text.partition(":")
    dtype = getattr(torch, name, None)
    try:
        feature = tuple(int(width) for width in widths.split("x"))
    except ValueError:
        feature = ()
    if not isinstance(dtype, torch.dtype) or not feature or min(feature) < 1:
        raise OmniPrefixCacheConfigError(f"{text!r} is no row; write DTYPE:WIDTH or DTYPE:WIDTHxWIDTH, say int64:4x16")
    return dtype, feature


def parse_key(text: str) -> tuple[str, Rows]:
    """`codes:int64:16`: a key and its row."""
    name, _, rows = text.partition(":")
    if not name or not rows:
        raise OmniPrefixCacheConfigError(f"{text!r} is no key; write NAME:DTYPE:WIDTH, say codes:int64:16")
    return name, parse_rows(rows)


def footprint_of(  # noqa: PLR0913 - one for each option of the command
    *,
    hidden: str | None,
    keys: Sequence[str],
    deferred: Sequence[str],
    config: Path | None,
    stage: int | None,
    num_blocks: int | None,
    block_size: int | None,
    accelerator: bool,
    **sizes: int | None,
) -> StageFootprint:
    """What the options describe. Raises `OmniPrefixCacheConfigError` where they do not fit together."""
    later = dict(parse_key(text) for text in deferred)
    rows = {} if hidden is None else {HIDDEN_KEY: parse_rows(hidden)}
    rows |= dict(parse_key(text) for text in keys) | later
    given = {name: size for name, size in sizes.items() if size is not None}
    if config is not None:
        vllm_config = read_vllm_config(_json(config), stage)
        if block_size is not None:
            vllm_config.cache_config.block_size = block_size
        return footprint_of_vllm_config(
            vllm_config, num_blocks=num_blocks, keys=rows, deferred=later, accelerator=accelerator, **given
        )
    if num_blocks is None or block_size is None or not rows:
        raise OmniPrefixCacheConfigError(
            "--num-blocks, --block-size and at least one of --hidden, --key and --deferred are needed, or --config"
        )
    cache = PrefixCacheConfig(num_blocks=num_blocks, block_size=block_size, **given)
    return stage_footprint(cache, rows, later, accelerator=accelerator)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OmniPrefixCacheConfigError(f"{path} cannot be read as JSON: {error}") from error


def footprint(  # noqa: PLR0913, PLR0917 - one for each option
    hidden: Annotated[str | None, typer.Option(metavar="DTYPE:WIDTH", help="Rows of the hidden states.")] = None,
    key: Annotated[list[str] | None, typer.Option(metavar="NAME:DTYPE:WIDTH[xWIDTH]", help="A key.")] = None,
    deferred: Annotated[list[str] | None, typer.Option(metavar="NAME:DTYPE:WIDTH", help="A deferred key.")] = None,
    num_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens a block.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the largest step.")] = None,
    staging_depth: Annotated[int | None, typer.Option(min=1, help="Steps that may be unconsumed at once.")] = None,
    gpu_staging_bytes: Annotated[int | None, typer.Option(min=0, help="Device bytes of deferred rows.")] = None,
    output_recycle_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes of outputs kept for use.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON of a vLLM configuration, engine arguments, or a deployment.")
    ] = None,
    stage: Annotated[int | None, typer.Option(min=0, help="Which stage of the deployment.")] = None,
    accelerator: Annotated[bool, typer.Option(help="Whether the engine has a device with memory of its own.")] = True,
) -> None:
    """What the cache of a stage costs in host and device memory."""
    try:
        answer = footprint_of(
            hidden=hidden,
            keys=key or (),
            deferred=deferred or (),
            config=config,
            stage=stage,
            num_blocks=num_blocks,
            block_size=block_size,
            accelerator=accelerator,
            staging_capacity_tokens=batch_tokens,
            staging_depth=staging_depth,
            gpu_staging_bytes=gpu_staging_bytes,
            output_recycle_bytes=output_recycle_bytes,
        )
    except OmniPrefixCacheUnmatchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    show(Console(), answer)


def show(console: Console, stage: StageFootprint) -> None:
    """Print what a stage costs."""
    table = Table("memory", "what", "bytes", "MiB")
    for column in table.columns[2:]:
        column.justify = "right"
    allocated = stage.allocated
    for key, nbytes in allocated.pool_bytes.items():
        _row(table, "host", f"pool of {'the hidden states' if key == HIDDEN_KEY else key}", nbytes)
    for key, nbytes in allocated.staging_bytes.items():
        _row(table, "host", f"staging pages of {'the hidden states' if key == HIDDEN_KEY else key}", nbytes)
    _row(table, "host", "slot tables", allocated.table_bytes)
    _row(table, "host", "outputs kept for use again, at most", stage.recycled_bytes)
    _row(table, "device" if stage.accelerator else "host", "clones of deferred rows, at most", stage.deferred_bytes)
    _row(table, "device", "rows on their way to the host, at most", stage.frozen_bytes)
    table.add_section()
    _row(table, "host", "in all, at most", stage.host_bytes)
    _row(table, "device", "in all, at most", stage.device_bytes)
    console.print(table)


def _row(table: Table, memory: str, what: str, nbytes: int) -> None:
    table.add_row(memory, what, f"{nbytes:,}", f"{nbytes / 2**20:,.1f}")
