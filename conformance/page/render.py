"""The page itself: data into a template, one file that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from conformance.drivers.subject import Run
from conformance.page.model import page_data
from conformance.schedules.trace import Trace

# Inside a script element these could end it, or be taken for markup; as escapes they are the same JSON.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(trace: Trace, run: Run, *, driver: str, command: str) -> str:
    """The page of a recorded run, as HTML. See `page_data` for the arguments."""
    return render_data(page_data(trace, run, driver=driver, command=command))


def render_data(data: dict[str, Any]) -> str:
    """The page of what `page_data` gave."""
    environment = Environment(
        loader=PackageLoader("conformance.page", "template"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css, js = (_source(environment, name) for name in ("page.css", "page.js"))
    # Not escaped by the template: `as_script` has escaped the one, and the others are our own files.
    raw = {"json": Markup(as_script(data)), "css": Markup(css), "js": Markup(js)}  # noqa: S704
    return environment.get_template("page.html").render(data=data, **raw)


def as_script(data: Any) -> str:
    """JSON that may stand inside a script element, whatever its strings hold."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return "".join(_ESCAPES.get(letter, letter) for letter in text)


def write_page(path: Path, trace: Trace, run: Run, *, driver: str, command: str) -> None:
    """Write the page of a recorded run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(trace, run, driver=driver, command=command), encoding="utf-8")


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    source, _, _ = environment.loader.get_source(environment, name)
    return source
