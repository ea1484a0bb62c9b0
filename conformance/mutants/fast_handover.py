"""Faults of the production package between the cache and whoever sees rows: spans, merges, copies of live rows."""

# ruff: noqa: SLF001 - a fault reaches into the machine that it breaks, and says what it does
from __future__ import annotations

from typing import Any

from conformance.mutants.fast_edit import Edit, Edits, FastMutant, Function, Wrap
from omni_prefix_fast import device, intake, manager, merge
from omni_prefix_fast.device import HostDevice
from omni_prefix_fast.intake import KeySorter
from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.log import DeferredLog
from omni_prefix_fast.manager import OmniPrefixCacheManager
from omni_prefix_fast.recycler import RecyclingAllocator
from omni_prefix_fast.requests import RequestTable
from omni_prefix_fast.staging import StagingBufferPool


def _aliasing(_: Function) -> Function:
    def _stage(self: OmniPrefixCacheManager, step: StepLayout, intake: Any, page: int) -> Any:
        staging = self._machine.staging
        for key, rows in intake.rows.items():
            staging._pages[page, key] = rows.contiguous()
        del step
        return self._device.launch([])

    return _stage


SPANS = (
    FastMutant(
        "resume_off_by_one",
        "a resumed request is owed one row less than it was never handed",
        "span_owed_until_emitted",
        (
            Edit(
                RequestTable,
                "owed",
                "(self.emitted(admitted.req_id), admitted.computed)",
                "(self.emitted(admitted.req_id) + (admitted.req_id in self), admitted.computed)",
            ),
        ),
        cases=("E24",),
    ),
    FastMutant(
        "continuation_is_hit",
        "rows that were handed over are handed over again",
        "span_owed_until_emitted",
        (Edit(RequestTable, "owed", "self.emitted(admitted.req_id),", "0,"),),
        cases=("E21", "E26"),
    ),
    FastMutant(
        "emitted_never_falls",
        "rows that a resume computes again do not move the watermark back",
        "span_owed_until_emitted",
        (
            Edit(
                RequestTable,
                "advance",
                "self._emitted.update(zip(req_ids, ends, strict=True))",
                "self._emitted.update((r, max(e, self.emitted(r))) for r, e in zip(req_ids, ends, strict=True))",
            ),
        ),
    ),
    FastMutant(
        "partial_block_dropped",
        "a hit span that starts within a block starts at the next",
        "rows_are_right",
        (
            Edit(
                RequestTable,
                "owed",
                "(self.emitted(admitted.req_id), admitted.computed)",
                "(-(-self.emitted(admitted.req_id) // self._block_size) * self._block_size, admitted.computed)",
            ),
        ),
        cases=("E06",),
    ),
    FastMutant(
        "hit_rows_left_out",
        "only this step's rows are handed over",
        "span_owed_until_emitted",
        (Edit(merge, "_step_rows", "_merged(context.reads.get(r), key,", "_merged(None, key,"),),
        cases=("E01",),
    ),
    FastMutant(
        "unemitted_key_dropped",
        "cached rows of a key are lost if the step does not emit it",
        "span_owed_until_emitted",
        (Edit(manager, "merge", "(*context.emitted, *sorted(hit_keys - emitted))", "context.emitted"),),
        cases=("D1",),
    ),
    FastMutant(
        "split_by_prompt_length",
        "the batch is split by whole lengths, not by what the step computes",
        "rows_are_right",
        (
            Edit(
                StepLayout, "rows", "slice(self.offsets[i], self.offsets[i + 1])", "slice(self.starts[i], self.ends[i])"
            ),
        ),
        cases=("E02", "E08"),
    ),
    FastMutant(
        "batch_order_for_asked_order",
        "rows are given to the requests in the order of the batch, whatever order they are asked for in",
        "rows_are_right",
        (Edit(merge, "_step_rows", "req_ids == layout.req_ids:", "len(req_ids) == len(layout.req_ids):"),),
        cases=("E02",),
    ),
    FastMutant(
        "padding_counted",
        "rows of the padding are taken for tokens",
        "rows_are_right",
        (
            Edit(KeySorter, "_declared_rows", "return value[: count.unpadded]", "return value"),
            Edit(
                KeySorter,
                "_hidden_rows",
                "return hidden[: count.unpadded] if count.unpadded else None",
                "return hidden",
            ),
        ),
    ),
    FastMutant(
        "ends_off_by_one",
        "a step ends at its last token, not behind it",
        "span_owed_until_emitted",
        (
            Edit(
                manager,
                "make_layout",
                "tuple(map(operator.add, starts, counts))",
                "tuple(map(lambda s, c: s + c - 1, starts, counts))",
            ),
        ),
    ),
)

COPIES = (
    FastMutant(
        "live_rows_aliased",
        "a page is a view of the live buffers",
        "page_held_while_read",
        (Wrap(OmniPrefixCacheManager, "_stage", _aliasing, "self._pages[page, key] = rows"),),
        cases=("E20",),
    ),
    FastMutant(
        "clone_is_view",
        "deferred rows are kept as a view of the live buffers",
        "rows_are_right",
        (Edit(HostDevice, "clone", "copy=True", "copy=False"),),
        cases=("E20",),
    ),
    FastMutant(
        "clone_keeps_dtype",
        "deferred rows are kept in the type that they come in, whatever the pool's is",
        "rows_are_right",
        (Edit(HostDevice, "clone", "dtype=dtype", "dtype=rows.dtype"),),
        cases=("E11",),
    ),
    FastMutant(
        "recycled_while_held",
        "memory is handed out again while a consumer still looks at it",
        "rows_are_right",
        (
            Edit(
                RecyclingAllocator,
                "__call__",
                "self._loans[id(loan)] = loan",
                "self._loans[id(loan)] = loan; self._give_back(loan)",
            ),
        ),
        cases=("E12",),
    ),
    FastMutant(
        "leftover_is_view",
        "what is no row is kept as the live tensor",
        "rows_are_right",
        (Edit(intake, "_host_copy", "copy=True", "copy=False"),),
        cases=("E20",),
    ),
    FastMutant(
        "leftover_of_batch",
        "each request takes a tensor of the whole batch with it",
        "rows_are_right",
        (Edit(intake, "share_of", "leftover.value[layout.rows(req_id)].clone()", "leftover.value.clone()"),),
        cases=("E08",),
    ),
    FastMutant(
        "leftover_of_first_request",
        "every request takes the first one's entry of a list",
        "rows_are_right",
        (Edit(merge, "share_of", "leftover.values[layout.index[req_id]]", "leftover.values[0]"),),
        cases=("E08",),
    ),
    FastMutant(
        "stale_page_view",
        "every page is the first one",
        "page_held_while_read",
        (Edit(StagingBufferPool, "rows", "self._pages[page, key]", "self._pages[0, key]"),),
    ),
    FastMutant(
        "builder_reads_newest_page",
        "the builder reads the page of the step saved last",
        "step_consumed_once",
        (
            Edits(
                OmniPrefixCacheManager,
                "materialize",
                (
                    ("context = self._take_step", "saved = machine.steps.contexts(); context = self._take_step"),
                    ("machine.staging.rows(context.page,", "machine.staging.rows(saved[-1].page,"),
                ),
            ),
        ),
        cases=("E19", "E20"),
    ),
    FastMutant(
        "pieces_over_each_other",
        "of a deferred write that takes several copies, each goes where the first one went",
        "rows_are_right",
        (
            Edits(
                HostDevice,
                "gather_to_host",
                # Zeros, so that a catch replays to the bit.
                (("torch.empty(", "torch.zeros("), ("at += piece.shape[0]", "pass")),
            ),
        ),
    ),
    FastMutant(
        "parts_land_on_the_first",
        "each part of a deferred write is the first part over again",
        "rows_are_right",
        (Edit(device, "_joined", "indexable(part) for part in parts", "indexable(parts[0]) for part in parts"),),
    ),
    FastMutant(
        "fill_takes_first_rows",
        "a deferred write takes the first rows of each chunk, whoever's they are",
        "rows_are_right",
        (
            Edit(
                DeferredLog,
                "fill",
                "at = chunk.layout.rows(req_id)",
                "at = slice(0, len(range(*chunk.layout.rows(req_id).indices(1 << 40))))",
            ),
        ),
    ),
)

HANDOVER = (*SPANS, *COPIES)
