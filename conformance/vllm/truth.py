"""What a row has to be, computed from tokens alone.

The hidden states of a model can be compared only with those of another run. The mm outputs of the test model are a hash
of the token prefix up to and including the row's own token: exact, different for every prefix, and known without
running anything. A row that belongs to another request, another position or an older tenant of a block cannot pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HASH_KEY = "prefix_hash"
"""One int64 row of three for each token."""
PLANE_KEY = "planes"
"""One int16 row of shape (2, 3) for each token: any feature rank is a row."""
CODES_KEY = "codes.audio"
"""One int32 row of four for each token; the key that the deferred workloads defer."""
SOMETIMES_KEY = "sometimes"
"""One int64 row of two for each token, in steps that have a request which asks for it."""
REFERENCE_KEY = "codes.ref"
"""Per request, never per token: a tensor of three rows, also in steps of three tokens."""
LIST_KEY = "first_token"
"""One entry for each request of the batch: its first token."""

TOKEN_KEYS = (HASH_KEY, PLANE_KEY, CODES_KEY, SOMETIMES_KEY)

Tokens = Sequence[int] | npt.NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit words in which every input bit moves about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _prefix_words(tokens: Tokens, lanes: int) -> npt.NDArray[np.uint64]:
    """`lanes` independent hashes of each prefix of `tokens`, `(n, lanes)`."""
    values = np.asarray(tokens, dtype=np.int64).astype(np.uint64)
    at = np.arange(1, len(values) + 1, dtype=np.uint64) * _GOLDEN
    lane = np.arange(1, lanes + 1, dtype=np.uint64) << np.uint64(40)
    terms = _mix(_mix(values[:, None] + lane[None, :]) ^ at[:, None])
    return _mix(np.cumsum(terms, axis=0, dtype=np.uint64))


def true_rows(key: str, tokens: Tokens, start: int = 0) -> npt.NDArray[np.signedinteger]:
    """Rows of a per-token key for positions `start` to the end of `tokens`."""
    if key == HASH_KEY:
        return _prefix_words(tokens, 3)[start:].view(np.int64)
    if key == SOMETIMES_KEY:
        return (_prefix_words(tokens, 2)[start:] | np.uint64(1)).view(np.int64)  # never zero
    if key == PLANE_KEY:
        return (_prefix_words(tokens, 6)[start:] & np.uint64(0x7FFF)).astype(np.int16).reshape(-1, 2, 3)
    if key == CODES_KEY:
        return (_prefix_words(tokens, 4)[start:] & np.uint64(0x7FFFFFFF)).astype(np.int32)
    raise KeyError(key)


def asks_for_sometimes(first_token: int) -> bool:
    """Whether a request is one of those that emit `SOMETIMES_KEY`: its prompt begins with an odd token."""
    return first_token % 2 == 1


def true_reference() -> npt.NDArray[np.int64]:
    """The value of `REFERENCE_KEY`, `(3, 2)`."""
    return np.arange(6, dtype=np.int64).reshape(3, 2) * 1001
