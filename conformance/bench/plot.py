"""One picture of what the figures say: cost against batch size, hit length and number of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.bench.contenders import ASYNC, COPY, EAGER, OMNI, PLAIN
from conformance.bench.decode import STEP
from conformance.bench.hits import added
from conformance.bench.measure import Figure
from conformance.bench.report import Report, Result

STYLES = {
    EAGER: ("this cache, eager", "#0b5fa5", "o", "-"),
    ASYNC: ("this cache, asynchronous", "#4fa3dd", "s", "-"),
    PLAIN: ("straightforward", "#c07b2c", "^", "-"),
    OMNI: ("vllm-omni 0.30.0", "#a33a3a", "v", "-"),
    COPY: ("plain copy", "#555555", "", ":"),
}

Cost = Callable[[Mapping[str, Figure]], float]


def draw(report: Report, path: Path) -> None:
    """Write the picture as SVG."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra of its own

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "bench",
        "font.size": 9,
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
    with mpl.rc_context(settings):
        figure, (decode, hit, blocks) = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
        _panel(decode, _by(report, "decode", "batch", deferred=0), lambda parts: parts[STEP].median)
        decode.set(title="decode step: save + materialize", xlabel="batch size")
        _panel(hit, _by(report, "hit", "rows"), added)
        hit.set(title="what a hit adds to its step", xlabel="rows hit")
        for result in report.results:
            if result.work.startswith("blocks"):
                counts = sorted(result.figures, key=int)
                costs = [result.figures[count][STEP].median for count in counts]
                _line(blocks, result.work.removeprefix("blocks, "), list(map(int, counts)), costs)
        blocks.set(title="the same step, batch 256", xlabel="blocks of the cache", xscale="log", ylim=(0, None))
        blocks.minorticks_off()
        blocks.set_ylabel("microseconds")
        handles, labels = decode.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)


def _by(report: Report, work: str, along: str, **fixed: int) -> dict[int, Result]:
    """Results of one family, by one parameter."""
    found = (r for r in report.results if r.work == work and all(r.parameters[name] == v for name, v in fixed.items()))
    return {r.parameters[along]: r for r in sorted(found, key=lambda r: r.parameters[along])}


def _panel(axes: Any, results: Mapping[int, Result], cost: Cost) -> None:
    for name in STYLES:
        points = {x: cost(r.figures[name]) for x, r in results.items() if name in r.figures}
        positive = {x: y for x, y in points.items() if y > 0}
        if positive:
            _line(axes, name, list(positive), list(positive.values()))
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(list(results), [f"{x:,}" for x in results])
    axes.minorticks_off()
    axes.set_ylabel("microseconds")


def _line(axes: Any, name: str, x: list[int], seconds: list[float]) -> None:
    label, colour, marker, line = STYLES[name]
    axes.plot(x, [s * 1e6 for s in seconds], label=label, color=colour, marker=marker, linestyle=line, markersize=4)
