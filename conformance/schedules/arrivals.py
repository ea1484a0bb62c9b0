"""Random requests whose prompts begin alike: shared documents, an item in some of them, and tails of their own."""

from __future__ import annotations

import random
from collections.abc import Set as AbstractSet

from conformance.schedules.content import item_token
from conformance.schedules.scheduler import Chunk, Request

IDS = 8
"""Ids are few, so that each is used again soon after its request ended."""


class Arrivals:
    """Draws requests that `capacity` token slots can hold. `stream` and `item` are probabilities."""

    def __init__(self, rng: random.Random, *, capacity: int, vocabulary: int, stream: float, item: float) -> None:
        self.rng = rng
        self.capacity = capacity
        self.vocabulary = vocabulary
        self.stream = stream
        self.item = item
        self.documents = [self._document(number) for number in range(rng.randint(1, 3))]

    def draw(self, alive: AbstractSet[str]) -> Request:
        """A request under an id that is not in use."""
        req = self.rng.choice([f"r{i}" for i in range(IDS) if f"r{i}" not in alive])
        salt = self.rng.choice((0, 0, 0, 1))
        prompt = self._prompt()
        chunks: tuple[Chunk, ...] = ()
        if self.rng.random() < self.stream:
            chunks = tuple(self._chunk() for _ in range(self.rng.randint(1, 2)))
        room = self.capacity - len(prompt) - sum(len(chunk.tokens) + chunk.outputs for chunk in chunks)
        if room < 0:
            chunks, room = (), self.capacity - len(prompt)
        return Request(req, (salt, *prompt), len(prompt) + self.rng.randint(0, min(room, 4)), chunks)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(self.vocabulary) for _ in range(count))

    def _document(self, number: int) -> tuple[int, ...]:
        """Tokens that prompts share; now and then with an item, whose span ends wherever it ends in a block."""
        tokens = list(self._tokens(self.capacity))
        if self.rng.random() < self.item:
            start = self.rng.randrange(self.capacity // 2)
            for at in range(start, min(start + self.rng.randint(1, 6), self.capacity - 3)):
                tokens[at] = item_token(2 * number)
        return tuple(tokens)

    def _prompt(self) -> tuple[int, ...]:
        """The beginning of a document, its item whole or not there at all, or another item in its place; and a tail."""
        document = self.rng.choice(self.documents)
        end = self.rng.randint(0, self.capacity - 3)
        while 0 < end < self.capacity - 3 and document[end - 1] == document[end] < 0:
            end += 1
        other = self.rng.random() < 0.3
        shared = tuple(token - other if token < 0 else token for token in document[:end])
        tail = self._tokens(self.rng.randint(0 if shared else 1, 3))
        return (shared + tail)[: self.capacity - 2]

    def _chunk(self) -> Chunk:
        return Chunk(self._tokens(self.rng.randint(1, 3)), self.rng.randrange(3))
