"""`python -m conformance.vllm v1|v2 [WORKLOAD ...] [--seed N] [--json]`: run workloads, one line each.

The V2 runner needs a process of its own (see `environment`), so its tests run through here.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from conformance.vllm.environment import prepare
from conformance.vllm.workloads import BY_NAME, V2_NAMES, WORKLOADS


def main(arguments: list[str] | None = None) -> int:
    """Run the named workloads, or all. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m conformance.vllm")
    parser.add_argument("runner", choices=("v1", "v2"))
    parser.add_argument("workload", nargs="*", help=f"of {', '.join(BY_NAME)}; the everyday ones if left out")
    parser.add_argument("--seed", type=int, default=None, help="seed of the jobs; each workload's own if left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    chosen = parser.parse_intermixed_args(arguments)
    if unknown := [name for name in chosen.workload if name not in BY_NAME]:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    prepare(chosen.runner)
    from conformance.vllm.run import Comparison  # noqa: PLC0415 - vLLM must not be imported before

    everyday = V2_NAMES if chosen.runner == "v2" else [workload.name for workload in WORKLOADS]
    failed = 0
    with Comparison(chosen.runner) as comparison:
        for name in chosen.workload or everyday:
            report = comparison.run(BY_NAME[name], seed=chosen.seed)
            failed += not report.ok
            print(json.dumps(asdict(report)) if chosen.json else report.text(), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
