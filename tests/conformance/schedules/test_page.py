"""docs/traces.md says what the records are: all of them, every field, and an example that replays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from conformance.drivers.registry import names, subject
from conformance.schedules import parse, trace

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "traces.md").read_text(encoding="utf-8")
RECORDS = {
    name: each
    for name, each in vars(trace).items()
    if isinstance(each, type)
    and issubclass(each, BaseModel)
    and not name.startswith("_")
    and name not in {"Trace", "BaseModel"}
}


def _section(record: type[BaseModel]) -> str:
    """Where the page speaks of a record: under its own heading, or, of a part of one, anywhere among the records."""
    records = PAGE.split("## Records\n")[1].split("\n## ")[0]
    if (kind := record.model_fields.get("event")) is None:
        return records
    (found,) = [text for text in records.split("\n### ")[1:] if f"`{kind.default}`" in text.splitlines()[0]]
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_the_page_names_every_record_and_field(name: str) -> None:
    """Each record that is a line has a heading, and every field is named below it."""
    record = RECORDS[name]
    section = _section(record)
    missing = [field for field in record.model_fields if field != "event" and f"`{field}`" not in section]
    assert not missing


def test_the_page_names_no_field_that_there_is_not() -> None:
    """The first column of each table of the records holds fields of that record only."""
    for record in RECORDS.values():
        if "event" in record.model_fields and "`materialize`" not in _section(record).splitlines()[0]:
            assert set(re.findall(r"^\| `(\w+)` \|", _section(record), re.MULTILINE)) <= set(record.model_fields)


def test_the_page_gives_the_version_that_is_written() -> None:
    """What the header says if nothing is said."""
    assert f"of the format: {trace.Header.model_fields['version'].default}." in PAGE


@pytest.mark.parametrize("driver", ["reference", "fast-eager", "fast-async"])
def test_the_example_replays(driver: str) -> None:
    """As it stands."""
    example = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    assert subject(driver).run(parse(example[1].splitlines())).failure is None


def test_every_driver_is_on_the_page() -> None:
    """By the name that `--driver` takes."""
    assert not [name for name in names() if f"| `{name}` |" not in PAGE]
