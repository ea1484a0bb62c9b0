"""The integration on a real engine: settings, refusals at its start, sinks, shutdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

from conformance.vllm.engine import MODEL_CONFIG, EngineSettings, StepEngine
from conformance.vllm.run import Comparison, drive
from conformance.vllm.truth import CODES_KEY, HASH_KEY, LIST_KEY, REFERENCE_KEY, true_reference, true_rows
from conformance.vllm.workloads import Job
from omni_prefix_fast.errors import OmniPrefixCacheClosedError, OmniPrefixCacheConfigError
from omni_prefix_fast.types import HIDDEN_KEY
from omni_prefix_fast.vllm.files import DirectorySink, read_request_file
from omni_prefix_fast.vllm.forward_only import ForwardOnly
from omni_prefix_fast.vllm.sinks import Delivery, Finished, Message

PROMPT = tuple(range(2, 82))
JOBS = [[Job("first", PROMPT, 4)], [Job("second", (*PROMPT[:64], 7, 8), 4), Job("third", PROMPT, 2)]]


# ---------------------------------------------------------------------------------------------- refused at the start


def changed_model(directory: Path, **config: Any) -> str:
    """A model directory whose configuration differs from the test model's."""
    (directory / "config.json").write_text(json.dumps(MODEL_CONFIG | config), encoding="utf-8")
    return str(directory)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "priority": ({"scheduling_policy": "priority"}, "scheduling_policy to 'fcfs'"),
    "kv received": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "kv_transfer_config.kv_role to 'kv_producer'",
    ),
}


@pytest.fixture(autouse=True)
def _one_engine_stays_up(comparison: Comparison) -> None:
    """With an engine up, another one starts in a fraction of a second."""


@pytest.fixture
def _no_kv_transfer_is_left() -> Iterator[None]:
    """VLLM's connector is made before the gate is asked, and would be there for the next engine of the process."""
    yield
    ensure_kv_transfer_shutdown()


@pytest.mark.usefixtures("_no_kv_transfer_is_left")
@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_stage_stops_the_engine_at_its_start(arguments: Mapping[str, Any], said: str) -> None:
    """The error is the gate's own, with the setting to change."""
    with pytest.raises(OmniPrefixCacheConfigError, match=said):
        StepEngine(EngineSettings(engine_args=arguments), "v1")


def test_speculative_decoding_is_refused(tmp_path: Path) -> None:
    """With a draft model: rows of rejected tokens would be kept under wrong slots."""
    # Not with n-grams: their compiler breaks the start of every later CPU engine of vLLM 0.32.0 in the process.
    speculation = {"method": "draft_model", "model": changed_model(tmp_path), "num_speculative_tokens": 2}
    with pytest.raises(OmniPrefixCacheConfigError, match="Remove speculative_config"):
        StepEngine(EngineSettings(engine_args={"speculative_config": speculation}), "v1")


@pytest.mark.parametrize(
    ("config", "said"),
    (
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}, "SlidingWindowSpec"),
        (
            {
                "architectures": ["Gemma2ForCausalLM"],
                "model_type": "gemma2",
                "sliding_window": 64,
                "query_pre_attn_scalar": 32,
                "hidden_activation": "gelu_pytorch_tanh",
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "2 KV cache groups",
        ),
    ),
    ids=("sliding window", "hybrid"),
)
def test_a_model_without_full_attention_everywhere_is_refused(
    config: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    """A window in every layer, and one in every other layer."""
    arguments = {"model": changed_model(tmp_path, **config)}
    with pytest.raises(OmniPrefixCacheConfigError, match=said):
        StepEngine(EngineSettings(engine_args=arguments), "v1")


def test_an_unknown_setting_stops_the_engine_at_its_start() -> None:
    """A misspelt key is not silently without effect."""
    with pytest.raises(OmniPrefixCacheConfigError, match=r"omni_prefix\.materialise_lag.*unknown key"):
        StepEngine(EngineSettings(omni_prefix={"materialise_lag": 1}), "v1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    (({"block_size": 16}, "No common block size"), ({"prefix_match_unit": 16}, "Invalid prefix_match_unit")),
    ids=("kernel blocks", "match unit"),
)
def test_vllm_itself_refuses_what_the_gate_would(arguments: Mapping[str, Any], said: str) -> None:
    """On a CPU with one KV group these two rows of the table cannot be reached: vLLM is first."""
    with pytest.raises(ValueError, match=said):
        StepEngine(EngineSettings(engine_args=arguments), "v1")


def test_what_is_refused_with_the_cache_runs_without_it() -> None:
    """Prefix caching off: priority scheduling is nobody's concern, and rows are handed over."""
    settings = EngineSettings(prefix_caching=False, engine_args={"scheduling_policy": "priority"})
    with StepEngine(settings, "v1") as engine:
        assert isinstance(engine.link.cache, ForwardOnly)
        drive(engine, [[Job("r", PROMPT, 2)]])
        assert engine.received()["r"].keys[HIDDEN_KEY].gaps(len(PROMPT)) == 0


# ------------------------------------------------------------------------------------------------------- sinks, hooks

MESSAGES: list[Message] = []
"""What the callback sink of the settings got."""


def take_message(message: Message) -> None:
    """Named by a test's settings."""
    MESSAGES.append(message)


def test_sinks_of_the_settings_get_what_the_consumer_in_the_process_gets(tmp_path: Path) -> None:
    """A callback sees the same messages; each file holds the same bits, with positions and per-request values."""
    MESSAGES.clear()
    sinks = [{"kind": "callback", "target": f"{__name__}:take_message"}, {"kind": "directory", "path": str(tmp_path)}]
    with StepEngine(EngineSettings(omni_prefix={"sinks": sinks}), "v1") as engine:
        drive(engine, JOBS)
        assert engine.counts.hits > 0
        assert sum(isinstance(m, Delivery) for m in MESSAGES) == engine.recorder.deliveries
        finished = {r for m in MESSAGES if isinstance(m, Finished) for r in m.req_ids}
        assert finished == set(engine.recorder.requests)
        files = {stored.req_id: stored for stored in map(read_request_file, tmp_path.iterdir())}
        assert set(files) == finished
        for req_id, received in engine.recorder.requests.items():
            stored = files[req_id]
            assert stored.finished
            for key, kept in received.keys.items():
                assert torch.equal(stored.rows[key], kept.rows)
                assert stored.positions[key].tolist() == list(range(len(kept.there)))
            assert torch.equal(stored.values[REFERENCE_KEY], torch.from_numpy(true_reference()))
            assert LIST_KEY in stored.values


def test_an_id_of_a_client_is_never_a_path(tmp_path: Path) -> None:
    """Ids that look like paths end up as plain names in the directory, and lead back to their ids."""
    sinks = [{"kind": "directory", "path": str(tmp_path / "rows"), "fsync": False}]
    ids = ["../../escape", "/absolute", "..", "a/b", "ÿ漢", "x" * 400]
    with StepEngine(EngineSettings(omni_prefix={"sinks": sinks}), "v1") as engine:
        drive(engine, [[Job(req_id, PROMPT[: 20 + i], 2) for i, req_id in enumerate(ids)]])
    assert [p.name for p in tmp_path.iterdir()] == ["rows"]
    stored = [read_request_file(path) for path in (tmp_path / "rows").iterdir()]
    assert sorted(one.req_id.rpartition("-")[0] for one in stored) == sorted(ids)
    for one in stored:
        tokens = PROMPT[: len(one.rows[HASH_KEY])]
        shared = min(len(tokens), 20)
        assert torch.equal(one.rows[HASH_KEY][:shared], torch.from_numpy(true_rows(HASH_KEY, tokens)[:shared].copy()))


def test_a_directory_that_cannot_be_written_loses_no_row_in_the_process(tmp_path: Path) -> None:
    """The engine goes on, the failure is reported for each request, and the files are there once the cause is gone."""
    away = tmp_path / "away"
    sink = DirectorySink(tmp_path / "rows", fsync=False)
    with StepEngine(EngineSettings(), "v1") as engine:
        engine.link.handover.add_sink(sink)
        sink.directory.rename(away)
        drive(engine, [[Job("r", PROMPT, 2), Job("s", PROMPT[:40], 2)]])
        assert sorted(r.rpartition("-")[0] for r in sink.failures()) == ["r", "s"]
        assert engine.received()["r"].keys[HIDDEN_KEY].gaps(len(PROMPT)) == 0
        away.rename(sink.directory)
        assert sink.retry() == {}
        assert sink.written == 2


# --------------------------------------------------------------------------------------------------------- life cycle


@pytest.mark.parametrize("on", ("engine", "thread"))
def test_the_engines_shutdown_hands_over_and_shuts_the_cache_down(on: str) -> None:
    """What waits for its handover goes out; the cache refuses further calls; a second shutdown is fine."""
    settings = EngineSettings(omni_prefix={"materialize_lag": 2, "materialize_on": on})
    engine = StepEngine(settings, "v1")
    engine.add("r", PROMPT, 3)
    while engine.busy:
        engine.step()
    link = engine.link
    engine.close()
    engine.close()
    assert engine.received()["r"].keys[HIDDEN_KEY].gaps(engine.requests["r"].computed) == 0
    assert engine.worker.model_runner.omni_prefix is None
    with pytest.raises(OmniPrefixCacheClosedError):
        link.cache.new_step_starts(None)


def test_a_step_that_only_reports_finished_requests_runs_no_forward() -> None:
    """It reaches the cache as a step without a save, and lets the last rows go."""
    with StepEngine(EngineSettings(omni_prefix={"materialize_lag": 1}), "v1") as engine:
        drive(engine, [[Job("r", PROMPT, 2)]])
        assert engine.counts.steps_without_forward == 1
        assert engine.received()["r"].finished
        assert engine.link.handover.statistics().waiting == 0


def test_an_engine_that_schedules_ahead_really_does() -> None:
    """The workload of that name runs on vLLM's asynchronous scheduler, which has a step in flight while it plans."""
    with StepEngine(EngineSettings(engine_args={"async_scheduling": True}), "v1") as engine:
        core = engine.llm.llm_engine.engine_core.engine_core
        assert type(core.scheduler).__name__ == "AsyncScheduler"
        assert core.step_fn.__name__ == "step_with_batch_queue"
        drive(engine, JOBS)
        assert engine.counts.hits > 0
        for req_id, got in engine.received().items():
            tokens = engine.requests[req_id].tokens
            rows = got.keys[HASH_KEY].rows[: len(tokens)]
            assert torch.equal(rows, torch.from_numpy(true_rows(HASH_KEY, tokens)[: len(rows)].copy()))


def test_resetting_the_prefix_cache_forgets_hits_and_nothing_else() -> None:
    """After a reset the same prompt is computed again, into whatever blocks, and its rows are the same."""
    with StepEngine(EngineSettings(num_blocks=17), "v1") as engine:
        drive(engine, [[Job("a", PROMPT, 2)], [Job("b", PROMPT, 2)]])
        assert engine.counts.hits == 1
        assert engine.llm.llm_engine.reset_prefix_cache()
        drive(engine, [[Job("c", PROMPT, 2)]])
        assert engine.counts.hits == 1
        got = engine.received()
        for key in (HIDDEN_KEY, HASH_KEY, CODES_KEY):
            assert torch.equal(got["a"].keys[key].rows, got["b"].keys[key].rows)
            assert torch.equal(got["a"].keys[key].rows, got["c"].keys[key].rows)


def test_the_switch_leaves_vllm_as_it_was() -> None:
    """`enabled: false`: no cache, no handover, the same tokens."""
    with StepEngine(EngineSettings(), "v1") as engine:
        drive(engine, [[Job("r", PROMPT, 4)]])
        tokens = engine.requests["r"].tokens
    with StepEngine(EngineSettings(omni_prefix={"enabled": False}), "v1") as plain:
        assert plain.worker.model_runner.omni_prefix is None
        with pytest.raises(RuntimeError, match="hands nothing over"):
            _ = plain.link
        drive(plain, [[Job("r", PROMPT, 4)]])
        assert plain.requests["r"].tokens == tokens


def test_the_cache_counts_the_hits_that_the_scheduler_made() -> None:
    """E44 on a real engine: tokens asked, requests and tokens hit agree with the scheduler's own messages."""
    with StepEngine(EngineSettings(), "v1") as engine:
        drive(engine, JOBS)
        cache: Any = engine.link.cache
        statistics = cache.statistics()
        assert statistics.requests_hit == engine.counts.hits == 2
        assert statistics.tokens_hit == engine.counts.tokens_hit == 128
