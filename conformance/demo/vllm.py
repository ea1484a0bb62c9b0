"""The comparison on a real vLLM engine: every workload of the test lane once, and the same closing table."""

from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from conformance.demo.report import print_report
from conformance.vllm.environment import prepare
from conformance.vllm.workloads import WORKLOADS

SEEDS_APART = 1000


def run_vllm(console: Console, *, seed: int) -> bool:
    """Run all workloads on the V1 model runner; return whether all rows were right and each did what it is for."""
    prepare("v1")
    from conformance.vllm.run import Comparison  # noqa: PLC0415 - vLLM must not be imported before

    console.rule("[bold]A real vLLM engine, cache on against cache off", align="left")
    console.print(
        "A tiny random model on the CPU, float32, one thread. Every request runs twice, with prefix caching on and "
        "off.",
        highlight=False,
    )
    total: Counter[str] = Counter()
    notes: list[str] = []
    columns = (
        TextColumn("workloads"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Comparison("v1") as comparison, Progress(*columns, console=console) as progress:
        task = progress.add_task("workloads", total=len(WORKLOADS), what="")
        for workload in WORKLOADS:
            progress.update(task, what=workload.name)
            report = comparison.run(workload, seed=workload.seed + SEEDS_APART * seed)
            total.update(report.counts)
            for name in ("requests", "aborts", "rows_served", "rows_compared", "gaps", "differences"):
                total[name] += getattr(report, name)
            notes += [f"{workload.name}: {problem}" for problem in report.problems]
            notes += [f"{workload.name}: no {name}, which it is there for" for name in report.missing]
            progress.advance(task)
        progress.update(task, what="")
    counts = {
        "requests": total["requests"],
        "engine steps": total["steps"],
        "hits": total["hits"],
        "same-step hits": total["same_step_hits"],
        "preemptions": total["preemptions"],
        "resumed with more hit than was handed over": total["resumes_beyond_delivered"],
        "aborts": total["aborts"],
        "rows served from the cache": total["rows_served"],
        "rows compared": total["rows_compared"],
        "positions missing": total["gaps"],
        "differences": total["differences"],
    }
    return print_report(console, f"vLLM on the CPU, seed {seed}", counts, notes[:10]) and not notes
