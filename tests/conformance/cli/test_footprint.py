"""`omni-prefix footprint`: from text on the command line to the same answer as in Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from conformance.cli import app
from conformance.cli.footprint import parse_key, parse_rows
from omni_prefix_fast import HIDDEN_KEY, PrefixCacheConfig, stage_footprint
from omni_prefix_fast.errors import OmniPrefixCacheConfigError

RUNNER = CliRunner(env={"COLUMNS": "160"})
NUMBERS = ["--num-blocks", "100", "--block-size", "16", "--batch-tokens", "512", "--staging-depth", "3"]
KEYS = ["--hidden", "bfloat16:64", "--key", "voice:float32:2x3", "--deferred", "codes:int64:16"]
STAGE = stage_footprint(
    PrefixCacheConfig(num_blocks=100, block_size=16, staging_capacity_tokens=512, staging_depth=3),
    {HIDDEN_KEY: (torch.bfloat16, (64,)), "voice": (torch.float32, (2, 3)), "codes": (torch.int64, (16,))},
    ["codes"],
)


def test_from_numbers() -> None:
    """Every line of the table is a number of `stage_footprint`."""
    result = RUNNER.invoke(app, ["footprint", *NUMBERS, *KEYS])
    assert result.exit_code == 0, result.output
    sizes = (*STAGE.allocated.pool_bytes.values(), *STAGE.allocated.staging_bytes.values())
    for nbytes in (*sizes, STAGE.allocated.table_bytes, STAGE.host_bytes, STAGE.device_bytes):
        assert f" {nbytes:,} " in result.output
    assert "pool of voice" in result.output


def test_from_the_json_of_a_configuration(tmp_path: Path) -> None:
    """What the configuration does not say is given beside it."""
    given = {
        "stages": [{}, {"block_size": 8, "max_num_batched_tokens": 512, "dtype": "bfloat16", "hidden_size": 64}],
        "additional_config": {"omni_prefix": {"cache": {"staging_depth": 3}}},
    }
    path = tmp_path / "deploy.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    beside = ["--num-blocks", "100", "--block-size", "16", *KEYS[2:]]
    result = RUNNER.invoke(app, ["footprint", "--config", str(path), "--stage", "1", *beside])
    assert result.exit_code == 0, result.output
    assert f" {STAGE.host_bytes:,} " in result.output


def test_without_an_accelerator_no_device_memory_is_counted() -> None:
    """Clones of deferred rows are host memory then."""
    result = RUNNER.invoke(app, ["footprint", *NUMBERS, *KEYS, "--no-accelerator"])
    assert f" {STAGE.host_bytes + STAGE.deferred_bytes:,} " in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--num-blocks"),
        (NUMBERS, "--key"),
        ([*NUMBERS, "--key", "voice"], "NAME:DTYPE:WIDTH"),
        ([*NUMBERS, "--key", "voice:float31:4"], "float31"),
        ([*NUMBERS, "--hidden", "float32"], "DTYPE:WIDTH"),
        ([*NUMBERS, "--hidden", "float32:0"], "float32:0"),
        (["--config", "nothing.json"], "nothing.json"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: list[str], named: str) -> None:
    """Exit status 2, and what to write instead."""
    result = RUNNER.invoke(app, ["footprint", *arguments])
    assert result.exit_code == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_rows_and_keys_are_read() -> None:
    """Any number of dimensions; a name may not be empty."""
    assert parse_rows("int64:4x16") == (torch.int64, (4, 16))
    assert parse_key("codes:int64:16") == ("codes", (torch.int64, (16,)))
    with pytest.raises(OmniPrefixCacheConfigError):
        parse_key(":int64:16")
