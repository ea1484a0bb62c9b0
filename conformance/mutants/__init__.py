"""Seeded faults of the reference model, and how many random traces it takes to catch each.

A fault is a few lines that override an action of `omni_prefix_ref.Machine` or a part of its driver; the model itself
and the production package have no switch for any of them.
"""
