"""Layers do not import upwards: the import order of `omni_prefix_fast`, the vLLM boundary, and who may know whom.

The sources are parsed, not imported, so that an import inside a function counts as well.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ORDER = (
    "errors",
    "types",
    "config",
    "runtime",
    "metrics",
    "events",
    "layout",
    "slots",
    "pool",
    "footprint",
    "device",
    "cuda",
    "recycler",
    "staging",
    "tasks",
    "log",
    "intake",
    "committer",
    "requests",
    "reads",
    "prefetch",
    "steps",
    "merge",
    "machine",
    "inspection",
    "manager",
)
"""The core of `omni_prefix_fast`, bottom-up: a module imports only what stands before it."""

EDGES = ("gate", "vllm")
"""May import any module of the core (`vllm/` the package's exported names too); nothing of the core imports them."""

CONFORMANCE = (
    "engine",
    "onoff",
    "schedules",
    "vllm",
    "demo",
    "cli",
    "bench",
    "device",
    "interleave",
    "tla",
    "cases",
    "drivers",
    "mutants",
    "faults",
    "page",
    "conform",
    "links",
)
"""The packages of `conformance`, bottom-up."""

CORE_LIBRARIES = {"numpy", "pydantic", "torch"}
EDGE_LIBRARIES = {
    "gate": CORE_LIBRARIES,
    # A sink is named in the deployment's settings, and imported by that name.
    "vllm": CORE_LIBRARIES | {"safetensors", "vllm", "<computed>"},
}


def _imports(source: str) -> Iterator[str]:
    """Every module that a source names in an import, wherever the import stands, or in a call that imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _names_of(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else "<computed>"


def _names_of(node: ast.ImportFrom) -> Iterator[str]:
    module = "." * node.level + (node.module or "")
    # `from package import module` names the module, not the package.
    yield from (
        (f"{module}.{name.name}" for name in node.names)
        if module in {"omni_prefix_fast", "conformance", "."}
        else (module,)
    )


def _findings(module: str, source: str) -> list[str]:
    """What is wrong with the imports of one module of `omni_prefix_fast`; `module` is its name, dots included."""
    top = module.split(".", maxsplit=1)[0]
    allowed = _allowed_siblings(top)
    libraries = EDGE_LIBRARIES.get(top, CORE_LIBRARIES)
    wrong = []
    for name in _imports(source):
        parts = name.split(".")
        if parts[0] == "omni_prefix_fast":
            if len(parts) > 1 and allowed is not None and parts[1] not in allowed:
                wrong.append(f"{module} imports {name}, which does not stand below it")
        elif parts[0] not in sys.stdlib_module_names | libraries:
            wrong.append(f"{module} imports {name}, which is not for it")
    return wrong


def _allowed_siblings(top: str) -> set[str] | None:
    """Which modules of the package one may import; None: any, and the package's exported names."""
    if top == "vllm":
        return None
    if top in ORDER:
        return set(ORDER[: ORDER.index(top)])
    if top == "__init__":
        return {*ORDER, "gate"}
    return {*ORDER, top}


def _modules(package: str) -> dict[str, Path]:
    folder = ROOT / package
    return {".".join(path.relative_to(folder).with_suffix("").parts): path for path in sorted(folder.rglob("*.py"))}


FAST = _modules("omni_prefix_fast")


@pytest.mark.parametrize("module", FAST)
def test_a_module_imports_only_what_stands_below_it(module: str) -> None:
    """No upward import, no foreign library, no vLLM outside `vllm/`, nothing of the reference model or conformance."""
    assert _findings(module, FAST[module].read_text(encoding="utf-8")) == []


def test_every_module_is_registered() -> None:
    """A new module gets its place in `ORDER`, or is an edge; a place without a module is removed."""
    tops = {module.split(".")[0] for module in FAST} - {"__init__"}
    assert tops == {*ORDER, *EDGES}


def test_the_architecture_page_lists_the_modules_in_this_order() -> None:
    """The page and this test say the same."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for package, order in (("omni_prefix_fast", ORDER + EDGES), ("conformance", CONFORMANCE)):
        section = page.split(f"## Layers of `{package}`")[1].split("\n## ")[0]
        assert tuple(re.findall(r"^\| `(\w+)/?` \|", section, flags=re.MULTILINE)) == order


def _wrong_in_conformance(module: str, source: str) -> list[str]:
    """What one module of `conformance` imports from a package that does not stand below its own."""
    package = module.split(".", maxsplit=1)[0]
    below = {*CONFORMANCE[: CONFORMANCE.index(package)], package}
    named = {n.removeprefix("conformance.").split(".")[0] for n in _imports(source) if n.startswith("conformance.")}
    return sorted(named - below)


@pytest.mark.parametrize("module", [module for module in _modules("conformance") if "." in module])
def test_a_package_of_conformance_imports_only_what_stands_below_it(module: str) -> None:
    """No circles among the harness's packages either."""
    assert _wrong_in_conformance(module, _modules("conformance")[module].read_text(encoding="utf-8")) == []


def test_an_upward_import_of_conformance_is_found() -> None:
    """The rule bites, wherever the import stands."""
    assert _wrong_in_conformance("drivers.fast", "def f():\n    from conformance.conform import session")
    assert not _wrong_in_conformance("drivers.fast", "from conformance.schedules.trace import Trace")


def test_every_package_of_conformance_is_registered() -> None:
    """And none that is gone."""
    assert {module.split(".")[0] for module in _modules("conformance") if "." in module} == {*CONFORMANCE}


@pytest.mark.parametrize("module", _modules("omni_prefix_ref"))
def test_the_reference_model_needs_the_standard_library_only(module: str) -> None:
    """It can be read, and run, beside nothing."""
    source = _modules("omni_prefix_ref")[module].read_text(encoding="utf-8")
    tops = {name.split(".")[0] for name in _imports(source)}
    assert tops <= sys.stdlib_module_names | {"omni_prefix_ref"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("slots", "from omni_prefix_fast.manager import OmniPrefixCacheManager"),
        ("slots", "from omni_prefix_fast import manager"),
        ("slots", "def f():\n    import omni_prefix_fast.reads"),
        ("slots", "from omni_prefix_fast.slots import SlotTable"),
        ("manager", "import vllm"),
        ("manager", "from vllm.v1.core import block_pool"),
        ("manager", "import importlib\nimportlib.import_module('vllm')"),
        ("manager", "name = 'vllm'\n__import__(name)"),
        ("manager", "from omni_prefix_fast.vllm import runner"),
        ("manager", "import omni_prefix_ref"),
        ("manager", "from conformance.engine import Engine"),
        ("gate", "import vllm"),
        ("gate", "from omni_prefix_fast.vllm.runner import x"),
        ("vllm.runner", "import conformance"),
        ("vllm.runner", "import flask"),
        ("__init__", "import omni_prefix_fast.vllm"),
        ("slots", "from .manager import x"),
    ],
)
def test_a_planted_import_is_found(module: str, source: str) -> None:
    """Each rule bites."""
    assert _findings(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("manager", "import threading\nimport torch\nfrom omni_prefix_fast.slots import SlotTable"),
        ("vllm.runner", "import vllm\nfrom omni_prefix_fast import OmniPrefixCacheManager\nimport safetensors.torch"),
        ("__init__", "from omni_prefix_fast.gate import stage_prefix_cache_config"),
    ],
)
def test_a_proper_import_is_not_found(module: str, source: str) -> None:
    """The rules do not forbid what is right."""
    assert _findings(module, source) == []


def test_the_package_imports_without_vllm() -> None:
    """On a machine without vLLM the package imports, and it pulls in neither the reference model nor conformance."""
    code = (
        "import sys; sys.modules['vllm'] = None; import omni_prefix_fast;"
        "sys.exit(any(name in sys.modules for name in ('omni_prefix_ref', 'conformance')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0
