"""`OmniPrefixCacheManager`: the public contract. Reads what the engine gives, and drives the machine in order.

The order inside each call is that of docs/machine.md. Threads: `register_policy`, `new_step_starts` and `save_outputs`
on the engine thread; `materialize` and `discard_step` on any thread; the rest anywhere. A call that raises
`OmniPrefixCacheContractError` changed nothing, unless it says otherwise. An interrupt (KeyboardInterrupt) in the
middle of an engine-thread call fails the cache; in the middle of a materialize it consumes the step.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from threading import TIMEOUT_MAX
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from omni_prefix_fast.config import ModelCachePolicy, PrefixCacheConfig
from omni_prefix_fast.cuda import CudaDevice
from omni_prefix_fast.device import Device, HostDevice, Transfer
from omni_prefix_fast.errors import (
    OmniPrefixCacheClosedError,
    OmniPrefixCacheConfigError,
    OmniPrefixCacheContractError,
    OmniPrefixCacheRowError,
)
from omni_prefix_fast.events import StepEvents, read_scheduler_output
from omni_prefix_fast.inspection import Inspection, inspect_machine, measure
from omni_prefix_fast.intake import Intake, KeySorter
from omni_prefix_fast.layout import BatchView, StepLayout, make_layout
from omni_prefix_fast.log import BudgetTicket
from omni_prefix_fast.machine import PrefixCacheMachine, StepRows
from omni_prefix_fast.merge import merge
from omni_prefix_fast.metrics import Counters, Footprint, LockTimes, Statistics, TraceSink
from omni_prefix_fast.pool import RowSpec
from omni_prefix_fast.recycler import OutputAllocator, RecyclingAllocator, checked
from omni_prefix_fast.runtime import Runtime, ThreadRuntime
from omni_prefix_fast.steps import StepContext
from omni_prefix_fast.types import Key, ReqId, StageCacheOutputs, StepId

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class StartedStep:
    """A step between `new_step_starts` and its save."""

    step_id: StepId
    events: StepEvents
    layout: StepLayout | None = None
    refused: str | None = None
    """Why it cannot be saved."""


def _ordinary_tensors(call: Callable[P, R]) -> Callable[P, R]:
    """Run a call outside inference mode: tensors made inside it refuse to be changed outside, on any thread."""

    @wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return call(*args, **kwargs)
        with torch.inference_mode(mode=False), torch.no_grad():
            return call(*args, **kwargs)

    return run


def _whole_or_failed(
    call: Callable[Concatenate[OmniPrefixCacheManager, P], R],
) -> Callable[Concatenate[OmniPrefixCacheManager, P], R]:
    """What interrupts a call of the engine half-way (KeyboardInterrupt, SystemExit) fails the cache, loudly.

    Errors are rolled back where they occur. An interrupt may come anywhere, and nobody could tell what was done.
    """

    @wraps(call)
    def run(self: OmniPrefixCacheManager, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            self._machine.fail(f"{call.__name__}, interrupted half-way,", error)
            raise

    return run


class OmniPrefixCacheManager:
    """Host copy of a stage's per-token outputs that mirrors the engine's KV blocks, slot for slot.

    Args:
        config: sizes and bounds.
        view: the engine's batch (`layout.BatchView`): `batch_req_ids()` and `step_slots_cpu(req_ids, num_scheduled)`.
        eager: True: every write runs inside the call that starts it, on its thread. False: copies, writes and gathers
            run on a stream and two threads of the cache's own. None: False beside a CUDA device, else True.
        runtime: where threads, locks, events and the clock come from.
        device: what moves rows off the accelerator. None: by what torch finds.
        output_allocator: makes the tensors that are handed over, say in shared memory; see `recycler`. None: host
            memory that is used again once the consumer has dropped it.
        trace: called with each action, for conformance checks.

    Raises:
        OmniPrefixCacheConfigError: `config` is not a `PrefixCacheConfig`.
    """

    def __init__(
        self,
        config: PrefixCacheConfig,
        view: BatchView,
        eager: bool | None = None,
        *,
        runtime: Runtime | None = None,
        device: Device | None = None,
        output_allocator: OutputAllocator | None = None,
        trace: TraceSink | None = None,
    ) -> None:
        if not isinstance(config, PrefixCacheConfig):
            raise OmniPrefixCacheConfigError(
                f"config is a {type(config).__name__}; build a PrefixCacheConfig, or take stage_prefix_cache_config's"
            )
        has_cuda = torch.cuda.is_available()
        self.config = config
        self._view = view
        self._device: Device = device or (CudaDevice() if has_cuda else HostDevice())
        runtime = runtime or ThreadRuntime()
        self._counters = Counters(trace, runtime.lock("counters"))
        recycling = RecyclingAllocator(config.output_recycle_bytes)
        self._allocate = recycling if output_allocator is None else checked(output_allocator)
        self._machine = PrefixCacheMachine(
            config,
            runtime=runtime,
            device=self._device,
            counters=self._counters,
            allocate=self._allocate,
            eager=not has_cuda if eager is None else eager,
        )
        self._policy = ModelCachePolicy()
        self._sorter = KeySorter(self._policy)
        self._largest_step = config.staging_capacity_tokens
        self._started: StartedStep | None = None
        self._layout: StepLayout | None = None
        """The last one made, of which the next step may take over what holds for it as well."""
        self._saved_any = False
        self._closed = False

    def register_policy(self, policy: ModelCachePolicy) -> None:
        """Say what the model hands over, before the first save. Default: hidden states, and keys judged by shape.

        Raises:
            OmniPrefixCacheContractError: not a policy, or a different one after the first save or warm_up.
        """
        self._check_usable()
        if not isinstance(policy, ModelCachePolicy):
            raise OmniPrefixCacheContractError(
                f"register_policy takes a ModelCachePolicy, not a {type(policy).__name__}; "
                "ModelCachePolicy.from_model(model) reads one from a model"
            )
        if policy != self._policy and (self._saved_any or self._machine.pool.keys()):
            raise OmniPrefixCacheContractError(
                "register_policy after the first save or warm_up: rows saved under the former policy would be misread; "
                "register the policy when the model is loaded"
            )
        if policy != self._policy:
            self._policy = policy
            self._sorter = KeySorter(policy)

    @_ordinary_tensors
    def warm_up(self, keys: Mapping[Key, tuple[torch.dtype, Sequence[int]]]) -> None:
        """Allocate what the keys need, and fault it in, so that no request pays for it. After `register_policy`.

        Without it each key is allocated by the first save that brings it. Engine thread.

        Args:
            keys: dtype and feature shape of a row, by key; the hidden states' is `HIDDEN_KEY`.

        Raises:
            OmniPrefixCacheContractError: no save could keep rows under a key, or the key is open with another type or
                width. Nothing was allocated.
        """
        self._check_usable()
        if not isinstance(keys, Mapping):
            raise OmniPrefixCacheContractError(
                f"warm_up takes a mapping of key to (dtype, feature shape), not a {type(keys).__name__}"
            )
        specs = {key: RowSpec.declared(key, row) for key, row in keys.items()}
        for key, spec in specs.items():
            self._sorter.check_per_token(key, spec.feature)
            self._machine.pool.check(key, spec)
        self._machine.open_keys(specs, self._policy.deferred_keys, resident=True)

    @_ordinary_tensors
    @_whole_or_failed
    def new_step_starts(self, scheduler_output: Any) -> None:
        """Take in a step's scheduler output: finished requests first, then new and resumed ones and their hits.

        Once a step that the engine executes, before the batch drops finished requests. Engine thread.

        Args:
            scheduler_output: vLLM's, or anything with its fields; each field is optional.

        Raises:
            OmniPrefixCacheContractError: a request's entry cannot be used (a hit without the blocks for it). The
                finished requests and every other request were taken in; the step cannot be saved, and later hits on
                what it computes fail.
            OmniPrefixCacheWriteError: a write failed.
        """
        self._check_usable()
        self._machine.commit_tasks()
        try:
            events = read_scheduler_output(scheduler_output)
        except OmniPrefixCacheContractError as error:
            if self._started is None:  # else that step may still be saved
                salvaged = _salvaged(scheduler_output)
                self._started = StartedStep(self._machine.steps.issue(), salvaged, refused=str(error))
            raise
        self._give_up_unsaved_step()
        for req_id in events.finished:
            self._machine.finish_request(req_id)
        step_id = self._machine.steps.issue()
        problems = list(events.problems)
        for admitted in events.admitted:
            try:
                self._machine.start_request(admitted, step_id, events.num_scheduled.get(admitted.req_id, 0))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            self._machine.drop_starting()
            self._started = StartedStep(step_id, events, refused="; ".join(problems))
            raise OmniPrefixCacheContractError(f"step {step_id}: {self._started.refused}")
        self._machine.plan_reads()
        self._started = StartedStep(step_id, events)

    @_ordinary_tensors
    @_whole_or_failed
    def save_outputs(
        self,
        hidden: torch.Tensor | None,
        mm_outputs: Mapping[Key, Any] | None,
        *,
        num_tokens_unpadded: int,
        num_tokens_padded: int | None = None,
    ) -> StepId:
        """Save what the forward returned. Copies; every argument may be overwritten as soon as this returns.

        Once for each `new_step_starts` whose step computes tokens, after the batch was updated. Engine thread. May wait
        for a staging page, up to `staging_claim_timeout_s`.

        Args:
            hidden: hidden states, `(num_tokens_unpadded or num_tokens_padded, *feature)`, any dtype and device; None
                only where the policy skips them.
            mm_outputs: by key; see `ModelCachePolicy` for what counts as per token.
            num_tokens_unpadded: tokens that the step computes.
            num_tokens_padded: rows of the padded batch; the unpadded count if left out.

        Returns:
            The step's id, for exactly one `materialize` or `discard_step`.

        Raises:
            OmniPrefixCacheContractError: out of order, or shapes, types or counts do not fit. Nothing was changed; the
                same step may be saved again.
            OmniPrefixCacheStagingTimeoutError: no staging page became free. The same step may be saved again.
            OmniPrefixCacheWriteError: a write failed.
        """
        self._check_usable()
        started = self._started
        if started is None:
            raise OmniPrefixCacheContractError(
                "save_outputs without new_step_starts: call new_step_starts(scheduler_output) once before each save"
            )
        if started.refused is not None:
            raise OmniPrefixCacheContractError(
                f"step {started.step_id} cannot be saved, new_step_starts refused it: {started.refused}"
            )
        layout = started.layout = self._lay_out(started)
        padded = self._check_counts(layout, num_tokens_unpadded, num_tokens_padded)
        intake = self._sorter.sort(hidden, mm_outputs, layout, padded)
        try:
            pool = self._machine.pool
            unknown = {k: RowSpec.of(rows) for k, rows in intake.rows.items() if not pool.takes(k, rows)}
            for key, spec in unknown.items():
                pool.check(key, spec)
            step_rows = self._land(layout, intake, unknown)
        except BaseException:
            self._sorter.undo()
            raise
        try:
            task = self._machine.publish(step_rows, hands_hidden=self._policy.needs_full_hidden_states)
        except BaseException as error:
            # Tables may be half updated: from here on no row can be trusted.
            self._machine.release_page(layout.step_id, step_rows.page)
            if step_rows.ticket is not None:
                self._machine.cancel(step_rows.ticket)
            self._machine.fail(f"publishing step {layout.step_id}", error)
            raise
        self._started = None
        self._saved_any = True
        if task is not None:
            self._machine.write(task)
        return layout.step_id

    @_ordinary_tensors
    def materialize(self, step_id: StepId, req_ids: Iterable[ReqId]) -> StageCacheOutputs:
        """Hand over a saved step: for each request its cached prefix, if it hit one, and this step's rows.

        Exactly once a step id (or `discard_step`), at any later time, in any order, from any thread.

        Args:
            step_id: from `save_outputs`.
            req_ids: requests to hand over, all of them from the batch that was saved; the others' rows are dropped.

        Raises:
            OmniPrefixCacheContractError: unknown or consumed id, or a request that was not in the batch. Nothing is
                consumed.
            OmniPrefixCacheRowError: a hit's hidden rows do not exist. The step is consumed.
            OmniPrefixCacheConfigError: the `output_allocator` made something else than was asked for. It is consumed.
            OmniPrefixCacheStagingTimeoutError: a write that the hit waits for did not end in time. It is consumed.
            OmniPrefixCacheWriteError: a write failed.
            OmniPrefixCacheClosedError: the cache was shut down, maybe meanwhile.
        """
        self._check_usable()
        wanted = _as_req_ids(req_ids)
        machine = self._machine
        context = self._take_step(step_id, wanted)
        try:
            reads = [context.reads[r] for r in wanted if r in context.reads] if context.reads else []
            if failed := [read.failure for read in reads if read.failure is not None]:
                raise OmniPrefixCacheRowError(f"step {step_id}: {'; '.join(failed)}")
            if reads or context.landing is not None:
                deadline = machine.deadline()
                for read in reads:
                    machine.fetch_read(read, deadline)
                machine.check_fetched(reads)
                if context.landing is not None:
                    machine.controller.join_host_ready(context.landing, deadline)
            rows = context.layout.num_tokens
            outputs = merge(context, wanted, lambda key: machine.staging.rows(context.page, key, rows), self._allocate)
            machine.count_handed_over(reads)
        finally:
            try:
                machine.let_go(context)
            except BaseException:  # an interrupt, maybe before it began
                machine.let_go(context)
                raise
        return outputs

    def discard_step(self, step_id: StepId) -> None:
        """Consume a saved step without handing anything over. Any thread.

        Raises:
            OmniPrefixCacheContractError: unknown or consumed id; nothing is consumed.
            OmniPrefixCacheWriteError: a write failed.
        """
        self._check_usable()
        context = self._take_step(step_id, ())
        try:
            self._machine.let_go(context)
        except BaseException:  # an interrupt, maybe before it began
            self._machine.let_go(context)
            raise
        self._machine.count_discarded()

    @_whole_or_failed
    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until whatever was started in the background has ended: writes committed, planned hits gathered.

        Before a shutdown it tells whether every write succeeded; before `inspect` it gives tables at rest. Deferred
        rows of running requests stay where they are. Returns at once if eager. Engine thread.

        Args:
            timeout_s: limit of the wait; None: `staging_claim_timeout_s`.

        Raises:
            OmniPrefixCacheContractError: `timeout_s` is no number of seconds.
            OmniPrefixCacheStagingTimeoutError: the limit passed. What was started goes on.
            OmniPrefixCacheWriteError: a write failed.
        """
        self._check_usable()
        if timeout_s is not None and not _is_seconds(timeout_s):
            raise OmniPrefixCacheContractError(f"drain waits for a number of seconds from 0 on, not for {timeout_s!r}")
        self._machine.drain(self._machine.deadline(timeout_s))
        self._check_usable()

    def shutdown(self) -> None:
        """Let go of everything. Twice is fine; any other call afterwards raises `OmniPrefixCacheClosedError`."""
        self._closed = True
        self._started = None
        self._machine.close()

    def statistics(self) -> Statistics:
        """Totals since the start. Loses nothing between two readings; works after a failure and after shutdown."""
        return self._counters.snapshot()

    def lock_times(self) -> LockTimes:
        """How long the state lock has been held."""
        return self._machine.lock_times()

    def footprint(self) -> Footprint:
        """Bytes allocated now."""
        return measure(self._machine)

    def inspect(self) -> Inspection:
        """Copy of the tables, for conformance checks and debugging. Cost: every slot."""
        return inspect_machine(self._machine)

    def _check_usable(self) -> None:
        if self._closed:
            raise OmniPrefixCacheClosedError("the prefix cache was shut down; make a new OmniPrefixCacheManager")
        if self._machine.controller.failed:
            self._machine.clear()
            self._machine.controller.check()

    def _take_step(self, step_id: StepId, req_ids: tuple[ReqId, ...]) -> StepContext:
        """Consume a step. A failure or a shutdown that let go of it since the call began is told as what it is."""
        try:
            return self._machine.take_step(step_id, req_ids)
        except OmniPrefixCacheContractError:
            self._check_usable()
            raise

    def _give_up_unsaved_step(self) -> None:
        """A step that computed tokens but was never saved: give its slots up, or a later hit would find stale rows."""
        started, self._started = self._started, None
        if started is None:
            return
        self._machine.drop_starting()
        if not started.events.total:
            return
        logger.warning("step %d was started but never saved; hits on what it computed will fail", started.step_id)
        try:
            layout = started.layout or self._lay_out_whatever_ran(started)
            if layout is not None:
                self._machine.preserve_reads(layout.slots, self._machine.deadline())
                self._machine.give_up_slots(layout)
        except BaseException as error:
            self._machine.fail(f"giving up step {started.step_id}, which was never saved,", error)
            self._machine.controller.check()
            raise

    def _lay_out_whatever_ran(self, started: StartedStep) -> StepLayout | None:
        """Layout of a step that was never saved. An engine may drop a refused one, in part or as a whole."""
        if started.refused is None:
            return self._lay_out(started)
        events, batch = started.events, set(self._view.batch_req_ids())
        ran = {r: n for r, n in events.num_scheduled.items() if r in batch}
        events = replace(events, num_scheduled=ran, total=sum(ran.values()))
        try:
            return self._lay_out(StartedStep(started.step_id, events)) if ran else None
        except OmniPrefixCacheContractError:
            if len(ran) < len(started.events.num_scheduled):
                return None  # the batch is still that of the step before: nothing of the refused step ran
            raise

    def _lay_out(self, started: StartedStep) -> StepLayout:
        events = started.events
        computed = events.computed
        if len(computed) < len(events.num_scheduled) or not events.num_scheduled.keys() <= computed.keys():
            emitted = self._machine.requests.emitted
            computed = {r: computed[r] if r in computed else emitted(r) for r in events.num_scheduled}
        layout = make_layout(
            started.step_id,
            self._view,
            events.num_scheduled,
            computed,
            block_size=self.config.block_size,
            num_slots=self.config.num_slots,
            before=self._layout,
        )
        self._layout = layout
        repeated = self._machine.table.first_repeated(layout.slots)
        if repeated is not None:
            raise OmniPrefixCacheContractError(
                f"step {started.step_id} computes slot {repeated} (block {repeated // self.config.block_size}) twice; "
                "two requests cannot write one KV slot"
            )
        return layout

    def _check_counts(self, layout: StepLayout, unpadded: int, padded: int | None) -> int:
        if type(unpadded) is type(padded) is int and unpadded == padded == layout.num_tokens <= self._largest_step:
            return unpadded  # the usual step: nothing to convert, nothing to name
        step = f"step {layout.step_id}"
        unpadded = _as_int(unpadded, f"{step}: num_tokens_unpadded")
        padded = unpadded if padded is None else _as_int(padded, f"{step}: num_tokens_padded")
        if unpadded != layout.num_tokens:
            raise OmniPrefixCacheContractError(
                f"{step}: num_tokens_unpadded is {unpadded}, but the scheduler output schedules {layout.num_tokens}"
            )
        if padded < unpadded:
            raise OmniPrefixCacheContractError(
                f"{step}: num_tokens_padded ({padded}) is below num_tokens_unpadded ({unpadded})"
            )
        if unpadded > self.config.staging_capacity_tokens:
            raise OmniPrefixCacheContractError(
                f"{step} computes {unpadded} tokens, a staging page holds {self.config.staging_capacity_tokens}; raise "
                "staging_capacity_tokens to the engine's max_num_batched_tokens"
            )
        return padded

    def _land(self, layout: StepLayout, intake: Intake, unknown: Mapping[Key, RowSpec]) -> StepRows:
        """Copy the step's rows out of the engine's buffers: into a page, and the deferred ones into device clones.

        `unknown`: keys that may have to be opened first. Leaves nothing behind if it fails.
        """
        machine = self._machine
        deadline = machine.deadline()
        page = machine.claim_page(layout.step_id, deadline)
        ticket: BudgetTicket | None = None
        try:
            machine.open_keys(unknown, self._policy.deferred_keys)
            deferred = [key for key in intake.rows if key in self._policy.deferred_keys]
            if deferred:
                row_bytes = sum(machine.pool.spec(key).nbytes for key in deferred)
                ticket = machine.reserve_budget(row_bytes * layout.num_tokens, deadline)
            machine.unplan_reads(layout)
            clones = {k: self._device.clone(intake.rows[k], machine.pool.spec(k).dtype) for k in deferred if ticket}
            machine.preserve_reads(layout.slots, deadline)
            # Last: nothing may fail, and so free the page, while copies are on their way to it.
            transfer = self._stage(layout, intake, page)
        except BaseException:
            if ticket is not None:
                machine.cancel(ticket)
            machine.release_page(layout.step_id, page)
            raise
        return StepRows(
            layout,
            page,
            tuple(intake.rows),
            intake.leftovers,
            self._policy.deferred_keys,
            clones=clones,
            transfer=transfer,
            ticket=ticket,
        )

    def _stage(self, layout: StepLayout, intake: Intake, page: int) -> Transfer:
        """Start one copy a key, of the whole step, into its page."""
        machine = self._machine
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        nbytes = 0
        for key, rows in intake.rows.items():
            out = machine.staging.rows(page, key, layout.num_tokens)
            copies.append((rows, out))
            nbytes += out.nbytes
        self._counters.add_all(host_copies=len(copies), host_copy_bytes=nbytes)
        return self._device.launch(copies)


def _salvaged(scheduler_output: Any) -> StepEvents:
    """What an unreadable scheduler output says of the tokens that the engine may compute all the same."""
    told = getattr(scheduler_output, "num_scheduled_tokens", None)
    scheduled = {r: n for r, n in told.items() if isinstance(n, int) and n > 0} if isinstance(told, Mapping) else {}
    admitted = getattr(scheduler_output, "scheduled_new_reqs", None)
    pairs = [
        (getattr(new, "req_id", None), getattr(new, "num_computed_tokens", None))
        for new in (admitted if isinstance(admitted, Sequence) else ())
    ]
    cached = getattr(scheduler_output, "scheduled_cached_reqs", None)
    columns = [getattr(cached, name, None) for name in ("req_ids", "num_computed_tokens")]
    pairs.extend(zip(*(c if isinstance(c, Sequence) else () for c in columns), strict=False))
    return StepEvents(
        finished=(),
        admitted=(),
        num_scheduled=scheduled,
        computed={r: n for r, n in pairs if isinstance(r, str) and isinstance(n, int)},
        total=sum(scheduled.values()),
        problems=(),
    )


def _as_req_ids(req_ids: Iterable[ReqId]) -> tuple[ReqId, ...]:
    if not isinstance(req_ids, str):
        try:
            wanted = tuple(req_ids)
            return wanted if len(set(wanted)) == len(wanted) else tuple(dict.fromkeys(wanted))
        except TypeError:  # no iterable, or of things that are no ids
            pass
    raise OmniPrefixCacheContractError(
        f"req_ids is {req_ids!r}; materialize takes a step id and a list of request ids: materialize(step_id, ['...'])"
    )


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= TIMEOUT_MAX


def _as_int(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise OmniPrefixCacheContractError(f"{name} is {value!r}, not an integer") from None
