"""Failures of the environment: injected into a trace, at any place, and what has to be true afterwards.

`inject` makes a device, an allocator, a clock or a thread fail at the chosen moment; `consumers` changes what consumers
of a trace do; `sweep` does each at each place. The rule is one for all: an error that is clear, or full recovery; no
wrong row ever, nothing left behind, nobody who waits for ever.
"""
