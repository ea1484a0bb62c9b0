"""A recorded trace is what an engine asked, with what is due by its own tables; it replays on every driver."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import omni_prefix_fast
from conformance.drivers.module import ModuleDriver
from conformance.drivers.registry import subject
from conformance.drivers.subjects import run_events
from conformance.schedules import Trace, generate, read
from conformance.schedules.trace import CONTRACT, ROW, Discard, Fail, Materialize, Rest, Save, Shutdown, Start, Unsaved
from conformance.vllm.environment import prepare, vllm_is_installed
from conformance.vllm.tracing import RecordedCache, record, row_number

DRIVERS = ("reference", "fast-eager", "fast-async")


def _recorded(trace: Trace, path: Path) -> Trace:
    """What is recorded of a trace that the production cache is run on."""
    driver = ModuleDriver(omni_prefix_fast, trace.header)
    driver.cache = RecordedCache(driver.cache, driver, driver.cache.config, _policy(driver), path)
    assert run_events(trace, driver).failure is None
    driver.cache.shutdown()
    return read(path)


def _policy(driver: ModuleDriver) -> omni_prefix_fast.ModelCachePolicy:
    mm = [key for key in driver.keys.values() if not key.name.startswith("__")]
    return omni_prefix_fast.ModelCachePolicy(
        needs_full_hidden_states=len(mm) < len(driver.keys),
        token_keys=frozenset(key.name for key in mm if not key.deferred),
        deferred_keys=frozenset(key.name for key in mm if key.deferred),
    )


def _without_refusals(seed: int) -> Trace | None:
    """A seed's trace without refused calls, which no engine makes; None if a start is refused, or if it stops short."""
    trace = generate(seed).trace
    refused = [event for event in trace.events if getattr(event, "error", None) not in {None, ROW}]
    if any(isinstance(event, Start) and event.error == CONTRACT for event in refused):
        return None
    if not any(isinstance(event, Rest) for event in trace.events):
        return None
    kept = [e for e in trace.events if e not in refused and not isinstance(e, (Fail, Shutdown))]
    return trace.model_copy(update={"events": kept})


TRACES = {seed: trace for seed in range(24) if (trace := _without_refusals(seed)) is not None}


@pytest.mark.parametrize("seed", TRACES)
def test_what_is_recorded_replays(seed: int, tmp_path: Path) -> None:
    """Same calls, same slots, same spans; and rows that are due, though worked out from tensors and tables alone."""
    trace = TRACES[seed]
    found = _recorded(trace, tmp_path / "recorded.jsonl")
    for driver in DRIVERS[:2]:
        assert subject(driver).run(found).failure is None
    # That a step was never saved is known, and told, once the next one starts.
    assert [e for e in found.events if isinstance(e, Unsaved)] == [e for e in trace.events if isinstance(e, Unsaved)]
    kinds = (Save, Discard, Materialize)
    ours = [event for event in trace.events if isinstance(event, kinds)]
    theirs = [event for event in found.events if isinstance(event, kinds)]
    assert [event.event for event in theirs] == [event.event for event in ours]
    for mine, told in zip(ours, theirs, strict=True):
        if isinstance(mine, Save) and isinstance(told, Save):
            assert told.batch == mine.batch
        if isinstance(mine, Materialize) and isinstance(told, Materialize):
            assert told.error == mine.error
            assert (told.due and told.due.spans) == (mine.due and mine.due.spans)


def test_there_are_such_traces() -> None:
    """Enough of them, with hits, resumes and steps that were never saved."""
    assert len(TRACES) >= 10
    events = [event for trace in TRACES.values() for event in trace.events]
    admitted = [admission for event in events if isinstance(event, Start) for admission in event.admitted]
    assert sum(admission.computed > 0 for admission in admitted) > 10
    assert any(admission.resumed for admission in admitted)
    assert any(isinstance(event, Unsaved) for event in events)


def test_a_wrong_row_is_not_taken_for_the_one_that_is_due(tmp_path: Path) -> None:
    """What is due is not taken from the cache: of one that hands over wrong rows the trace says the right ones."""

    class Off(omni_prefix_fast.OmniPrefixCacheManager):
        def materialize(self, *args: Any) -> Any:
            outputs = super().materialize(*args)
            for rows in (outputs.hidden_states or {}).values():
                rows.fill_(5)
            return outputs

    trace = next(iter(TRACES.values()))
    right = _recorded(trace, tmp_path / "right.jsonl")
    driver = ModuleDriver(omni_prefix_fast, trace.header)
    wrong = Off(driver.cache.config, driver, eager=True)
    wrong.register_policy(_policy(driver))
    driver.cache = RecordedCache(wrong, driver, wrong.config, _policy(driver), tmp_path / "wrong.jsonl")
    for event in trace.events:
        with contextlib.suppress(omni_prefix_fast.OmniPrefixCacheUnmatchError):
            driver._call(event)  # noqa: SLF001 - what it hands over is not looked at
    driver.cache.shutdown()
    assert read(tmp_path / "wrong.jsonl") == right


def test_an_error_of_the_cache_is_recorded_and_raised(tmp_path: Path) -> None:
    """The call is in the trace, with its error."""
    trace = next(iter(TRACES.values()))
    driver = ModuleDriver(omni_prefix_fast, trace.header)
    cache = record(driver.cache, driver, driver.cache.config, _policy(driver), tmp_path / "t.jsonl")
    with pytest.raises(omni_prefix_fast.OmniPrefixCacheUnmatchError):
        cache.save_outputs(None, {}, num_tokens_unpadded=0, num_tokens_padded=0)
    with pytest.raises(omni_prefix_fast.OmniPrefixCacheUnmatchError):
        cache.materialize(77, [])
    assert cache.statistics().steps_saved == 0
    cache.shutdown()
    events = read(tmp_path / "t.jsonl").events
    assert isinstance(events[0], Save)
    assert events[0].error == CONTRACT


def test_rows_are_told_by_bits_type_and_shape() -> None:
    """Equal rows have one number; another type or shape of the same bits has another."""
    row = torch.tensor([1, 2, 3, 4], dtype=torch.int64)
    assert row_number(row) == row_number(row.clone())
    others = [row + 1, row.view(torch.float64), row.reshape(2, 2), row[:2]]
    assert len({row_number(each) for each in [row, *others]}) == 5
    strided = torch.stack([row, row], dim=1)[:, 0]
    assert row_number(strided) == row_number(row)


@pytest.mark.vllm
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("on", ["engine", "thread"])
def test_a_run_of_the_real_engine_replays(on: str, tmp_path: Path) -> None:
    """Recorded by the integration's switch: hits, preemptions and resumes, replayed on every driver."""
    if not vllm_is_installed():
        pytest.skip("vLLM is not installed here; `make test-vllm` runs this")
    prepare("v1")
    from conformance.vllm.engine import EngineSettings, StepEngine  # noqa: PLC0415 - the process has to be prepared
    from conformance.vllm.run import drive  # noqa: PLC0415
    from conformance.vllm.workloads import Job  # noqa: PLC0415

    path = tmp_path / "engine.jsonl"
    switch = {"record": {"path": str(path)}, "materialize_on": on, "materialize_lag": 2 * (on == "thread")}
    prompt = tuple(range(2, 82))
    jobs = [Job(f"r{n}", (*prompt[: 40 + 8 * n], 7 + n), 40, arrives=n) for n in range(4)]
    with StepEngine(
        EngineSettings(num_blocks=8, max_model_len=160, max_num_seqs=4, omni_prefix=switch), "v1"
    ) as engine:
        drive(engine, [jobs])
        counts = engine.counts
    trace = read(path)
    assert min(counts.hits, counts.preemptions, counts.resumes) > 0
    assert sum(isinstance(event, Start) for event in trace.events) >= counts.steps
    assert any(isinstance(e, Start) and any(a.computed for a in e.admitted) for e in trace.events)
    assert any(isinstance(e, Materialize) and e.due and len(e.due.rows) > 2 for e in trace.events)
    for driver in DRIVERS:
        assert subject(driver).run(trace).failure is None
