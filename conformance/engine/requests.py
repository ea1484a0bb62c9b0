"""A request as the scheduler sees it: its tokens, how many of them are computed, and the digests of its full blocks."""

from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b

ROOT_DIGEST = b""


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()
    ABORTED = auto()


def block_digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """The digest of a full block: of its own tokens and, through ``parent``, of everything before them."""
    state = blake2b(parent, digest_size=16)
    for token in tokens:
        state.update(token.to_bytes(8, "little", signed=True))
    return state.digest()


@dataclass(slots=True)
class Request:
    """One request. ``tokens`` grows as tokens are sampled; ``num_computed`` falls to 0 when it is preempted."""

    req_id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    block_size: int
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0
    digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tokens or self.max_tokens < 1:
            raise ValueError(f"request {self.req_id!r} needs at least one prompt token and one token to sample")
        self._extend_digests()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_done(self) -> bool:
        """Whether the last token to be sampled has been sampled."""
        return len(self.tokens) - self.num_prompt >= self.max_tokens

    @property
    def is_live(self) -> bool:
        """Whether the scheduler still has work for it."""
        return self.status not in {RequestStatus.FINISHED, RequestStatus.ABORTED}

    def append_token(self, token: int) -> None:
        """Add a sampled token; its block gets a digest once it is full."""
        self.tokens.append(token)
        self._extend_digests()

    def _extend_digests(self) -> None:
        size = self.block_size
        while (len(self.digests) + 1) * size <= len(self.tokens):
            start = len(self.digests) * size
            parent = self.digests[-1] if self.digests else ROOT_DIGEST
            self.digests.append(block_digest(parent, tuple(self.tokens[start : start + size])))
