"""The hooks, on model runners that have the attributes of vLLM's: V1's persistent batch, V2's batch of each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omni_prefix_fast.errors import OmniPrefixCacheClosedError, OmniPrefixCacheConfigError, OmniPrefixCacheRowError
from omni_prefix_fast.vllm import runner as runner_module
from omni_prefix_fast.vllm.files import read_request_file
from omni_prefix_fast.vllm.forward_only import ForwardOnly
from omni_prefix_fast.vllm.runner import OmniPrefixRunnerMixin, StepBatch, attach, with_prefix_cache
from omni_prefix_fast.vllm.settings import SETTINGS_KEY
from omni_prefix_fast.vllm.sinks import CallbackSink, Delivery, Finished, Message
from omni_prefix_fast.vllm.worker import OmniPrefixWorkerMixin

BLOCK = 4


class FullAttentionSpec:
    """Recognised by name, as the gate does with vLLM's."""

    block_size = BLOCK


@pytest.fixture(autouse=True)
def only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine vLLM's process groups tell the rank; here there is one."""
    monkeypatch.setattr(runner_module, "is_handover_rank", lambda: True)


def kv_cache_config() -> SimpleNamespace:
    """Eight blocks in one full-attention group."""
    return SimpleNamespace(num_blocks=8, kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())])


def vllm_config(*, prefix_caching: bool = True, policy: str = "fcfs", **settings: Any) -> SimpleNamespace:
    """An engine's configuration, with these settings of the project's own."""
    return SimpleNamespace(
        additional_config={SETTINGS_KEY: settings},
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching, block_size=BLOCK),
        kv_transfer_config=None,
        scheduler_config=SimpleNamespace(policy=policy, max_num_batched_tokens=32),
        model_config=SimpleNamespace(max_model_len=32),
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


class Model:
    """A model with nothing to declare."""


class Runner:
    """What both of vLLM's model runners have in common. A forward yields rows that tell their position and base."""

    is_pooling_model = False

    def __init__(self, config: SimpleNamespace, model: object | None = None) -> None:
        self.vllm_config = config
        self.model = model or Model()
        self.execute_model_state: Any = None
        self.calls: list[str] = []
        self.padding = 0

    def get_model(self) -> object:
        return self.model

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> None:  # noqa: ARG002
        self.calls.append("initialize_kv_cache")

    def execute_model(self, scheduler_output: Any, intermediate: Any = None, dummy_run: bool = False) -> Any:  # noqa: ARG002
        self.calls.append("dummy" if dummy_run else "execute_model")
        if dummy_run or not scheduler_output.total_num_scheduled_tokens:
            return "nothing"
        self.update_batch(scheduler_output)
        with torch.inference_mode():
            self.forward(scheduler_output)
        return None

    def update_batch(self, scheduler_output: Any) -> None:
        raise NotImplementedError

    def forward(self, scheduler_output: Any) -> None:
        raise NotImplementedError

    def rows(self, starts: list[int], counts: list[int]) -> torch.Tensor:
        """Hidden states whose rows are their positions, with padding of 99."""
        at = [torch.arange(s, s + n, dtype=torch.float32) for s, n in zip(starts, counts, strict=True)]
        return torch.cat([*at, torch.full((self.padding,), 99.0)]).reshape(-1, 1)

    def sample_tokens(self, grammar: Any) -> str:  # noqa: ARG002
        self.calls.append("sample_tokens")
        self.execute_model_state = None
        return "tokens"

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class RunnerV1(Runner):
    """The persistent batch, with its block table on the host."""

    def __init__(self, config: SimpleNamespace, model: object | None = None) -> None:
        super().__init__(config, model)
        table = np.zeros((4, 8), dtype=np.int32)
        self.input_batch = SimpleNamespace(
            req_ids=[],
            req_id_to_index={},
            num_computed_tokens_cpu=np.zeros(4, dtype=np.int32),
            block_table=[SimpleNamespace(block_table=SimpleNamespace(cpu=torch.from_numpy(table)))],
        )
        self._kernel_block_sizes = [BLOCK]

    def update_batch(self, scheduler_output: Any) -> None:
        batch = self.input_batch
        batch.req_ids = list(scheduler_output.num_scheduled_tokens)
        batch.req_id_to_index = {r: i for i, r in enumerate(batch.req_ids)}
        for new in scheduler_output.scheduled_new_reqs:
            i = batch.req_id_to_index[new.req_id]
            batch.num_computed_tokens_cpu[i] = new.num_computed_tokens
            batch.block_table[0].block_table.cpu[i, : len(new.block_ids[0])] = torch.tensor(new.block_ids[0])

    def forward(self, scheduler_output: Any) -> None:
        batch = self.input_batch
        counts = [scheduler_output.num_scheduled_tokens[r] for r in batch.req_ids]
        starts = [int(batch.num_computed_tokens_cpu[i]) for i in range(len(counts))]
        self.execute_model_state = SimpleNamespace(hidden_states=self.rows(starts, counts))


class RunnerV2(Runner):
    """A batch of its own for each step, in another order than the scheduler's."""

    kernel_block_sizes = (BLOCK,)

    def update_batch(self, scheduler_output: Any) -> None:
        pass

    def forward(self, scheduler_output: Any) -> None:
        req_ids = sorted(scheduler_output.num_scheduled_tokens, reverse=True)
        counts = [scheduler_output.num_scheduled_tokens[r] for r in req_ids]
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        starts = [computed[r] for r in req_ids]
        self.execute_model_state = SimpleNamespace(
            hidden_states=self.rows(starts, counts),
            input_batch=SimpleNamespace(
                req_ids=req_ids,
                num_scheduled_tokens=np.array([*counts, 77]),
                num_computed_tokens_np=np.array([*starts, 77]),
                num_tokens=sum(counts),
                num_tokens_after_padding=sum(counts) + self.padding,
            ),
        )


RUNNERS = pytest.mark.parametrize("runner_class", (RunnerV1, RunnerV2))


def output(new: dict[str, tuple[int, int, list[int]]], finished: tuple[str, ...] = ()) -> SimpleNamespace:
    """A scheduler output: `new` maps requests to computed tokens, scheduled tokens and blocks."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, num_computed_tokens=computed, block_ids=(blocks,))
            for r, (computed, _, blocks) in new.items()
        ],
        scheduled_cached_reqs=None,
        num_scheduled_tokens={r: count for r, (_, count, _) in new.items()},
        total_num_scheduled_tokens=sum(count for _, count, _ in new.values()),
        finished_req_ids=set(finished),
    )


def started(
    runner_class: type[Runner], config: SimpleNamespace, model: object | None = None
) -> tuple[Any, list[Message]]:
    """A runner with the hooks in front, its KV cache made, and what its sink got."""
    runner: Any = runner_class(config, model)
    attach(runner)
    runner.initialize_kv_cache(kv_cache_config())
    seen: list[Message] = []
    if runner.omni_prefix is not None:
        runner.omni_prefix.handover.add_sink(CallbackSink(seen.append))
    return runner, seen


def step(runner: Any, scheduler_output: Any) -> None:
    """One step as a worker runs it, in vLLM's inference mode."""
    with torch.inference_mode():
        if runner.execute_model(scheduler_output) is None:
            runner.sample_tokens(None)


@RUNNERS
def test_a_hit_hands_over_the_cached_prefix_and_this_steps_rows(runner_class: type[Runner]) -> None:
    """The whole way: a request computes two blocks, another hits the first of them, with padding in the forward."""
    runner, seen = started(runner_class, vllm_config())
    runner.padding = 3
    step(runner, output({"a": (0, 8, [1, 2])}))
    step(runner, output({"b": (4, 2, [1, 3]), "c": (0, 1, [5])}, finished=("a",)))
    first, end, second = seen
    assert isinstance(first, Delivery)
    assert first.outputs.spans == {"a": (0, 8)}
    assert end == Finished(("a",))
    assert isinstance(second, Delivery)
    assert second.outputs.spans == {"b": (0, 6), "c": (0, 1)}
    assert second.outputs.hidden_states is not None
    assert second.outputs.hidden_states["b"].flatten().tolist() == [0, 1, 2, 3, 4, 5]


@RUNNERS
def test_tensors_handed_over_are_ordinary_ones(runner_class: type[Runner]) -> None:
    """VLLM runs in inference mode, whose tensors refuse to be changed outside it; the consumer's may be."""
    runner, seen = started(runner_class, vllm_config())
    step(runner, output({"a": (0, 8, [1, 2])}))
    step(runner, output({"b": (4, 2, [1, 3])}))
    for message in seen:
        assert isinstance(message, Delivery)
        for rows in (message.outputs.hidden_states or {}).values():
            assert not rows.is_inference()
            rows.add_(1)
    runner.shutdown()


@RUNNERS
def test_a_step_without_a_forward_hands_over_whatever_waits(runner_class: type[Runner]) -> None:
    """It reports finished requests only: nothing is saved, and no step may follow for a long time."""
    runner, seen = started(runner_class, vllm_config(materialize_lag=2))
    step(runner, output({"a": (0, 4, [1])}))
    assert seen == []
    step(runner, output({}, finished=("a",)))
    assert [type(m) for m in seen] == [Delivery, Finished]
    assert runner.calls == ["initialize_kv_cache", "execute_model", "sample_tokens", "execute_model"]


def test_a_step_that_was_never_saved_is_given_up_where_its_own_table_says() -> None:
    """Its blocks held another request's rows: a hit on them fails, although the next chunk of it was saved."""
    runner, _ = started(RunnerV2, vllm_config())
    link = runner.omni_prefix

    def chunk(req_id: str, computed: int, blocks: list[int] | None, count: int, finished: tuple[str, ...] = ()) -> Any:
        told = output({} if blocks is None else {req_id: (computed, count, blocks)}, finished)
        told.num_scheduled_tokens, told.total_num_scheduled_tokens = {req_id: count}, count
        if blocks is None:
            told.scheduled_cached_reqs = SimpleNamespace(
                req_ids=[req_id], num_computed_tokens=[computed], new_block_ids=[None], resumed_req_ids=set()
            )
        link.step_starts(told)
        link.adapter.view.show([req_id])
        return StepBatch((req_id,), (count,), (computed,), count, count, runner)

    def save(batch: StepBatch) -> None:
        link.save(runner.rows([*batch.starts], [*batch.counts]), batch, None)
        link.pump()

    save(chunk("a", 0, [0, 1], 8))
    chunk("c", 0, [0, 1], 4, finished=("a",))
    save(chunk("c", 4, None, 4))
    with pytest.raises(OmniPrefixCacheRowError):
        save(chunk("d", 8, [0, 1, 2], 1, finished=("c",)))


@RUNNERS
def test_without_prefix_caching_the_forwards_rows_are_handed_over(runner_class: type[Runner]) -> None:
    """No cache is made, and the next stage gets its rows all the same."""
    runner, seen = started(runner_class, vllm_config(prefix_caching=False))
    assert isinstance(runner.omni_prefix.cache, ForwardOnly)
    assert not runner.omni_prefix.cached
    step(runner, output({"a": (0, 2, [1]), "b": (0, 1, [2])}))
    (message,) = seen
    assert isinstance(message, Delivery)
    assert message.outputs.spans == {"a": (0, 2), "b": (0, 1)}


@RUNNERS
def test_dummy_runs_and_warm_ups_do_not_reach_the_cache(runner_class: type[Runner]) -> None:
    """However they are marked: by name, by position, by the pause that the worker puts around its warm-up."""
    runner, seen = started(runner_class, vllm_config())
    made_up = output({"warm-up": (0, 4, [1])})
    runner.execute_model(made_up, dummy_run=True)
    runner.execute_model(made_up, None, True)
    with runner.omni_prefix_paused():
        step(runner, made_up)
    step(runner, output({"a": (0, 1, [2])}))
    assert [m.req_ids for m in seen] == [("a",)]


@RUNNERS
def test_shutdown_hands_over_and_shuts_the_cache_down(runner_class: type[Runner]) -> None:
    """What waits goes out first, then the cache is closed, then the runner; twice is fine."""
    runner, seen = started(runner_class, vllm_config(materialize_lag=1))
    step(runner, output({"a": (0, 4, [1])}))
    cache = runner.omni_prefix.cache
    runner.shutdown()
    runner.shutdown()
    assert [m.req_ids for m in seen] == [("a",)]
    assert runner.omni_prefix is None
    assert runner.calls[-2:] == ["shutdown", "shutdown"]
    with pytest.raises(OmniPrefixCacheClosedError):
        cache.new_step_starts(output({}))


def test_the_runner_is_shut_down_even_if_a_sink_fails() -> None:
    """The engine's own clean-up does not depend on a consumer."""
    runner, _ = started(RunnerV1, vllm_config(materialize_lag=1))

    def refuse(_: Message) -> None:
        raise OSError("no")

    runner.omni_prefix.handover.add_sink(CallbackSink(refuse))
    step(runner, output({"a": (0, 4, [1])}))
    with pytest.raises(RuntimeError, match="did not take step"):
        runner.shutdown()
    assert runner.calls[-1] == "shutdown"


@RUNNERS
def test_a_refused_stage_is_refused_before_anything_is_allocated(runner_class: type[Runner]) -> None:
    """The gate's words, and vLLM's allocation was not even begun."""
    runner: Any = runner_class(vllm_config(policy="priority"))
    attach(runner)
    with pytest.raises(OmniPrefixCacheConfigError, match="scheduling_policy to 'fcfs'"):
        runner.initialize_kv_cache(kv_cache_config())
    assert runner.calls == []


def test_kernel_blocks_of_another_size_are_refused() -> None:
    """Known only once vLLM chose its attention backend, still before the first step."""
    runner: Any = RunnerV1(vllm_config())
    runner._kernel_block_sizes = [2]  # noqa: SLF001 - stands for vLLM's own choice
    attach(runner)
    with pytest.raises(OmniPrefixCacheConfigError, match="kernels use blocks of 2"):
        runner.initialize_kv_cache(kv_cache_config())


@pytest.mark.parametrize(
    "change",
    ({"pooling": True}, {"profiling": True}, {"rank": False}, {"enabled": False}),
    ids=lambda change: next(iter(change)),
)
def test_where_there_is_no_cache_the_runner_is_vllms_own(
    change: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooling stage, a profiling run, another rank, or the switch: no link, and steps run as ever."""

    class Elsewhere(RunnerV1):
        is_pooling_model = change.get("pooling", False)

    monkeypatch.setattr(runner_module, "is_handover_rank", lambda: change.get("rank", True))
    runner: Any = Elsewhere(vllm_config(enabled=change.get("enabled", True)))
    attach(runner)
    runner.initialize_kv_cache(kv_cache_config(), is_profiling=change.get("profiling", False))
    assert runner.omni_prefix is None
    step(runner, output({"a": (0, 4, [1])}))
    runner.shutdown()
    assert runner.calls == ["initialize_kv_cache", "execute_model", "sample_tokens", "shutdown"]


def test_a_cache_made_anew_replaces_the_former_one() -> None:
    """VLLM may initialise its KV cache again; the former cache is shut down."""
    runner, _ = started(RunnerV1, vllm_config())
    former = runner.omni_prefix.cache
    runner.initialize_kv_cache(kv_cache_config())
    assert runner.omni_prefix.cache is not former
    with pytest.raises(OmniPrefixCacheClosedError):
        former.new_step_starts(output({}))


class SpeakingModel:
    """A model with a hook of its own and declared keys."""

    prefix_cache_token_keys = ("codes",)

    def omni_mm_outputs(self, hidden: torch.Tensor, batch: StepBatch) -> Mapping[str, Any]:
        """Codes are the rows, a hundredfold."""
        return {"codes": hidden[: batch.num_tokens] * 100}


def hook_of_the_settings(hidden: torch.Tensor, batch: StepBatch) -> Mapping[str, Any]:
    """Named by a test's settings."""
    return {"codes": hidden[: batch.num_tokens] * 1000}


def codes_of(seen: list[Message], req_id: str) -> list[float]:
    """The rows of `codes` that were handed over last."""
    message = seen[-1]
    assert isinstance(message, Delivery)
    codes: list[float] = message.outputs.mm_outputs["codes"][req_id].flatten().tolist()
    return codes


@RUNNERS
def test_mm_outputs_come_from_the_model(runner_class: type[Runner]) -> None:
    """Its own hook is called with the live rows and the batch, and its keys are cached like hidden states."""
    runner, seen = started(runner_class, vllm_config(), SpeakingModel())
    step(runner, output({"a": (0, 4, [1])}))
    step(runner, output({"b": (4, 1, [1, 2])}))
    assert codes_of(seen, "b") == [0, 100, 200, 300, 400]


def test_mm_outputs_come_from_the_settings_first() -> None:
    """A hook named there stands in for the model's."""
    runner, seen = started(RunnerV1, vllm_config(mm_outputs=f"{__name__}:hook_of_the_settings"), SpeakingModel())
    step(runner, output({"a": (0, 2, [1])}))
    assert codes_of(seen, "a") == [0, 1000]


def test_mm_outputs_come_from_a_runner_that_overrides_the_hook() -> None:
    """A runner class may compute them itself; the mixin then needs no attaching."""

    class Own(OmniPrefixRunnerMixin, RunnerV1):
        def omni_mm_outputs(self, hidden_states: torch.Tensor, batch: StepBatch) -> Mapping[str, Any]:
            return {"codes": hidden_states[: batch.num_tokens] + batch.starts[0]}

    assert with_prefix_cache(Own) is Own
    runner, seen = started(Own, vllm_config(), SpeakingModel())
    step(runner, output({"a": (0, 4, [1])}))
    step(runner, output({"b": (4, 1, [1, 2])}))
    assert codes_of(seen, "b") == [0, 1, 2, 3, 8]


MESSAGES: list[Message] = []
"""What the callback sink of the settings got."""


def take_message(message: Message) -> None:
    """Named by a test's settings."""
    MESSAGES.append(message)


def test_sinks_come_from_the_settings(tmp_path: Path) -> None:
    """A callback and a directory, both fed, the directory's file whole when the request finishes."""
    sinks = [{"kind": "callback", "target": f"{__name__}:take_message"}, {"kind": "directory", "path": str(tmp_path)}]
    MESSAGES.clear()
    runner, _ = started(RunnerV1, vllm_config(sinks=sinks))
    step(runner, output({"a": (0, 3, [1])}))
    step(runner, output({}, finished=("a",)))
    assert [type(m) for m in MESSAGES] == [Delivery, Finished]
    (path,) = tmp_path.iterdir()
    assert read_request_file(path).rows["__hidden_states__"].flatten().tolist() == [0, 1, 2]


RECORDED: list[str] = []
"""What the recorder of the settings saw."""


def record_calls(cache: Any, view: Any, config: Any, policy: Any, path: Path) -> Any:
    """Named by a test's settings."""

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            RECORDED.append(name)
            return getattr(cache, name)

    RECORDED.append(f"{config.num_blocks} blocks, {path.name}, {policy.needs_full_hidden_states}, {view is not None}")
    return Recorded()


@RUNNERS
def test_a_recorder_of_the_settings_stands_before_the_cache(runner_class: type[Runner], tmp_path: Path) -> None:
    """It is made with the cache, the batch's view, sizes, policy and file, and sees every call of the stage."""
    RECORDED.clear()
    record = {"path": str(tmp_path / "calls"), "recorder": f"{__name__}:record_calls"}
    runner, seen = started(runner_class, vllm_config(record=record))
    step(runner, output({"a": (0, 3, [1])}))
    runner.shutdown()
    assert RECORDED == ["8 blocks, calls, True, True", "new_step_starts", "save_outputs", "materialize", "shutdown"]
    assert isinstance(seen[0], Delivery)


def test_a_recorder_that_cannot_be_had_stops_the_engine() -> None:
    """By the name of the setting."""
    with pytest.raises(OmniPrefixCacheConfigError, match=r"omni_prefix\.record\.recorder is 'json:nothing'"):
        started(RunnerV1, vllm_config(record={"path": "calls", "recorder": "json:nothing"}))


class Worker:
    """What the worker mixin uses of vLLM's."""

    def __init__(self, config: SimpleNamespace) -> None:
        self.vllm_config = config
        self.model_runner: Any = None

    def init_device(self) -> None:
        self.model_runner = RunnerV1(self.vllm_config)

    def compile_or_warm_up_model(self) -> str:
        step(self.model_runner, output({"warm-up": (0, 4, [1])}))
        return "warm"


class HookedWorker(OmniPrefixWorkerMixin, Worker): ...


def test_a_worker_hooks_into_the_runner_it_makes_and_keeps_its_warm_up_out() -> None:
    """Whatever class the runner has, it keeps it as a base."""
    worker: Any = HookedWorker(vllm_config())
    worker.init_device()
    assert type(worker.model_runner).__mro__[1:3] == (OmniPrefixRunnerMixin, RunnerV1)
    worker.model_runner.initialize_kv_cache(kv_cache_config())
    assert worker.compile_or_warm_up_model() == "warm"
    assert worker.model_runner.omni_prefix.handover.statistics().steps == 0


def test_a_worker_refuses_wrong_settings_before_it_touches_a_device() -> None:
    """An unknown key stops the engine at its start."""
    worker: Any = HookedWorker(vllm_config(no_such_setting=1))
    with pytest.raises(OmniPrefixCacheConfigError, match="no_such_setting"):
        worker.init_device()
    assert worker.model_runner is None
