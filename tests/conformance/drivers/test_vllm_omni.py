"""What the page says of vllm-omni 0.30.0 is what is seen: case by case, and of no other case."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.bench.other import NAME, VERSION, find_wheel
from conformance.cases import CASES
from conformance.drivers.registry import subject

pytestmark = pytest.mark.timeout(360)  # the wheel may have to be downloaded first

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "other-implementations.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^\| ([A-Z]\d+[\w-]*) \|", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def seen() -> dict[str, str | None]:
    """By case, what ended otherwise than is due."""
    if find_wheel() is None:
        pytest.skip(f"the wheel of {NAME} {VERSION} cannot be downloaded here")
    other = subject("module:conformance.drivers.vllm_omni")
    ran = {name: other.run(case.make()).failure for name, case in CASES.items()}
    return {name: None if failure is None else str(failure) for name, failure in ran.items()}


def test_the_page_lists_what_is_seen(seen: dict[str, str | None]) -> None:
    """No case is missing in its tables, and none is there that is right."""
    assert len(LISTED) == len(set(LISTED))
    assert sorted(LISTED) == sorted(name for name, failure in seen.items() if failure is not None), seen


def test_a_row_of_another_tenant_is_seen_as_one(seen: dict[str, str | None]) -> None:
    """The worst of it: where zeros are due there is a row, and where an error is due there is none."""
    assert re.search(r"'c': \{'D': \[0, 0, 0, 0, \d+\]\}.*'c': \{'D': \[[1-9]\d+, [1-9]", seen["N1"] or "")
    assert "expected OmniPrefixCacheRowError, found no error" in (seen["E41-unsaved"] or "")
