"""The production package's own traces, as events of the specification.

`OmniPrefixCacheManager` is called by an `Environment` through its public contract; its trace sink tells the actions.
Eager, everything runs inside the calls. Otherwise committer, prefetch and builders are threads under a serial runtime,
beside a device whose copies land late, and a seed says who goes on; the same seed gives the same trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch

from conformance.device import SimulatedDevice
from conformance.drivers.rows import GARBAGE, encode
from conformance.drivers.scheduled import scheduler_output
from conformance.drivers.standing import StandingRuntime
from conformance.interleave import SerialRuntime, Strategy, Uniform
from conformance.links.environment import SETTING, Environment, Recorded, Tale
from conformance.links.sink import Sink
from conformance.links.translate import row_number
from conformance.schedules.trace import KeySetting, Part, Start
from conformance.tla.accept import Setting
from conformance.tla.values import Function
from omni_prefix_fast import (
    HIDDEN_KEY,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    PrefixCacheConfig,
    StageCacheOutputs,
)
from omni_prefix_fast.device import HostDevice
from omni_prefix_fast.errors import OmniPrefixCacheRowError
from omni_prefix_fast.runtime import Thread
from omni_prefix_fast.types import Occupancy

ROW_BYTES = 8
AMPLE = 1 << 20
PACE = 0.03
"""Share of the points at which anybody may go on."""
INSPECTS = 4
"""Rounds from one look at the tables to the next: threads come to rest for it."""
_READ = {"planned": "planned", "fetched": "fetched", "dropped": "failed"}
PATIENCE_S = 60.0
"""Of the virtual clock."""


# ------------------------------------------------------------------------- what the environment asks for


class FastCache:
    """The production cache, as an environment calls it; also the view of the batch that the cache asks."""

    def __init__(
        self,
        setting: Setting,
        sink: Sink,
        budget: int,
        *,
        pages: int = 64,
        quieten: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ) -> None:
        self._quieten = quieten
        mm = setting.keys - setting.hidden
        self._sink = sink
        self.outputs: StageCacheOutputs | None = None
        """What was handed over last."""
        self.keys = {key: KeySetting(name=key, width=1, item_bytes=ROW_BYTES) for key in setting.keys}
        self._batch: Sequence[Part] = ()
        config = PrefixCacheConfig(
            num_blocks=setting.num_blocks,
            block_size=setting.block_size,
            gpu_staging_bytes=budget * ROW_BYTES,
            staging_depth=pages,
            staging_capacity_tokens=64,
        )
        self.manager = OmniPrefixCacheManager(config, self, trace=sink, **kwargs)
        self.manager.register_policy(
            ModelCachePolicy(
                needs_full_hidden_states=bool(setting.hidden),
                token_keys=mm - setting.deferred,
                deferred_keys=mm & setting.deferred,
            )
        )

    def start(self, event: Start) -> None:
        """See `Cache`."""
        self.manager.new_step_starts(scheduler_output(event))

    def save(self, batch: Sequence[Part], contents: Sequence[tuple[int, ...]], emits: frozenset[str]) -> int:
        """See `Cache`. The tensors are overwritten as soon as the call returns."""
        self._batch = batch
        count = len(contents)
        rows = [row_number(content) for content in contents]
        tensors = {key: encode(self.keys[key], rows, count, 1) for key in sorted(emits)}
        hidden = tensors.get("hidden")
        mm = {key: tensor for key, tensor in tensors.items() if key != "hidden"}
        step = self.manager.save_outputs(hidden, mm, num_tokens_unpadded=count)
        for tensor in tensors.values():
            tensor.fill_(GARBAGE)
        return step

    def take(self, step: int, reqs: tuple[str, ...]) -> bool:
        """See `Cache`."""
        self._sink.how[step] = "materialize"
        try:
            self.outputs = self.manager.materialize(step, reqs)
        except OmniPrefixCacheRowError:
            return False
        return True

    def discard(self, step: int) -> None:
        """See `Cache`."""
        self._sink.how[step] = "discard"
        self.manager.discard_step(step)

    def tables(self) -> Mapping[str, Any]:
        """See `Cache`."""
        self._quieten()
        self.manager.drain()
        seen, step, task = self.manager.inspect(), self._sink.steps, self._sink.tasks
        nothing = (Occupancy.ABSENT,) * len(seen.version)
        occupancy = {key: seen.occupancy.get(HIDDEN_KEY if key == "hidden" else key, nothing) for key in self.keys}
        return {
            "version": dict(enumerate(seen.version)),
            "owner": {slot: 0 if owner < 0 else step[owner] for slot, owner in enumerate(seen.owner)},
            "pins": dict(enumerate(seen.pins)),
            "occupancy": {
                key: Function({slot: found.name.lower() for slot, found in enumerate(column)})
                for key, column in occupancy.items()
            },
            "emitted": dict(seen.emitted),
            "open_write": {req: (task[number], write_n) for req, (number, write_n) in seen.open_writes.items()},
            "tasks": {task[number]: state.name for number, state in seen.tasks.items()},
            "steps": frozenset(step[number] for number in seen.unconsumed),
            "reads": {(step[number], req): _READ[state] for (number, req), state in seen.reads.items()},
        }

    def batch_req_ids(self) -> list[str]:
        """See `BatchView`."""
        return [part.req for part in self._batch]

    def step_slots_cpu(self, req_ids: Sequence[str], num_scheduled: Mapping[str, int]) -> torch.Tensor:
        """See `BatchView`."""
        slots = {part.req: part.slots for part in self._batch}
        assert all(len(slots[req]) == num_scheduled[req] for req in req_ids)
        return torch.tensor([slot for req in req_ids for slot in slots[req]], dtype=torch.int64)


# ------------------------------------------------------------------------- traces


def record_eager(seed: int, *, rounds: int = 12, setting: Setting = SETTING, budget: int = AMPLE) -> Recorded:
    """A random trace of the eager cache. `budget`: deferred rows that fit on the device."""
    tale = Tale()
    sink = Sink(tale, setting, thread=lambda: "engine", point=lambda: None)
    cache = FastCache(setting, sink, budget, eager=True, runtime=StandingRuntime(), device=HostDevice())
    environment = Environment(cache, tale, setting, Random(seed))
    try:
        environment.run(rounds)
    except Exception as error:  # noqa: BLE001 - whatever a faulty cache raises: the trace up to there is what counts
        tale.break_off(f"{type(error).__name__}: {error}")
    return _ended(environment, sink)


def record_threads(
    seed: int, *, rounds: int = 12, setting: Setting = SETTING, budget: int = AMPLE, strategy: Strategy | None = None
) -> Recorded:
    """A random trace of the asynchronous cache: each handover on a thread of its own, copies that land late."""
    tale = Tale()
    runtime = SerialRuntime(strategy or Uniform(seed, PACE))
    sink = Sink(tale, setting, thread=lambda: runtime.thread, point=runtime.point)
    builders: list[Thread] = []

    def join() -> None:
        for builder in builders:
            builder.join(PATIENCE_S)

    cache = FastCache(setting, sink, budget, quieten=join, eager=False, runtime=runtime, device=SimulatedDevice(seed))

    def told(call: Callable[[], None]) -> None:
        """What other threads do once one has failed is no part of the trace."""
        try:
            call()
        except Exception as error:
            tale.break_off(f"{type(error).__name__}: {error}")
            raise

    def on_a_thread(call: Callable[[], None]) -> None:
        builders.append(runtime.spawn("builder", lambda: told(call)))

    environment = Environment(cache, tale, setting, Random(seed), on_a_thread, inspects=INSPECTS)

    def program() -> None:
        environment.run(rounds)
        cache.manager.shutdown()

    try:
        runtime.run(lambda: told(program))
    except Exception as error:  # noqa: BLE001 - as above
        tale.break_off(f"{type(error).__name__}: {error}")
    return _ended(environment, sink)


def _ended(environment: Environment, sink: Sink) -> Recorded:
    recorded = environment.ended()
    return Recorded(recorded.events, recorded.seen + sink.seen + lags(recorded.events), recorded.crash)


def lags(events: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """What the committer does while the engine is elsewhere: beside a publish, and behind later claims."""
    seen: Counter[str] = Counter()
    publishing, claims = False, 0
    claimed: dict[int, int] = {}
    for event in events:
        action = event["action"]
        publishing = action == "ClaimSlots" or (publishing and action != "OpenStep")
        claims += action == "ClaimSlots"
        if action == "QueueTask":
            claimed[event["task"]] = claims
        if action in ("ClaimCopy", "FinishCopy", "WritePool"):
            seen["committer beside a publish"] += publishing
            seen["committer behind a claim"] += claims > claimed[event["task"]]
    return seen
