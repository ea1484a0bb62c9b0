import re
from pathlib import Path

import pytest

from conformance.drivers.subject import Run
from conformance.page.browser import find_browser, rendered
from conformance.page.render import write_page
from conformance.schedules.trace import Trace
from tests.conformance.page.runs import faulty, right

pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason="no chromium is installed"),
    pytest.mark.timeout(240),
]


def dom(path: Path, trace: Trace, run: Run, moment: int | None = None) -> str:
    """The page in a browser."""
    write_page(path, trace, run, driver="fast", command="omni-prefix page x")
    return rendered(path, moment=moment)


def test_page_works_in_a_browser(tmp_path: Path) -> None:
    """A browser runs the page's script to its end: every moment is there, and the address chooses one in all panes."""
    trace, run = faulty()
    page = dom(tmp_path / "page.html", trace, run, moment=7)
    moments = len(re.findall(r'<li class="[^"]*" id="m\d+"', page))
    assert f'data-ready="{moments}"' in page, "the script ended early"
    assert f"moment 7 of {moments - 1}" in page
    assert re.findall(r'<li class="[^"]*here[^"]*" id="(m\d+)"', page) == ["m7"]
    assert page.count('class="live"') == 1 + len(set(re.findall(r'<th class="slot[^"]*" scope="row">(\d+)', page)))
    assert page.count("wrong</span></li>") == 1, "the failure is the last of the moments"


def test_large_page_opens_at_its_failure_or_beginning(tmp_path: Path) -> None:
    """A run on threads, of hundreds of moments, is drawn whole: threads, tasks and reads each have their rows."""
    trace, run = right("fast-async", 17)
    assert len(run.moments) > 200
    page = dom(tmp_path / "page.html", trace, run)
    assert f'data-ready="{len(run.moments)}"' in page
    assert f"moment 0 of {len(run.moments) - 1}" in page
    for name in ("engine", "committer", "task 0"):
        assert f">{name}</div>" in page
