"""The pages do not drift: links lead somewhere, named functions are where a link says, the README's example runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(?:#[^)]*)?\)")


def _local_links(page: Path) -> list[tuple[str, Path]]:
    found = LINK.findall(page.read_text(encoding="utf-8"))
    return [(text, page.parent / target) for text, target in found if "://" not in target]


def test_there_are_pages_and_links() -> None:
    """The checks below check something."""
    assert len(PAGES) >= 5
    assert sum(len(_local_links(page)) for page in PAGES) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    """Every relative link names a file of the repository."""
    assert [target for _, target in _local_links(page) if not target.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_named_function_is_defined_where_the_link_says(page: Path) -> None:
    """A link whose text is a name in code leads to the source that defines it."""
    for text, target in _local_links(page):
        if target.suffix == ".py" and (name := re.fullmatch(r"`(\w+)`", text)):
            source = target.read_text(encoding="utf-8")
            assert re.search(rf"^\s*(?:def|class) {name[1]}\b", source, re.MULTILINE), f"{text} is not in {target.name}"


def test_the_example_of_the_readme_runs() -> None:
    """Every Python block of the README is executed as it stands."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})  # noqa: S102 - our own page


def test_make_targets_named_in_the_pages_exist() -> None:
    """Whoever follows a page finds the lane that it names."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, page.name
