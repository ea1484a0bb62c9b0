"""vLLM's scheduler, as far as the cache can see it: chunked prefill, preemption, resume, finish, abort, streaming.

A block is published when the tokens that fill it are scheduled, so a later request of the same step may hit it. A
finished or aborted request gives its blocks back at once; when its id is reported is the caller's choice.

With `Limits.faithful` every decision is vLLM's own. Without, chunks are now and then shorter, a request is admitted as
soon as its first chunk fits, and also in a step that preempted another: more than vLLM does, and nothing that a cache
may not meet.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from conformance.schedules.blocks import Blocks
from conformance.schedules.content import Prefix, next_token


@dataclass(frozen=True)
class Chunk:
    """A streaming chunk: its tokens, and how many to sample behind them."""

    tokens: tuple[int, ...]
    outputs: int


@dataclass
class Request:
    """One request. `content` is its salt and its known tokens; `computed` counts the computed ones."""

    req: str
    content: Prefix
    length: int
    """Tokens at which it ends, or pauses for its next streaming chunk."""
    chunks: tuple[Chunk, ...] = ()
    """Streaming chunks still to come."""
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    status: str = "waiting"
    """waiting, running, preempted or paused (a streaming request between two chunks)."""

    @property
    def known(self) -> int:
        return len(self.content) - 1


@dataclass(frozen=True)
class Placed:
    """One request's part of a step, as the scheduler decided it. `kind`: new, resumed, continued or running."""

    request: Request
    kind: str
    start: int
    count: int
    blocks: tuple[int, ...]


@dataclass
class Limits:
    """What bounds a step, and whether it is filled as vLLM fills it."""

    max_tokens: int
    max_requests: int
    max_chunk: int
    """Bounds the tokens of one request in a step; with `faithful` only where there are others."""
    vocabulary: int
    faithful: bool = False


class Scheduler:
    """Requests and blocks. `schedule` makes a step; `forward_done` is what happens once its tokens are computed."""

    def __init__(self, blocks: Blocks, limits: Limits, rng: random.Random) -> None:
        self.blocks = blocks
        self.limits = limits
        self.rng = rng
        self.requests: list[Request] = []
        """Running ones first, in the order in which they came in; then the others, next to be admitted first."""
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        """A request ends, finished or aborted. Its blocks are free at once."""
        self.blocks.release(request.blocks)
        request.blocks = []
        self.requests.remove(request)

    def preempt(self, request: Request) -> None:
        """A running request starts over; it is the first to come back."""
        self.blocks.release(request.blocks)
        request.blocks, request.computed, request.status = [], 0, "preempted"
        self.requests.remove(request)
        self.requests.insert(len(self.requests) - len(self._not_running()), request)
        self.preemptions += 1

    def schedule(self) -> list[Placed]:
        """Make a step: running requests first, then whoever waits, as far as tokens and blocks go."""
        placed: list[Placed] = []
        room = self.limits.max_tokens
        preemptions = self.preemptions
        for request in [r for r in self.requests if r.status == "running"]:
            if request.status != "running" or self._is_full(placed):
                continue
            count = self._count(request.known - request.computed, room)
            if count and self._make_room(request, count, placed):
                placed.append(self._place(request, "running", count))
                room -= count
        stop = self.limits.faithful and self.preemptions > preemptions
        # Who holds blocks already is served first, or it could be left to wait for those who cannot have them.
        for request in sorted(self._not_running(), key=lambda r: r.status != "paused"):
            if stop or not room or self._is_full(placed, admitting=True):
                break
            admitted = self._admit(request, room)
            if admitted is None:
                break
            placed.append(admitted)
            room -= admitted.count
        return placed

    def forward_done(self, placed: list[Placed]) -> list[Request]:
        """The step's tokens are computed: requests sample, pause or end. Returns those that ended."""
        ended: list[Request] = []
        for part in placed:
            request = part.request
            if request not in self.requests or request.computed < request.known:
                continue
            if request.known < request.length:
                request.content += (next_token(request.content, self.limits.vocabulary),)
            elif request.chunks:
                request.content += request.chunks[0].tokens
                request.length = request.known + request.chunks[0].outputs
                request.chunks, request.status = request.chunks[1:], "paused"
                self.requests.remove(request)
                self.requests.append(request)
            else:
                ended.append(request)
                self.remove(request)
        return ended

    def _count(self, wanted: int, room: int) -> int:
        alone = self.limits.faithful and len(self.requests) == 1
        most = min(wanted, room, wanted if alone else self.limits.max_chunk)
        shorter = not self.limits.faithful and most > 1 and self.rng.random() < 0.3
        return self.rng.randint(1, most) if shorter else most

    def _not_running(self) -> list[Request]:
        return [request for request in self.requests if request.status != "running"]

    def _is_full(self, placed: list[Placed], *, admitting: bool = False) -> bool:
        if not self.limits.faithful:
            return len(placed) == self.limits.max_requests
        # Only admissions are bounded: whoever runs stays.
        return admitting and len(self.requests) - len(self._not_running()) >= self.limits.max_requests

    def _needed(self, request: Request, end: int) -> int:
        return -(-end // self.blocks.block_size) - len(request.blocks)

    def _make_room(self, request: Request, count: int, placed: list[Placed]) -> bool:
        """Preempt from the end of the running requests, until this one has its blocks, or is itself the one."""
        taken = {id(part.request) for part in placed}
        while self._needed(request, request.computed + count) > self.blocks.room():
            victim = [r for r in self.requests if r.status == "running" and id(r) not in taken][-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _admit(self, request: Request, room: int) -> Placed | None:
        kind = {"waiting": "new", "preempted": "resumed", "paused": "continued"}[request.status]
        hits = [] if kind == "continued" else self.blocks.match(request.content)
        computed = request.computed if kind == "continued" else len(hits) * self.blocks.block_size
        count = self._count(request.known - computed, room)
        held = len(request.blocks) + len(hits)
        must_fit = request.known if self.limits.faithful else computed + count
        if -(-must_fit // self.blocks.block_size) - held > self.blocks.room(hits):
            return None
        self.blocks.touch(hits)
        request.blocks.extend(hits)
        self.requests.remove(request)
        self.requests.insert(len(self.requests) - len(self._not_running()), request)
        request.computed, request.status = computed, "running"
        return self._place(request, kind, count)

    def _place(self, request: Request, kind: str, count: int) -> Placed:
        size = self.blocks.block_size
        start = request.computed
        fresh = [self.blocks.take() for _ in range(self._needed(request, start + count))]
        request.blocks.extend(fresh)
        request.computed += count
        for index in range(start // size, request.computed // size):
            self.blocks.publish(request.blocks[index], request.content[: (index + 1) * size + 1])
        return Placed(request, kind, start, count, tuple(request.blocks))
