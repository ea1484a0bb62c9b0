import json
import re

from conformance.page.model import page_data
from conformance.page.render import as_script, render, render_data
from tests.conformance.page.runs import faulty

SHARP = "</script><img src=x onerror=alert(1)>&\u2028'\""


def test_page_needs_nothing_else() -> None:
    """The page is one file: no address of anything is in it, of scripts, styles, pictures or fonts."""
    trace, run = faulty()
    page = render(trace, run, driver="fast-eager", command="omni-prefix page x")
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page)


def test_everything_is_escaped() -> None:
    """Nothing that a trace, a driver or a failure says becomes markup, in the page or in its data."""
    trace, run = faulty()
    data = page_data(trace, run, driver=SHARP, command=SHARP)
    data["failure"]["differences"][0]["req"] = SHARP
    data["moments"][0]["words"] = SHARP
    page = render_data(data)
    assert "<img" not in page
    assert page.count("</script>") == 2
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(embedded)["moments"][0]["words"] == SHARP


def test_script_data_is_the_same_json() -> None:
    """Escaping changes how the data is written, not what it says."""
    assert json.loads(as_script({"a": [SHARP, 1, None]})) == {"a": [SHARP, 1, None]}
