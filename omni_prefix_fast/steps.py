"""Step contexts: all that `materialize` needs of a saved step, and the rule that each is consumed exactly once.

Called under the state lock; never blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from omni_prefix_fast.errors import OmniPrefixCacheContractError
from omni_prefix_fast.intake import Leftover
from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.reads import HitRead
from omni_prefix_fast.tasks import ImmediateWrite
from omni_prefix_fast.types import Key, ReqId, Span, StepId


@dataclass(slots=True)
class StepContext:
    """One saved step, as it was when it was saved. Nothing of it is set again."""

    layout: StepLayout
    page: int
    emitted: tuple[Key, ...]
    """Per-token keys whose rows stand in the page, hidden states first."""
    leftovers: Mapping[Key, Leftover]
    reads: Mapping[ReqId, HitRead]
    hands_hidden: bool
    landing: ImmediateWrite | None = None
    """The write that brings the rows to the page, if they were not there when the step was saved."""

    def spans(self, req_ids: Sequence[ReqId]) -> dict[ReqId, Span]:
        """Positions that each request's rows cover: its hit span and what the step computed."""
        layout = self.layout
        if len(req_ids) == len(layout.req_ids):  # everybody: no look-up a request
            of_step = dict(zip(layout.req_ids, zip(layout.starts, layout.ends, strict=True), strict=True))
            spans = of_step if req_ids == layout.req_ids else {r: of_step[r] for r in req_ids}
        else:
            at = [layout.index[r] for r in req_ids]
            spans = {r: (layout.starts[i], layout.ends[i]) for r, i in zip(req_ids, at, strict=True)}
        for req_id, read in self.reads.items():
            if req_id in spans:
                spans[req_id] = (read.start, spans[req_id][1])
        return spans


class StepTable:
    """Step ids in use. An id is issued before its save does anything, and is never issued twice."""

    def __init__(self) -> None:
        self._next: StepId = 0
        self._open: dict[StepId, StepContext] = {}

    def issue(self) -> StepId:
        """The next step id."""
        step_id = self._next
        self._next += 1
        return step_id

    def open(self, context: StepContext) -> None:
        """The step is saved."""
        self._open[context.layout.step_id] = context

    def take(self, step_id: StepId, req_ids: Iterable[ReqId] = ()) -> StepContext:
        """Consume a step. A wrong id, or a request that the step did not have, is refused and consumes nothing."""
        known = isinstance(step_id, int)
        context = self._open.get(step_id) if known else None
        if context is None:
            issued = known and step_id in range(self._next)
            why = "was consumed already, or its save failed" if issued else "was never issued by save_outputs"
            raise OmniPrefixCacheContractError(
                f"step id {step_id!r} {why}; each id goes to materialize or discard_step exactly once. "
                f"Unconsumed step ids: {self.unconsumed()}"
            )
        index = context.layout.index
        if req_ids != context.layout.req_ids and (strangers := [r for r in req_ids if r not in index]):
            raise OmniPrefixCacheContractError(
                f"step {step_id}: requests {strangers} were not in the batch when it was saved; "
                f"it had {list(context.layout.req_ids)}"
            )
        del self._open[step_id]  # unlike a call, nothing between which and the return an interrupt may come
        return context

    def unconsumed(self) -> list[StepId]:
        """Ids that nobody has consumed yet."""
        return list(self._open)

    def contexts(self) -> list[StepContext]:
        """Saved steps that nobody has consumed yet."""
        return list(self._open.values())

    def clear(self) -> list[StepContext]:
        """Drop every saved step."""
        contexts = self.contexts()
        self._open.clear()
        return contexts
