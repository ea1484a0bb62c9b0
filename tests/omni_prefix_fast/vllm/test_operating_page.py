"""The operator's page says what is there: settings, defaults, counters, log lines, and the output that it shows."""

from __future__ import annotations

import ast
import json
import logging.config
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from omni_prefix_fast.config import PrefixCacheConfig
from omni_prefix_fast.metrics import Footprint, LockTimes, Statistics
from omni_prefix_fast.vllm.handover import HandoverStatistics
from omni_prefix_fast.vllm.settings import SETTINGS_KEY, CacheSettings, OmniPrefixSettings, PolicySettings

LEVELS = ("warning", "error")
ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text below one heading."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section {title!r}"
    return found[1]


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the table rows whose first cell is code."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def code_blocks(language: str, text: str = PAGE) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The settings models that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every field, nested ones too, with its default as the page writes it."""
    for name, field in model.model_fields.items():
        nested = models_in(field.annotation)
        many = field.get_default() == ()
        if model is PolicySettings:
            shown = "the model's"
        elif model is CacheSettings:
            default = PrefixCacheConfig.model_fields[name].default
            shown = "the engine's" if name == "staging_capacity_tokens" else f"`{json.dumps(default)}`"
        elif field.is_required():
            shown = "required"
        else:
            default = field.get_default()
            shown = f"`{json.dumps({} if isinstance(default, BaseModel) else default)}`"
        yield f"{prefix}{name}", shown
        for inner in nested:
            yield from settings_of(inner, f"{prefix}{name}{'[]' if many else ''}.")


def test_the_table_names_every_setting_with_its_default_and_no_other() -> None:
    """The table of settings is the pydantic models, nested ones too."""
    told = [(name.strip("`"), default) for name, _, default, _ in rows(section("Settings"))]
    assert len(told) == len({name for name, _ in told})
    assert dict(told) == dict(settings_of(OmniPrefixSettings))


def test_a_setting_that_the_page_leaves_out_would_be_told() -> None:
    """The walk sees fields at every depth, so that the comparison above has something to miss."""
    names = {name for name, _ in settings_of(OmniPrefixSettings)}
    assert {"enabled", "sinks[].target", "sinks[].fsync", "record.path", "cache.staging_depth"} <= names


def test_the_settings_of_the_commands_are_taken() -> None:
    """Every `--additional-config` of the page is valid."""
    given = [shlex.split(block) for block in code_blocks("sh") if "--additional-config" in block]
    assert given
    for words in given:
        additional = json.loads(words[words.index("--additional-config") + 1])
        assert set(additional) == {SETTINGS_KEY}
        assert OmniPrefixSettings.from_additional_config(additional).sinks


def test_the_logging_file_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON for the log is what `logging.config` takes, and names this package's logger."""
    (block,) = code_blocks("json")
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(logging.config.DictConfigurator, "configure", lambda self: seen.append(dict(self.config)))
    logging.config.dictConfig(json.loads(block))
    assert "omni_prefix_fast" in seen[0]["loggers"]


def test_the_report_reads_what_there_is_and_can_be_sent() -> None:
    """The worker extension of the page answers with plain values, and with nothing where there is no cache."""
    (block,) = code_blocks("python")
    names: dict[str, Any] = {}
    exec(compile(block, "operating.md", "exec"), names)  # noqa: S102 - our own page
    cache = SimpleNamespace(
        statistics=Statistics, footprint=lambda: Footprint({"k": 8}, {"k": 4}, 2, 0, 0), lock_times=LockTimes
    )
    link = SimpleNamespace(
        cached=True, cache=cache, handover=SimpleNamespace(statistics=lambda: HandoverStatistics(1, 0, 0))
    )
    worker = names["OmniPrefixReport"]()
    worker.model_runner = SimpleNamespace(omni_prefix=link)
    report = json.loads(json.dumps(worker.omni_prefix_report()))
    assert set(report) == {"statistics", "footprint", "lock_times", "handover"}
    assert report["footprint"]["pool_bytes"] == {"k": 8}
    worker.model_runner.omni_prefix = None
    assert worker.omni_prefix_report() is None


def test_the_counters_of_the_page_exist() -> None:
    """Whoever sets an alarm by the page finds the counter."""
    parts: dict[str, Any] = {
        "statistics": Statistics,
        "footprint": Footprint,
        "lock_times": LockTimes,
        "handover": HandoverStatistics,
    }
    known = {f"{part}.{field.name}" for part, kind in parts.items() for field in fields(kind)}
    named = set(re.findall(r"`((?:statistics|footprint|lock_times|handover)\.\w+)`", section("What to watch")))
    assert len(named) >= 8
    assert named <= known


def logged() -> Iterator[tuple[str, str]]:
    """Level and text of every message that the package logs."""
    levels = {"warning": "warning", "error": "error", "exception": "error"}
    for path in (ROOT / "omni_prefix_fast").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr=name), args=[ast.Constant(value=str(text)), *_]):
                    if name in levels:
                        yield levels[name], text


def test_the_log_lines_of_the_page_are_those_of_the_package() -> None:
    """The table has every warning and error that the package logs, with its level, and no other."""
    told = [(cells[0].strip("`"), cells[1]) for cells in rows(section("What to watch")) if cells[1] in LEVELS]
    patterns = [(re.sub(r"\\\.\\\.\\\.|\bN\b", ".*", re.escape(line)), level) for line, level in told]
    messages = list(logged())
    assert len(messages) == len(told)
    for pattern, level in patterns:
        assert [text for at, text in messages if at == level and re.search(pattern, text)], pattern


def test_the_figures_of_the_page_are_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The memory that the page shows is what `omni-prefix footprint` prints with the options that it shows."""
    pytest.importorskip("typer")
    from conformance.cli import app  # noqa: PLC0415 - needs typer

    command, shown = code_blocks("sh", section("Sizing"))[0], code_blocks("text", section("Sizing"))[0]
    with pytest.raises(SystemExit) as ended:
        app(shlex.split(command.replace("\\\n", " "))[1:], prog_name="omni-prefix")
    assert ended.value.code == 0
    printed = {tuple(re.findall(r"[^│┃┏━]+", line.replace(" ", ""))) for line in capsys.readouterr().out.splitlines()}
    for line in shown.splitlines():
        assert tuple(line.replace(" ", "").split("│")) in printed
