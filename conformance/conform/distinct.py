"""How many distinct things were seen, without keeping them all: the smallest hashes tell.

Up to `KEPT` the count is exact. Beyond, the kept hashes are the `KEPT` smallest of all, and how densely they lie tells
how many there are, to about half a per cent. Neither the order nor the split of the work makes a difference.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from hashlib import blake2b

KEPT = 1 << 15
SPACE = 1 << 64


def fingerprint(words: Iterable[str]) -> int:
    """64 bits of a row of words."""
    return int.from_bytes(blake2b("\n".join(words).encode(), digest_size=8).digest(), "big")


class Distinct:
    """A set of which only a bounded part is kept."""

    def __init__(self, hashes: Iterable[int] = (), *, full: bool = False) -> None:
        self.hashes = set(hashes)
        self.full = full
        """Whether a hash was dropped: from here on the count is an estimate."""

    def add(self, hashed: int) -> None:
        """One more."""
        self.hashes.add(hashed)
        if len(self.hashes) >= 2 * KEPT:
            self._shrink()

    def merge(self, other: Distinct) -> None:
        """All of another's."""
        self.hashes |= other.hashes
        self.full |= other.full
        self._shrink()

    def _shrink(self) -> None:
        if len(self.hashes) > KEPT:
            self.hashes = set(heapq.nsmallest(KEPT, self.hashes))
            self.full = True

    def told(self) -> str:
        """The count in words."""
        self._shrink()
        if not self.full:
            return f"{len(self.hashes):,}"
        return f"about {(KEPT - 1) * SPACE // max(self.hashes):,}"

    def to_json(self) -> dict[str, object]:
        """As a JSON value."""
        self._shrink()
        return {"hashes": sorted(self.hashes), "full": self.full}

    @classmethod
    def from_json(cls, value: dict[str, object]) -> Distinct:
        """The inverse of `to_json`."""
        hashes = value["hashes"]
        assert isinstance(hashes, list)
        return cls(hashes, full=bool(value["full"]))
