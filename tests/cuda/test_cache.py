"""The whole cache on a CUDA device: its rows are handed over bit for bit, whatever the forward does next."""

from __future__ import annotations

import pytest
import torch

from conformance.device.backends import Backend
from conformance.device.check import QUICK, run_parts
from omni_prefix_fast import ModelCachePolicy, OmniPrefixCacheManager
from omni_prefix_fast.cuda import CudaDevice
from tests.omni_prefix_fast.harness import Engine, column, per_token
from tests.omni_prefix_fast.test_against_oracle import Fuzz

DEFER = ModelCachePolicy(deferred_keys=frozenset("d"))
MM = {"k": per_token(3, dtype=torch.int64), "d": per_token(2, dtype=torch.bfloat16)}


class OnDevice(Engine):
    """An engine whose forward's tensors are on the device."""

    on = torch.device("cpu")

    def rows(
        self, *feature: int, dtype: torch.dtype = torch.float32, add: int = 0, padded: int | None = None
    ) -> torch.Tensor:
        return super().rows(*feature, dtype=dtype, add=add, padded=padded).to(self.on)


def engine_on(backend: Backend, *, eager: bool = False, budget: int = 1 << 20) -> OnDevice:
    """An engine and a cache on the device."""
    engine = OnDevice(num_blocks=16, policy=DEFER, eager=eager, device=backend.make_device(), gpu_staging_bytes=budget)
    engine.on = backend.torch_device
    return engine


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "asynchronous"])
@pytest.mark.parametrize("budget", [1 << 20, 24, 0])
def test_hits_and_recycled_blocks_are_right(backend: Backend, budget: int, eager: bool) -> None:
    """Hits on running and finished requests, across and within a step, with and without room on the device."""
    engine = engine_on(backend, eager=eager, budget=budget)
    for base in range(0, 200, 20):
        a = engine.step(new=[("A", [0, 1], 0, 6)], base={"A": base}, mm=MM)
        b = engine.step(new=[("B", [0, 2], 4, 3)], cached=[("A", 1)], base={"B": base}, mm=MM)
        new = [("C", [3], 0, 4), ("D", [3, 4], 4, 1)]
        c = engine.step(new=new, finished=["A"], base={"C": base, "D": base}, mm=MM, padded=8)
        for step, req_id, end in ((c, "D", 5), (b, "B", 7), (a, "A", 6)):
            outs = engine.take(step, req_id)
            assert outs.hidden_states is not None
            rows = [outs.hidden_states[req_id], *(outs.mm_outputs[key][req_id] for key in "kd")]
            assert [column(of_key) for of_key in rows] == [list(range(base, base + end))] * 3
        engine.start(finished=["B", "C", "D"])
    seen = engine.settled()
    assert not any(seen.pins)
    assert not any(seen.pages)
    assert (seen.charged, seen.chunks, seen.tasks) == (0, (), {})


def test_what_is_handed_over_is_on_the_host(backend: Backend) -> None:
    """Rows and leftovers alike."""
    engine = engine_on(backend)
    mm = {**MM, "ref": torch.ones(7, 2, device=backend.torch_device)}
    outs = engine.take(engine.step(new=[("A", [0], 0, 4)], mm=mm), "A")
    assert outs.hidden_states is not None
    handed = [outs.hidden_states["A"], *(of_key["A"] for of_key in outs.mm_outputs.values())]
    assert {tensor.device.type for tensor in handed} == {"cpu"}


@pytest.mark.parametrize("seed", range(8))
def test_random_steps_against_the_naive_cache(backend: Backend, seed: int) -> None:
    """Every row of every step is the naive cache's."""
    fuzz = Fuzz(3000 + seed, eager=False, device=backend.make_device())
    fuzz.on = backend.torch_device
    fuzz.run(100)
    fuzz.cache.drain()
    seen = fuzz.cache.inspect()
    assert (seen.charged, seen.chunks, seen.tasks) == (0, (), {})
    fuzz.cache.shutdown()


def test_the_device_check_finds_nothing_wrong(backend: Backend) -> None:
    """All its parts, in small."""
    assert [line for line in run_parts(backend, QUICK, 120.0) if line.right is False] == []


@pytest.mark.hardware
def test_beside_a_device_the_cache_is_asynchronous_and_pins_its_memory() -> None:
    """Without a word about it: eager=None takes the CUDA device, and pools and pages are page-locked."""
    assert CudaDevice.pins_memory
    engine = Engine(eager=None)
    assert isinstance(engine.cache, OmniPrefixCacheManager)
    engine.take(engine.step(new=[("A", [0], 0, 4)]), "A")
    engine.cache.drain()
    assert engine.cache.statistics().rows_saved == 4
    engine.cache.shutdown()
