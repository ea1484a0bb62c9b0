"""Seeded random requests with the shapes that prefix caches meet, and get wrong.

Shared system prompts with different tails, the same prompt several times at once, prompts shorter than a block and
exact multiples of it, follow-ups that continue what an earlier request said, and aborts at any time.
"""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """What to draw. Lengths are in tokens; ``abort_rate`` is the share of requests that are aborted."""

    num_requests: int
    block_size: int
    vocab_size: int
    max_prompt: int = 40
    max_output: int = 8
    num_prefixes: int = 6
    burst_rate: float = 0.15
    abort_rate: float = 0.08
    requests_per_step: float = 0.6

    def __post_init__(self) -> None:
        if self.max_prompt < 2 * self.block_size + 2:
            raise ValueError(f"max_prompt={self.max_prompt} has no room for two blocks of {self.block_size} and a tail")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to come: when (in engine steps), what, and after how many further steps it is aborted, if at all."""

    req_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrival: int
    abort_after: int | None = None


def make_workload(seed: int, config: WorkloadConfig, *, prefix: str = "r") -> list[PlannedRequest]:
    """Draw the requests of one run, by arrival."""
    rng = Random(seed)
    prompts = _Prompts(rng, config)
    planned: list[PlannedRequest] = []
    arrival = 0
    while len(planned) < config.num_requests:
        prompt = prompts.draw()
        copies = rng.randint(2, 4) if rng.random() < config.burst_rate else 1
        for _ in range(min(copies, config.num_requests - len(planned))):
            abort_after = rng.randint(0, 10) if rng.random() < config.abort_rate else None
            req_id = f"{prefix}{len(planned)}"
            planned.append(PlannedRequest(req_id, prompt, rng.randint(1, config.max_output), arrival, abort_after))
        while rng.random() > config.requests_per_step:
            arrival += 1
    return planned


class _Prompts:
    """Draws prompts; remembers some, so that later ones can share their beginnings."""

    def __init__(self, rng: Random, config: WorkloadConfig) -> None:
        self._rng = rng
        self._config = config
        self._prefixes = [self._tokens(rng.randint(1, config.max_prompt - 2)) for _ in range(config.num_prefixes)]

    def draw(self) -> tuple[int, ...]:
        rng, config = self._rng, self._config
        kind = rng.random()
        if kind < 0.08:
            return self._tokens(rng.randint(1, config.block_size))
        if kind < 0.2:
            blocks = rng.randint(1, config.max_prompt // config.block_size)
            return self._tokens(blocks * config.block_size)
        prefix = rng.choice(self._prefixes)
        if kind < 0.3:
            # Cut to whole blocks: the hit stops one block short, since the last token is always computed.
            prefix = prefix[: max(len(prefix) // config.block_size, 1) * config.block_size]
            prompt = prefix
        else:
            prompt = prefix + self._tokens(rng.randint(1, config.max_prompt - len(prefix)))
        if rng.random() < 0.2:
            self._prefixes[rng.randrange(len(self._prefixes))] = prompt[: config.max_prompt - 2]
        return prompt

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._config.vocab_size) for _ in range(count))
