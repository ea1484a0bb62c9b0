"""Seeded faults of the reference model and of the production package, and how many traces it takes to catch each.

A fault of the model is a few lines that override an action of `omni_prefix_ref.Machine` or a part of its driver. A
fault of the production package is a changed function (`fast_edit`), in place for one run. Neither has a switch for any.
"""
