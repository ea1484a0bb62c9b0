"""The workloads: what each is for, its requests, and what must have happened for it to count.

A workload is data. `run.py` runs it twice, with the cache and without prefix caching, and compares.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conformance.vllm.engine import BLOCK_SIZE, DECLARED_KEYS, VOCABULARY, EngineSettings
from conformance.vllm.truth import CODES_KEY, HASH_KEY


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it arrives, in steps of its phase, and how many steps later it is aborted, if it is."""

    req_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrives: int = 0
    abort_after: int | None = None


Phases = Sequence[Sequence[Job]]
"""Jobs of one phase run together; the engine is idle between two phases."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload.

    Attributes:
        name: its name.
        about: what it is for.
        engine: the engine with the cache.
        jobs: requests for a seed.
        must: counts that have to be above zero, by name (`Counts`, or what `run.Report` adds).
        seed: the seed of its everyday run.
    """

    name: str
    about: str
    engine: EngineSettings
    jobs: Callable[[random.Random], Phases]
    must: tuple[str, ...]
    seed: int = 1


def _prompt(rng: random.Random, length: int, *, odd: bool | None = None) -> tuple[int, ...]:
    """Random tokens; the first one even, odd, or either."""
    tokens = [rng.randrange(2, VOCABULARY) for _ in range(length)]
    if odd is not None and tokens:
        tokens[0] = 2 * rng.randrange(1, VOCABULARY // 2 - 1) + odd
    return tuple(tokens)


# ---------------------------------------------------------------------------------------------- what is submitted when


def _shared_prefixes(rng: random.Random) -> Phases:
    prefixes = [_prompt(rng, n) for n in (64, 96, 160)]
    phases = []
    for phase in range(3):
        jobs = []
        for i in range(8):
            prefix = prefixes[rng.randrange(len(prefixes))]
            cut = rng.randrange(len(prefix) // 2, len(prefix) + 1)
            prompt = prefix[:cut] + _prompt(rng, rng.randrange(1, 40))
            jobs.append(Job(f"p{phase}r{i}", prompt, rng.randrange(1, 12), arrives=rng.randrange(6)))
        phases.append(jobs)
    return phases


def _identical_at_once(rng: random.Random) -> Phases:
    phases = []
    for phase in range(3):
        same = _prompt(rng, rng.choice((65, 96, 150)))
        jobs = [Job(f"p{phase}r{i}", same, 4) for i in range(5)]
        jobs += [Job(f"p{phase}t{i}", same[:64] + _prompt(rng, 9), 3, arrives=i) for i in range(2)]
        phases.append(jobs)
    return phases


def _chunked(rng: random.Random) -> Phases:
    prefix = _prompt(rng, 128)
    jobs = [
        Job(f"r{i}", prefix[: rng.randrange(20, 129)] + _prompt(rng, rng.randrange(1, 150)), 5, arrives=2 * i)
        for i in range(10)
    ]
    return [jobs, [Job(f"again{i}", job.prompt, 3) for i, job in enumerate(jobs[:4])]]


def _preempted(rng: random.Random) -> Phases:
    prefixes = [_prompt(rng, 96) for _ in range(2)]
    jobs = []
    for i in range(10):
        prompt = rng.choice(prefixes)[: rng.choice((40, 64, 96))] + _prompt(rng, rng.randrange(1, 60))
        jobs.append(Job(f"r{i}", prompt, rng.randrange(30, 90), arrives=rng.randrange(30)))
    return [jobs]


def _long_prefills(rng: random.Random) -> Phases:
    """Long prompts that share much, prefilled several at once in a cache that cannot hold them all.

    A request preempted while prefilling finds the rest of its prefix computed by another one when it comes back: more
    than was ever handed over for it.
    """
    shared = _prompt(rng, 320)
    jobs = []
    for i in range(6):
        prompt = shared[: rng.choice((192, 256, 320))] + _prompt(rng, rng.randrange(8, 60))
        jobs.append(Job(f"r{i}", prompt, rng.randrange(20, 50), arrives=rng.randrange(4)))
    jobs += [Job(f"d{i}", _prompt(rng, 30), 100, arrives=0) for i in range(4)]
    return [jobs]


def _aborts(rng: random.Random) -> Phases:
    prefix = _prompt(rng, 128)
    phases = []
    for phase in range(2):
        jobs = []
        for i in range(12):
            prompt = prefix[: rng.choice((32, 64, 96, 128))] + _prompt(rng, rng.randrange(1, 100))
            abort = rng.randrange(1, 6) if i % 2 else None
            jobs.append(Job(f"p{phase}r{i}", prompt, 10, arrives=rng.randrange(8), abort_after=abort))
        phases.append(jobs)
    return phases


def _reused_blocks(rng: random.Random) -> Phases:
    prompts = [_prompt(rng, rng.randrange(40, 130)) for _ in range(6)]
    return [
        [Job(f"p{phase}r{i}", rng.choice(prompts) + _prompt(rng, 3), 6, arrives=i) for i in range(6)]
        for phase in range(6)
    ]


def _sometimes_recycled(rng: random.Random) -> Phases:
    """Requests that emit the key fill the cache, others that do not take their blocks, and are then hit themselves."""
    phases: list[list[Job]] = []
    for round_ in range(3):
        quiet = [_prompt(rng, 100, odd=False) for _ in range(3)]
        phases.append([Job(f"loud{round_}.{i}", _prompt(rng, 120, odd=True), 4) for i in range(3)])
        phases.append([Job(f"quiet{round_}.{i}", p, 4) for i, p in enumerate(quiet)])
        hits = [Job(f"hits{round_}.{i}", p + _prompt(rng, 5), 4) for i, p in enumerate(quiet)]
        if round_:  # with a request that emits the key beside them, the hits are handed zeros; without, nothing
            hits.append(Job(f"beside{round_}", _prompt(rng, 20, odd=True), 4))
        phases.append(hits)
    return phases


def _sometimes_mixed(rng: random.Random) -> Phases:
    prefixes = [_prompt(rng, 96, odd=i % 2 == 0) for i in range(4)]
    return [
        [
            Job(
                f"p{p}r{i}", rng.choice(prefixes)[:64] + _prompt(rng, rng.randrange(1, 50)), 8, arrives=rng.randrange(9)
            )
            for i in range(8)
        ]
        for p in range(3)
    ]


def _block_edges(rng: random.Random) -> Phases:
    base = _prompt(rng, 4 * BLOCK_SIZE + 1)
    lengths = [1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 128, 129]
    return [[Job(f"p{phase}n{n}", base[:n], 3) for n in lengths] for phase in range(3)]


def _mixture(rng: random.Random) -> Phases:
    """Everything at once: shared prefixes, copies, long prompts, preemptions, aborts, both kinds of first token."""
    prefixes = [_prompt(rng, rng.choice((64, 96, 160, 224)), odd=i % 2 == 0) for i in range(4)]
    phases = []
    for phase in range(2):
        jobs = []
        for i in range(24):
            prefix = rng.choice(prefixes)
            prompt = prefix[: rng.randrange(1, len(prefix) + 1)] + _prompt(rng, rng.randrange(1, 70))
            arrives = rng.randrange(30)
            abort = rng.randrange(1, 20) if rng.random() < 0.2 else None
            copies = 3 if rng.random() < 0.15 else 1
            jobs += [
                Job(f"p{phase}r{i}c{c}", prompt, rng.randrange(1, 50), arrives=arrives, abort_after=abort)
                for c in range(copies)
            ]
        phases.append(jobs)
    return phases


def _small_mixture(rng: random.Random) -> Phases:
    """The mixture with fewer and shorter requests, for a runner whose steps are slow."""
    prefixes = [_prompt(rng, rng.choice((64, 96)), odd=i % 2 == 0) for i in range(3)]
    jobs = []
    for i in range(12):
        prefix = rng.choice(prefixes)
        prompt = prefix[: rng.randrange(32, len(prefix) + 1)] + _prompt(rng, rng.randrange(1, 40))
        arrives = rng.randrange(8)
        abort = rng.randrange(1, 8) if i % 4 == 3 else None
        jobs += [
            Job(f"r{i}c{c}", prompt, rng.randrange(6, 20), arrives=arrives, abort_after=abort)
            for c in range(2 if i % 3 == 0 else 1)
        ]
    return [jobs]


# ------------------------------------------------------------------------------------------------------- the table

_SMALL = EngineSettings(num_blocks=17, max_num_seqs=8)
_DEFERRED: dict[str, Any] = {"policy": DECLARED_KEYS | {"deferred_keys": [CODES_KEY, HASH_KEY]}}
_TIGHT_BUDGET: dict[str, Any] = _DEFERRED | {"cache": {"gpu_staging_bytes": 4096}}
_NO_HIDDEN: dict[str, Any] = {
    "policy": DECLARED_KEYS | {"deferred_keys": [CODES_KEY], "needs_full_hidden_states": False}
}
_ASYNC: dict[str, Any] = {"eager": False}
_CHURN = ("hits", "same_step_hits", "preemptions", "resumes", "aborts", "blocks_reused", "chunked_prefills")


def _late(lag: int, on: str) -> dict[str, Any]:
    return {"materialize_lag": lag, "materialize_on": on}


def _mixed(omni_prefix: Mapping[str, Any]) -> EngineSettings:
    return EngineSettings(
        num_blocks=25,
        max_num_batched_tokens=256,
        max_num_seqs=10,
        long_prefill_token_threshold=64,
        omni_prefix=omni_prefix,
    )


WORKLOADS: tuple[Workload, ...] = (
    Workload("shared-prefixes", "prompts that share prefixes", EngineSettings(), _shared_prefixes, ("hits",)),
    Workload(
        "identical-at-once",
        "several identical prompts in one step: hits on blocks computed in the same forward",
        EngineSettings(),
        _identical_at_once,
        ("hits", "same_step_hits"),
    ),
    Workload(
        "chunked-prefill",
        "prompts longer than a step's token budget",
        EngineSettings(max_num_batched_tokens=64),
        _chunked,
        ("hits", "chunked_prefills"),
    ),
    Workload(
        "preempted",
        "a KV cache so small that requests are preempted and resumed",
        EngineSettings(num_blocks=17, max_num_seqs=8, max_model_len=384),
        _preempted,
        ("hits", "preemptions", "resumes", "rows_again"),
    ),
    Workload(
        "long-prefills-preempted",
        "several long prefills at once in a small cache: a resumed request finds more than it was handed",
        EngineSettings(
            num_blocks=17,
            max_num_batched_tokens=128,
            max_num_seqs=10,
            long_prefill_token_threshold=32,
        ),
        _long_prefills,
        ("hits", "preemptions", "resumes", "resumes_beyond_delivered", "chunked_prefills"),
    ),
    Workload(
        "aborts",
        "requests aborted in mid-flight, their blocks hit by others",
        EngineSettings(max_num_batched_tokens=128),
        _aborts,
        ("hits", "aborts"),
    ),
    Workload(
        "reused-blocks",
        "more content than blocks: every block changes hands",
        EngineSettings(num_blocks=13, max_num_seqs=3, max_model_len=256),
        _reused_blocks,
        ("hits", "blocks_reused"),
    ),
    Workload(
        "key-sometimes-recycled",
        "a key that only some requests emit, on blocks that had rows of it before",
        EngineSettings(num_blocks=17, max_num_seqs=4),
        _sometimes_recycled,
        ("hits", "blocks_reused", "zero_rows"),
    ),
    Workload(
        "key-sometimes-mixed",
        "requests that emit a key and others that do not, in the same steps",
        _SMALL,
        _sometimes_mixed,
        ("hits", "blocks_reused"),
    ),
    Workload(
        "block-edges",
        "prompts shorter than a block, exact multiples of it, and one more",
        EngineSettings(),
        _block_edges,
        ("hits", "same_step_hits"),
    ),
    Workload(
        "deferred",
        "keys written when a request finishes, with everything else going on",
        _mixed(_DEFERRED),
        _mixture,
        _CHURN,
        seed=11,
    ),
    Workload(
        "deferred-tight-budget",
        "deferred keys with a device budget of a few rows",
        _mixed(_TIGHT_BUDGET),
        _mixture,
        _CHURN,
        seed=12,
    ),
    Workload(
        "without-hidden",
        "a model that skips hidden states and defers its codes",
        _mixed(_NO_HIDDEN),
        _mixture,
        _CHURN,
        seed=13,
    ),
    Workload("late-1-inline", "handed over one step late", _mixed(_late(1, "engine")), _mixture, (*_CHURN, "late"), 14),
    Workload(
        "late-2-inline", "handed over two steps late", _mixed(_late(2, "engine")), _mixture, (*_CHURN, "late"), 15
    ),
    Workload("thread", "handed over on a builder thread", _mixed(_late(0, "thread")), _mixture, _CHURN, 16),
    Workload(
        "late-1-thread",
        "one step late on a builder thread",
        _mixed(_late(1, "thread")),
        _mixture,
        (*_CHURN, "late"),
        17,
    ),
    Workload(
        "late-2-thread",
        "two steps late on a builder thread, with deferred keys",
        _mixed(_late(2, "thread") | _DEFERRED),
        _mixture,
        (*_CHURN, "late"),
        18,
    ),
    Workload(
        "scheduled-ahead",
        "asynchronous scheduling: the next step is scheduled before the tokens of this one are known",
        replace(_mixed(_late(1, "thread") | _DEFERRED), engine_args={"async_scheduling": True}),
        _mixture,
        (*_CHURN, "late"),
        22,
    ),
    Workload("async", "copies and writes on threads of their own", _mixed(_ASYNC | _DEFERRED), _mixture, _CHURN, 19),
    Workload(
        "async-late-2-thread",
        "copies, writes and gathers on threads, handed over two steps late on another one, a tight device budget",
        _mixed(
            _ASYNC | _late(2, "thread") | _TIGHT_BUDGET | {"cache": {"gpu_staging_bytes": 4096, "staging_depth": 5}}
        ),
        _mixture,
        (*_CHURN, "late"),
        20,
    ),
)

_SLOW = EngineSettings(num_blocks=13, max_num_batched_tokens=128, max_num_seqs=6, max_model_len=256)

SLOW_RUNNER_WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "small-async-deferred-late-2-thread",
        "everything at once, deferred keys, copies and writes on threads, two steps late on a builder thread",
        replace(_SLOW, omni_prefix=_ASYNC | _late(2, "thread") | _DEFERRED),
        _small_mixture,
        ("hits", "same_step_hits", "preemptions", "resumes", "aborts", "blocks_reused", "late"),
        21,
    ),
    Workload(
        "small-late-1-inline-scheduled-ahead",
        "everything at once, one step late, with asynchronous scheduling",
        replace(_SLOW, omni_prefix=_late(1, "engine"), engine_args={"async_scheduling": True}),
        _small_mixture,
        ("hits", "same_step_hits", "preemptions", "resumes", "aborts", "blocks_reused", "late"),
        21,
    ),
)
"""Stand for the larger mixtures on a runner whose steps are slow: V2, whose kernels are interpreted on a CPU."""


def asynchronous(workload: Workload) -> Workload:
    """The same with copies, writes and gathers on threads of the cache's own."""
    omni_prefix = {**workload.engine.omni_prefix, **_ASYNC}
    return replace(
        workload, name=f"{workload.name}-asynchronous", engine=replace(workload.engine, omni_prefix=omni_prefix)
    )


ASYNCHRONOUS: tuple[Workload, ...] = tuple(
    asynchronous(workload) for workload in WORKLOADS if "eager" not in workload.engine.omni_prefix
)
"""Every workload in the mode that it does not name."""

V2_NAMES = (
    "identical-at-once",
    "chunked-prefill",
    "long-prefills-preempted",
    "aborts",
    "key-sometimes-recycled",
    "block-edges",
    *(workload.name for workload in SLOW_RUNNER_WORKLOADS),
)
"""What is run on the V2 runner every day."""

BY_NAME = {workload.name: workload for workload in (*WORKLOADS, *ASYNCHRONOUS, *SLOW_RUNNER_WORKLOADS)}
