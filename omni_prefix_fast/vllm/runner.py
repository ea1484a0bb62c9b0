"""The hooks in vLLM's model runner: what is called before a forward, after it, and when the engine goes down.

`OmniPrefixRunnerMixin` goes in front of any model runner class, V1 or V2, CPU or GPU. It wraps five methods that all
of them have: `initialize_kv_cache` (the gate, and the cache), `execute_model` (a step starts; its rows are saved),
`sample_tokens` (rows are handed over, when the engine has what it waits for), `shutdown`. All else is vLLM's own.

Guarantees:

- Only the last pipeline rank, and of its tensor-parallel ranks the first, has a cache: they all hold the same rows.
- Dummy and profiling runs, and the warm-up of a worker, never reach the cache.
- A step that only reports finished requests has no forward: nothing is saved, and whatever waits is handed over.
- The cache's tensors are ordinary ones, although vLLM runs in inference mode: consumers may do as they like with them.

vLLM is imported where a question can be put only to it, so that this module can be imported without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from omni_prefix_fast.config import ModelCachePolicy, PrefixCacheConfig
from omni_prefix_fast.gate import check_prefix_cache_kernel_block_size, stage_prefix_cache_config
from omni_prefix_fast.layout import FullAttentionGroupView
from omni_prefix_fast.manager import OmniPrefixCacheManager
from omni_prefix_fast.types import Key, ReqId, StepId
from omni_prefix_fast.vllm.files import DirectorySink
from omni_prefix_fast.vllm.forward_only import ForwardOnly
from omni_prefix_fast.vllm.handover import Handover, Materializer
from omni_prefix_fast.vllm.settings import DirectorySinkSettings, OmniPrefixSettings, load_callable
from omni_prefix_fast.vllm.sinks import CallbackSink, Sink
from omni_prefix_fast.vllm.views import HostBlockTables, ScheduledBatchView

if TYPE_CHECKING:
    _Runner: Any
else:
    _Runner = object

_log = logging.getLogger(__name__)
_DUMMY_RUN_POSITION = 1
"""Where `dummy_run` stands among the arguments behind the scheduler output, if it is given by position (V2)."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward, as a hook that computes mm outputs sees it.

    Attributes:
        req_ids: requests in the order of their rows.
        counts: tokens that the forward computed for each.
        starts: absolute position of the first of these tokens.
        num_tokens: their sum. Rows beyond it are padding.
        num_tokens_padded: rows of the forward.
        runner: vLLM's model runner, for what is not here.
    """

    req_ids: tuple[ReqId, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    num_tokens: int
    num_tokens_padded: int
    runner: Any


MmHook = Callable[[torch.Tensor, StepBatch], Mapping[Key, Any] | None]


class StepCache(Materializer, Protocol):
    """What the hooks call: the cache, or `ForwardOnly` where prefix caching is off."""

    def new_step_starts(self, scheduler_output: Any) -> None:
        """A step starts; the batch is still that of the step before."""
        ...

    def save_outputs(
        self, hidden: Any, mm_outputs: Mapping[Key, Any] | None, *, num_tokens_unpadded: int, num_tokens_padded: int
    ) -> StepId:
        """Keep what the forward returned."""
        ...

    def shutdown(self) -> None:
        """The engine goes down."""
        ...


# -------------------------------------------------------------------------------------- what differs between runners


class RunnerV1:
    """The V1 model runner: one persistent batch, block table on the host."""

    def __init__(self, runner: Any, block_size: int | None) -> None:
        self._runner = runner
        self.view: Any = None if block_size is None else FullAttentionGroupView(runner.input_batch, block_size)

    def kernel_block_sizes(self) -> list[int]:
        """Tokens a block as the attention kernels see it."""
        return list(getattr(self._runner, "_kernel_block_sizes", None) or ())

    def observe(self, scheduler_output: Any) -> None:
        """The runner's own table says it all."""

    def batch_req_ids(self) -> list[ReqId]:
        """Requests of the batch, in the order of their rows."""
        return list(self._runner.input_batch.req_ids)

    def describe(self, scheduler_output: Any) -> StepBatch:
        """The forward that just ran."""
        state, batch = self._runner.execute_model_state, self._runner.input_batch
        req_ids = tuple(batch.req_ids)
        return StepBatch(
            req_ids=req_ids,
            counts=tuple(scheduler_output.num_scheduled_tokens[r] for r in req_ids),
            starts=tuple(int(batch.num_computed_tokens_cpu[batch.req_id_to_index[r]]) for r in req_ids),
            num_tokens=scheduler_output.total_num_scheduled_tokens,
            num_tokens_padded=int(state.hidden_states.shape[0]),
            runner=self._runner,
        )


class RunnerV2:
    """The V2 model runner: a batch of its own for each step, block table on the device, so it is kept here too."""

    def __init__(self, runner: Any, block_size: int | None) -> None:
        self._runner = runner
        self.tables = HostBlockTables()
        self._shown: tuple[ReqId, ...] = ()
        self._scheduled_view = None if block_size is None else ScheduledBatchView(self.tables, block_size)

    @property
    def view(self) -> Any:
        """The cache's view of the batch."""
        return self._scheduled_view

    def kernel_block_sizes(self) -> list[int]:
        """Tokens a block as the attention kernels see it."""
        return list(getattr(self._runner, "kernel_block_sizes", None) or ())

    def observe(self, scheduler_output: Any) -> None:
        """Follow the scheduler's block tables."""
        if self._scheduled_view is not None:
            self.tables.observe(scheduler_output)

    def batch_req_ids(self) -> list[ReqId]:
        """Requests of the batch, in the order of their rows."""
        return list(self._shown)

    def describe(self, scheduler_output: Any) -> StepBatch:  # noqa: ARG002 - the batch says it all
        """The forward that just ran."""
        batch = self._runner.execute_model_state.input_batch
        self._shown = tuple(batch.req_ids)
        if self._scheduled_view is not None:
            self._scheduled_view.show(self._shown)
        return StepBatch(
            req_ids=self._shown,
            counts=tuple(int(n) for n in batch.num_scheduled_tokens[: len(self._shown)]),
            starts=tuple(int(n) for n in batch.num_computed_tokens_np[: len(self._shown)]),
            num_tokens=int(batch.num_tokens),
            num_tokens_padded=int(batch.num_tokens_after_padding),
            runner=self._runner,
        )


def runner_adapter(runner: Any, block_size: int | None) -> RunnerV1 | RunnerV2:
    """The adapter of a model runner, told by where it keeps its batch. Without a block size it has no view."""
    return RunnerV1(runner, block_size) if hasattr(runner, "input_batch") else RunnerV2(runner, block_size)


# --------------------------------------------------------------------------------------------------- the stage's link


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Leave vLLM's inference mode, whose tensors refuse to be changed outside it."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


class StageLink:
    """Ties one runner to its cache and its sinks. Engine thread."""

    def __init__(
        self, adapter: RunnerV1 | RunnerV2, cache: StepCache, settings: OmniPrefixSettings, *, cached: bool
    ) -> None:
        self.adapter = adapter
        self.cache = cache
        self.cached = cached
        self.handover = Handover(
            cache,
            [make_sink(one) for one in settings.sinks],
            lag=settings.materialize_lag,
            threaded=settings.materialize_on == "thread",
            timeout_s=settings.handover_timeout_s,
        )

    def step_starts(self, scheduler_output: Any) -> None:
        """Before the runner changes its batch.

        The cache comes first: what it gives up, if the step before was never saved, lies where the tables of that step
        say. The others are told even if it refuses this one.
        """
        with _ordinary_tensors():
            try:
                self.cache.new_step_starts(scheduler_output)
            finally:
                self.adapter.observe(scheduler_output)
                self.handover.add_finished(sorted(scheduler_output.finished_req_ids))

    def save(self, hidden: torch.Tensor, batch: StepBatch, mm_outputs: Mapping[Key, Any] | None) -> None:
        """After a forward."""
        with _ordinary_tensors():
            step_id = self.cache.save_outputs(
                hidden,
                mm_outputs or {},
                num_tokens_unpadded=batch.num_tokens,
                num_tokens_padded=batch.num_tokens_padded,
            )
            self.handover.add_step(step_id, batch.req_ids)

    def no_forward(self) -> None:
        """After a step that computed nothing."""
        with _ordinary_tensors():
            self.handover.drain()

    def pump(self) -> None:
        """When the engine has its tokens."""
        with _ordinary_tensors():
            self.handover.pump()

    def close(self) -> None:
        """Hand over what waits, close the sinks, shut the cache down; in this order, whatever fails."""
        with _ordinary_tensors():
            try:
                self.handover.close()
            finally:
                self.cache.shutdown()


def is_handover_rank() -> bool:
    """Whether this process hands over: it is the last pipeline rank, and of that the first tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415 - see the module

    return bool(get_pp_group().is_last_rank and get_tp_group().is_first_rank)


def make_sink(settings: Any) -> Sink:
    """The sink that some settings describe."""
    if isinstance(settings, DirectorySinkSettings):
        return DirectorySink(settings.path, fsync=settings.fsync)
    return CallbackSink(load_callable(settings.target, "omni_prefix.sinks.target"))


# ---------------------------------------------------------------------------------------------------------- the mixin


class OmniPrefixRunnerMixin(_Runner):
    """Goes in front of a vLLM model runner class. Override `omni_mm_outputs` to compute mm outputs in the runner."""

    omni_prefix: StageLink | None = None
    """The link to cache and sinks; None where this rank, this stage or the settings have none."""
    _omni_prefix_paused = False
    _omni_prefix_hook: MmHook | None = None

    def omni_mm_outputs(self, hidden_states: torch.Tensor, batch: StepBatch) -> Mapping[Key, Any] | None:
        """What a forward yields beside hidden states.

        Engine thread, right after the forward. By default the hook that the settings name, or else the model's method
        of this name, `(hidden_states, batch)`, or else nothing.

        Args:
            hidden_states: `(num_tokens_padded, hidden)`, on the device; a live buffer.
            batch: whose tokens they are.

        Returns:
            `{key: value}`: tensors with a row a token in batch order, or anything else for per-request values.
        """
        hook = self._omni_prefix_hook
        return None if hook is None else hook(hidden_states, batch)

    @contextmanager
    def omni_prefix_paused(self) -> Iterator[None]:
        """Keep forwards away from the cache: a worker's warm-up makes requests up."""
        self._omni_prefix_paused = True
        try:
            yield
        finally:
            self._omni_prefix_paused = False

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Judge the stage, then let vLLM allocate, then make the cache.

        Raises:
            OmniPrefixCacheConfigError: the stage is refused, or the settings are wrong.
        """
        self._close_omni_prefix()
        settings = OmniPrefixSettings.from_vllm_config(self.vllm_config)
        profiling = bool(kwargs.get("is_profiling", args[0] if args else False))
        pooling = bool(self.is_pooling_model)
        wanted = settings.enabled and not profiling and not pooling and is_handover_rank()
        config = self._judge(kv_cache_config, settings) if wanted else None
        result = super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if wanted:
            self._open_omni_prefix(settings, config)
        return result

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step with the cache told before and after."""
        link = self.omni_prefix
        dummy = kwargs.get("dummy_run", len(args) > _DUMMY_RUN_POSITION and args[_DUMMY_RUN_POSITION])
        if link is None or dummy or self._omni_prefix_paused:
            return super().execute_model(scheduler_output, *args, **kwargs)
        link.step_starts(scheduler_output)
        result = super().execute_model(scheduler_output, *args, **kwargs)
        state = self.execute_model_state
        if state is None:
            link.no_forward()
        else:
            batch = link.adapter.describe(scheduler_output)
            link.save(state.hidden_states, batch, self.omni_mm_outputs(state.hidden_states, batch))
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, then hand over."""
        result = super().sample_tokens(*args, **kwargs)
        if self.omni_prefix is not None and not self._omni_prefix_paused:
            self.omni_prefix.pump()
        return result

    def shutdown(self) -> Any:
        """Shut the cache down, then the runner."""
        try:
            self._close_omni_prefix()
        finally:
            result = super().shutdown()
        return result

    def _judge(self, kv_cache_config: Any, settings: OmniPrefixSettings) -> PrefixCacheConfig | None:
        return stage_prefix_cache_config(
            kv_cache_config=kv_cache_config,
            cache_config=self.vllm_config.cache_config,
            kv_transfer_config=self.vllm_config.kv_transfer_config,
            scheduler_config=self.vllm_config.scheduler_config,
            model_config=self.vllm_config.model_config,
            is_pooling_model=bool(self.is_pooling_model),
            speculative_config=self.vllm_config.speculative_config,
            parallel_config=self.vllm_config.parallel_config,
            **settings.cache.overrides(),
        )

    def _open_omni_prefix(self, settings: OmniPrefixSettings, config: PrefixCacheConfig | None) -> None:
        model = self.get_model()
        policy = settings.policy.apply(ModelCachePolicy.from_model(model))
        if settings.mm_outputs is not None:
            self._omni_prefix_hook = load_callable(settings.mm_outputs, "omni_prefix.mm_outputs")
        else:
            self._omni_prefix_hook = getattr(model, "omni_mm_outputs", None)
        adapter = runner_adapter(self, None if config is None else config.block_size)
        cache: StepCache
        if config is None:
            _log.info("prefix caching is off: the stage hands over the rows of each forward, and caches none")
            cache = ForwardOnly(adapter.batch_req_ids, policy)
        else:
            check_prefix_cache_kernel_block_size(config.block_size, adapter.kernel_block_sizes())
            cache = OmniPrefixCacheManager(config, adapter.view, eager=settings.eager)
            cache.register_policy(policy)
            if settings.record is not None:
                record = load_callable(settings.record.recorder, "omni_prefix.record.recorder")
                cache = record(cache, adapter.view, config, policy, settings.record.path)
            _log.info("caching stage outputs of %d blocks of %d tokens", config.num_blocks, config.block_size)
        self.omni_prefix = StageLink(adapter, cache, settings, cached=config is not None)

    def _close_omni_prefix(self) -> None:
        link, self.omni_prefix = self.omni_prefix, None
        if link is not None:
            link.close()


_CLASSES: dict[type, type] = {}


def with_prefix_cache(runner_class: type) -> type:
    """A model runner class with the hooks in front; the class itself if it has them."""
    if issubclass(runner_class, OmniPrefixRunnerMixin):
        return runner_class
    if runner_class not in _CLASSES:
        name = f"OmniPrefix{runner_class.__name__}"
        _CLASSES[runner_class] = type(name, (OmniPrefixRunnerMixin, runner_class), {})
    return _CLASSES[runner_class]


def attach(runner: Any) -> None:
    """Put the hooks in front of a runner that a worker made, whatever class it chose. Before any KV cache is made."""
    runner.__class__ = with_prefix_cache(type(runner))
