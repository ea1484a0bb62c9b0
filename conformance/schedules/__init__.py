"""Random traces of what an engine asks of the cache: how they are drawn, written, read and replayed.

`generate(seed)` draws one with the outcome due at each event; `replay` compares a driver's outcomes with them. The same
seed is the same trace, and a trace written to a file replays without the generator.

`conformance.engine` has a scheduler and blocks, too. It computes: its rows come through block tables and slots of a KV
cache of its own, under vLLM's object names, and it does only what vLLM does. Here nothing is computed, content stands
for digests, and chance takes part in every decision, within what vLLM allows. Each is held against vLLM by a test of
its own.
"""

from conformance.schedules.generator import Generated, generate
from conformance.schedules.replay import Mismatch, replay
from conformance.schedules.trace import Trace, parse, read

__all__ = ["Generated", "Mismatch", "Trace", "generate", "parse", "read", "replay"]
