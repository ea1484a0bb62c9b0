"""Workloads and the comparison on a real vLLM engine: with the cache on and with it off, the same bits."""
