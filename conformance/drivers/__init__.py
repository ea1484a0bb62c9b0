"""Drivers: each applies the events of a trace to one implementation of the cache and tells what came of it."""
