"""Hypothesis for this folder: no deadline an example, since the machine is shared, and few enough to stay quick."""

from hypothesis import settings

settings.register_profile("omni_prefix_fast", deadline=None, max_examples=60)
settings.load_profile("omni_prefix_fast")
