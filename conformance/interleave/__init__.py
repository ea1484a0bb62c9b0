"""A serial scheduler for real code: who runs next is a decision, taken by a strategy at each point, and replayable.

`SerialRuntime` takes the place of `omni_prefix_fast.runtime.ThreadRuntime`. `strategies` decide, `explore` tries every
interleaving of a small program within a bound, `shrink` makes a failing one small.
"""

from conformance.interleave.explore import Explored, exhaustive, sample
from conformance.interleave.runtime import SerialRuntime
from conformance.interleave.shrink import shrink_switches
from conformance.interleave.strategies import Pct, Replay, Strategy, Uniform, drawn
from conformance.interleave.tasks import CrashError, DeadlockError, EndlessError, LeftBehindError, RunError

__all__ = [
    "CrashError",
    "DeadlockError",
    "EndlessError",
    "Explored",
    "LeftBehindError",
    "Pct",
    "Replay",
    "RunError",
    "SerialRuntime",
    "Strategy",
    "Uniform",
    "drawn",
    "exhaustive",
    "sample",
    "shrink_switches",
]
