"""The table of seeded faults of the production package, and those that were tried and turned out to be none."""

from __future__ import annotations

from conformance.mutants.fast_books import BOOKS
from conformance.mutants.fast_edit import FastMutant
from conformance.mutants.fast_handover import HANDOVER
from conformance.mutants.fast_locks import LOCKS
from conformance.mutants.fast_rows import ROWS
from conformance.mutants.fast_threads import THREADS

FAST_MUTANTS: tuple[FastMutant, ...] = (*ROWS, *HANDOVER, *BOOKS, *THREADS, *LOCKS)
"""Every seeded fault of the production package."""

EQUIVALENT = {
    "a span as long as some blocks is gathered as blocks, without a look at where it begins": (
        "a hit ends at the end of a block, so a span of whole blocks' length begins at the beginning of one"
    ),
    "a committed slot keeps its place in the log": (
        "a place in the log is looked at in transit only, and a claim resets it"
    ),
    "rows gathered before an unplan stay with the read": "it is planned again, and gathered again over them",
    "a gather that came too late is taken for a fetch": (
        "only the prefetch thread can come too late, and a read that is planned again is given to it again"
    ),
    "two threads gather one read at once, without its lock": "pinned rows do not change; the second finds it fetched",
}
"""Changes of the production package that change nothing anybody can see, each with the reason."""
