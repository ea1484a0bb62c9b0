"""A model whose every output is an exact function of the token prefix, in bits that cannot come out right by chance.

The state after a token is a 64-bit *chain* value, mixed from the value before it and the token. All rows of a position
are drawn from its chain value, so two positions have equal rows if and only if (collisions of 64 bits aside) they end
equal prefixes. Bit 0 of the chain is set by the first token and handed down: it says whether the request *speaks*, that
is, whether the key ``voice`` has rows for some of its tokens.

============  ===========  ==================  =====================================================================
key           dtype        shape of a row      who emits it
============  ===========  ==================  =====================================================================
hidden        f32 or bf16  (hidden_size,)      every token
``codes``     int64        (2,)                every token
``features``  float32      (2, 3)              every token; meant to be written late (deferred)
``voice``     float32      (4,)                three of four tokens of requests that speak; zeros for the others, and
                                               no tensor at all in a step where nobody has a row
============  ===========  ==================  =====================================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Chains = npt.NDArray[np.uint64]

CODES, FEATURES, VOICE = "codes", "features", "voice"
TOKEN_KEYS = (CODES, FEATURES, VOICE)

_MASK = (1 << 64) - 1
_SEED = 0x9E3779B97F4A7C15
_SALTS = {
    "hidden": 0x1D8E4E27C47D124F,
    CODES: 0xEB44ACCAB455D165,
    FEATURES: 0x2545F4914F6CDD1D,
    VOICE: 0x6A09E667F3BCC909,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model."""

    vocab_size: int = 61
    hidden_size: int = 8
    hidden_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class ModelRows:
    """The rows of some positions; ``emits`` says which of them have one under ``voice`` that is more than zeros."""

    hidden: torch.Tensor
    mm: dict[str, torch.Tensor]
    emits: npt.NDArray[np.bool_]


def _mix(value: int) -> int:
    """A bijection of 64-bit integers in which every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _noise(chains: Chains, lanes: int, salt: int) -> Chains:
    """``lanes`` 64-bit values for each chain value: the bijection above, over arrays."""
    steps = np.arange(1, lanes + 1, dtype=np.uint64) * np.uint64(_SEED) + np.uint64(salt)
    value = chains[:, None] ^ steps[None, :]
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    noise: Chains = value ^ (value >> np.uint64(31))
    return noise


def _as_float32(noise: Chains) -> torch.Tensor:
    """Random sign and mantissa, exponents from 2^-32 to 2^31: never zero, subnormal, infinite or NaN."""
    bits = noise.astype(np.uint32)
    exponent = np.uint32(95) + ((bits >> np.uint32(23)) & np.uint32(63))
    bits = (bits & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23))
    return torch.from_numpy(bits.view(np.float32))


def _as_bfloat16(noise: Chains) -> torch.Tensor:
    """The same in 16 bits."""
    bits = noise.astype(np.uint16)
    exponent = np.uint16(95) + ((bits >> np.uint16(7)) & np.uint16(63))
    bits = (bits & np.uint16(0x807F)) | (exponent << np.uint16(7))
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


class PrefixModel:
    """See the module. It has no state: what a request's prefix was is in its chain value."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.config = config or ModelConfig()
        if self.config.hidden_dtype not in {torch.float32, torch.bfloat16}:
            raise ValueError(f"hidden_dtype must be float32 or bfloat16, not {self.config.hidden_dtype}")

    def advance(self, chain: int | None, token: int) -> int:
        """The chain value after ``token``; ``chain`` is the one before it, None at the start."""
        speaks = token & 1 if chain is None else chain & 1
        before = _SEED if chain is None else chain
        return (_mix(before ^ _mix(token + 1)) & ~1) | speaks

    def chains(self, tokens: Sequence[int]) -> Chains:
        """The chain value at each position of a sequence, from scratch."""
        values: list[int] = []
        chain: int | None = None
        for token in tokens:
            chain = self.advance(chain, token)
            values.append(chain)
        return np.asarray(values, dtype=np.uint64)

    def sample(self, chain: int) -> int:
        """The token that follows: a function of the prefix, as greedy decoding is."""
        return _mix(chain ^ _SEED) % self.config.vocab_size

    def rows(self, chains: Chains) -> ModelRows:
        """All rows of positions with these chain values."""
        count, width = len(chains), self.config.hidden_size
        draw = _as_float32 if self.config.hidden_dtype is torch.float32 else _as_bfloat16
        emits = ((chains & np.uint64(1)) == 1) & ((chains >> np.uint64(8)) % np.uint64(4) != 0)
        voice = _as_float32(_noise(chains, 4, _SALTS[VOICE]))
        voice[torch.from_numpy(~emits)] = 0
        return ModelRows(
            hidden=draw(_noise(chains, width, _SALTS["hidden"])),
            mm={
                CODES: torch.from_numpy(_noise(chains, 2, _SALTS[CODES]).view(np.int64)),
                FEATURES: _as_float32(_noise(chains, 6, _SALTS[FEATURES])).reshape(count, 2, 3),
                VOICE: voice,
            },
            emits=emits,
        )
