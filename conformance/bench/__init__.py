"""What the cache costs: the same steps through this cache, two other implementations and a plain copy of the bytes."""
