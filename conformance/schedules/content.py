"""Content: a row is a function of its key and of the tokens up to its own, and of nothing else.

So the row due at a position can be told with no cache and no engine at hand.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TypeAlias

Prefix: TypeAlias = tuple[int, ...]
"""A salt (what conditions the whole request beside its tokens), then the tokens from the first on.

A token is a number from 0 on, or, inside a multimodal item's span, that item's (`item_token`): the engine's ids are the
same placeholder whatever the item, content is not.
"""

ROWS = 1 << 22
"""Rows are 1 .. `ROWS`, so that a float32 holds them, and a few lanes beyond, exactly. 0 is the row of zeros."""


def item_token(item: int) -> int:
    """What stands at each position of the span of a multimodal item, numbered from 0 on."""
    return -1 - item


@lru_cache(maxsize=1 << 16)
def row(key: str, prefix: Prefix) -> int:
    """The row of `key` at the last token of `prefix`."""
    digest = blake2b(repr((key, prefix)).encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % ROWS


def next_token(prefix: Prefix, vocabulary: int) -> int:
    """The token that a model samples after `prefix`: content decides it, as with greedy sampling."""
    return row("next token", prefix) % vocabulary
