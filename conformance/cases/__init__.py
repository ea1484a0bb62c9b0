"""What went wrong for people who do this job, each case as a trace with what is due. See README.md.

Built by code, not kept as files: `omni-prefix replay case:E16-running`, or `omni-prefix trace case:E01 FILE`.
"""

from conformance.cases.bounds import BOUNDS
from conformance.cases.case import Case
from conformance.cases.hits import HITS
from conformance.cases.others import OTHERS
from conformance.cases.plans import PLANS
from conformance.cases.returns import RETURNS

CASES: dict[str, Case] = {**HITS.cases, **PLANS.cases, **RETURNS.cases, **BOUNDS.cases, **OTHERS.cases}
"""Every case by its name."""

__all__ = ["CASES", "Case"]
