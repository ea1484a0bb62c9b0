"""What makes the cache believable: a built-in engine, generators, drivers, the model checker's bridge.

Nothing in ``omni_prefix_fast`` imports from here.
"""
