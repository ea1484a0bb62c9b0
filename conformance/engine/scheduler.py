"""Which request computes how many tokens in a step: first come, first served, as vLLM's V1 scheduler does it.

- Running requests first, in order, each with as many tokens as the budget allows (chunked prefill). Whoever finds no
  free block preempts the last running request, itself if need be.
- A preempted request gives its blocks back, starts over at 0 and goes to the *front* of the waiting queue; when it is
  admitted again its prefix is matched again.
- Waiting requests next, unless this step preempted: only if all of the request's tokens would fit now.
- Finished and aborted requests give their blocks back at once, and are reported in the *next* step's output; by then
  the blocks may have a new tenant.
"""

from collections import deque
from dataclasses import dataclass, field

from conformance.engine.blocks import Block, BlockManager
from conformance.engine.requests import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request in its first step."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class CachedRequests:
    """Requests that the runner knows already: entry ``i`` of each list is about ``req_ids[i]``.

    ``new_block_ids`` adds to the block table, or replaces it if the request is resumed.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, under vLLM's field names."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str]


@dataclass(slots=True)
class SchedulerStats:
    """What happened, counted."""

    steps: int = 0
    admissions: int = 0
    hits: int = 0
    same_step_hits: int = 0
    recycled_same_step_hits: int = 0
    preemptions: int = 0
    resumes: int = 0
    resumed_hits: int = 0
    finished: int = 0
    aborts: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0


@dataclass(slots=True)
class _Step:
    """A step in the making."""

    budget: int
    chunk_limit: int
    new: list[NewRequest] = field(default_factory=list)
    resumed_as_new: list[NewRequest] = field(default_factory=list)
    cached: CachedRequests = field(default_factory=CachedRequests)
    num_tokens: dict[str, int] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)


class Scheduler:
    """Holds every live request and plans one step at a time."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        chunk_limit: int = 0,
        resumed_as_new: bool = False,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.chunk_limit = chunk_limit
        self.resumed_as_new = resumed_as_new
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self._finished_ids: set[str] = set()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, be it only reporting finished requests."""
        return bool(self.requests or self._finished_ids)

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        limit = (self.blocks.num_blocks - 1) * self.blocks.block_size
        if request.num_prompt + request.max_tokens > limit:
            raise ValueError(
                f"request {request.req_id!r} may grow to {request.num_prompt + request.max_tokens} tokens, but the "
                f"blocks hold {limit}: it could never finish"
            )
        if request.req_id in self.requests:
            raise ValueError(f"request id {request.req_id!r} is in use")
        self.requests[request.req_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, and advance the scheduled requests as if it were computed."""
        self.stats.steps += 1
        step = _Step(self.token_budget, self.chunk_limit if len(self.requests) > 1 else 0)
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        finished, self._finished_ids = self._finished_ids, set()
        for req_id, count in step.num_tokens.items():
            self.requests[req_id].num_computed += count
        total = sum(step.num_tokens.values())
        self.stats.computed_tokens += total
        new = step.new + step.resumed_as_new
        return SchedulerOutput(new, step.cached, step.num_tokens, total, finished, step.preempted)

    def finish(self, req_id: str, status: RequestStatus = RequestStatus.FINISHED) -> None:
        """End a request, by itself or by abort: its blocks are free at once, the next step reports it."""
        request = self.requests.pop(req_id)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = status
        self.blocks.free(req_id)
        self._finished_ids.add(req_id)
        if status is RequestStatus.ABORTED:
            self.stats.aborts += 1
        else:
            self.stats.finished += 1

    def _schedule_running(self, step: _Step) -> None:
        index = 0
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            count = self._chunk(request.num_tokens - request.num_computed, step)
            if not self._make_room(request, request.num_computed + count, step):
                break
            new_ids = self.blocks.allocate(request, request.num_computed + count, step=self.stats.steps)
            step.cached.req_ids.append(request.req_id)
            step.cached.new_block_ids.append((new_ids,) if new_ids else None)
            step.cached.num_computed_tokens.append(request.num_computed)
            self._charge(request, count, step)
            index += 1

    def _make_room(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Preempt from the back of the running list until the request fits; false if it had to go itself."""
        while not self.blocks.can_allocate(request, num_tokens):
            victim = self.running.pop()
            self.blocks.free(victim.req_id)
            victim.status = RequestStatus.PREEMPTED
            victim.num_computed = 0
            self.waiting.appendleft(victim)
            step.preempted.add(victim.req_id)
            self.stats.preemptions += 1
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, step: _Step) -> None:
        while self.waiting and step.budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            hits = self.blocks.match(request)
            # All of its tokens must fit before the first of them is computed.
            if not self.blocks.can_allocate(request, request.num_tokens, hits):
                break
            self.waiting.popleft()
            self._admit(request, hits, step)

    def _admit(self, request: Request, hits: list[Block], step: _Step) -> None:
        computed = len(hits) * self.blocks.block_size
        count = self._chunk(request.num_tokens - computed, step)
        self._count_hits(request, hits)
        self.blocks.allocate(request, computed + count, step=self.stats.steps, hits=hits)
        table = (self.blocks.block_ids(request.req_id),)
        if request.status is RequestStatus.WAITING or self.resumed_as_new:
            told_in = step.new if request.status is RequestStatus.WAITING else step.resumed_as_new
            told_in.append(NewRequest(request.req_id, request.tokens[: request.num_prompt], table, computed))
        else:
            step.cached.req_ids.append(request.req_id)
            step.cached.resumed_req_ids.add(request.req_id)
            step.cached.new_block_ids.append(table)
            step.cached.num_computed_tokens.append(computed)
        request.status = RequestStatus.RUNNING
        request.num_computed = computed
        self.running.append(request)
        self._charge(request, count, step)

    def _count_hits(self, request: Request, hits: list[Block]) -> None:
        stats = self.stats
        resumed = request.status is RequestStatus.PREEMPTED
        same_step = [block for block in hits if block.published_at == stats.steps]
        stats.admissions += 1
        stats.resumes += resumed
        stats.hits += bool(hits)
        stats.resumed_hits += resumed and bool(hits)
        stats.hit_tokens += len(hits) * self.blocks.block_size
        stats.same_step_hits += bool(same_step)
        stats.recycled_same_step_hits += any(block.tenants > 1 for block in same_step)

    def _chunk(self, wanted: int, step: _Step) -> int:
        if 0 < step.chunk_limit < wanted:
            wanted = step.chunk_limit
        return min(wanted, step.budget)

    def _charge(self, request: Request, count: int, step: _Step) -> None:
        step.num_tokens[request.req_id] = count
        step.budget -= count
