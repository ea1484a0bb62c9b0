"""Random traces of what an engine asks of the cache: how they are drawn, written, read and replayed.

`generate(seed)` draws one with the outcome due at each event; `replay` compares a driver's outcomes with them. The same
seed is the same trace, and a trace written to a file replays without the generator.
"""

from conformance.schedules.generator import Generated, generate
from conformance.schedules.replay import Mismatch, replay
from conformance.schedules.trace import Trace, parse, read

__all__ = ["Generated", "Mismatch", "Trace", "generate", "parse", "read", "replay"]
