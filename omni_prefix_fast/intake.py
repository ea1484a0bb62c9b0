"""What a forward returned, sorted: rows that belong to tokens, and everything else (leftovers).

A tensor is per token if the model declares its key so, or, for an undeclared key, if its first dimension is the step's
token count (or the padded one) and it has a feature dimension. Shape can mislead: a reference tensor may have as many
rows as the step. So the first sight of an undeclared key decides, and a later contradiction settles for good that it
is *not* per token.

What is remembered is bounded (`MAX_REMEMBERED`), since keys and paths may be named after what passes through.

Leftovers are copied to the host when the step is saved and once more for each request that takes one, so that nothing
handed over shares memory with a live buffer or with another request.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from omni_prefix_fast.config import ModelCachePolicy
from omni_prefix_fast.errors import OmniPrefixCacheContractError
from omni_prefix_fast.layout import StepLayout
from omni_prefix_fast.types import HIDDEN_KEY, Key, ReqId

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Undeclared keys that are remembered, and as many paths inside leftovers.

A key that comes when that many are known is never per token. A path that does is judged by its shape at each step.
"""
MAX_DEPTH = 64
"""Containers inside one another that a leftover may have; one that holds itself has more."""

_OF_REQUEST = object()
"""Stands in a path for any request's id, so that no request is remembered."""

Path: TypeAlias = tuple[Any, ...]
"""Keys from an mm key down to a leftover, not joined: `{"x/y": ..}` and `{"x": {"y": ..}}` are two."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Rows that a per-token tensor of this step may have."""

    unpadded: int
    padded: int

    def fits(self, rows: int) -> bool:
        """Whether `rows` is one of the two."""
        return rows in (self.unpadded, self.padded)


@dataclass(frozen=True, slots=True)
class Sliced:
    """A host tensor with one entry a token that is not cached; each request gets its own entries."""

    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Whole:
    """A host value that each request gets whole."""

    value: Any


@dataclass(frozen=True, slots=True)
class PerRequest:
    """One host value for each request of the batch, in batch order."""

    values: tuple[Any, ...]


Leftover: TypeAlias = "Sliced | Whole | PerRequest | dict[Any, Leftover]"


@dataclass(slots=True)
class Intake:
    """One step's outputs, sorted. Nothing is copied yet except leftovers."""

    rows: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Per-token keys, hidden states first: live tensors `(num_tokens, *feature)`, padding cut off."""
    leftovers: dict[Key, Leftover] = field(default_factory=dict)


class KeySorter:
    """Decides what is per token, and remembers what undeclared keys looked like. Engine thread."""

    def __init__(self, policy: ModelCachePolicy) -> None:
        self._policy = policy
        self._per_token: dict[Key, bool] = {}
        """What was decided of undeclared keys."""
        self._per_request: set[Path] = set()
        """Tensors among the leftovers, by path, that are not sliced."""
        self._replaced: list[tuple[Key, bool | None]] = []
        """What the step sorted last changed in `_per_token`: key and what was decided before."""
        self._added: list[Path] = []
        """What it added to `_per_request`."""
        self._full = False

    def sort(self, hidden: Any, mm_outputs: Mapping[Key, Any] | None, layout: StepLayout, padded: int) -> Intake:
        """Sort a step's outputs.

        Raises:
            OmniPrefixCacheContractError: hidden states missing or of the wrong length; a declared key that does not
                fit; a tensor that is not dense (sparse, nested, mkldnn, meta); a leftover that cannot be copied. What
                is remembered of keys is unchanged then.
        """
        count = TokenCount(layout.num_tokens, padded)
        intake = Intake()
        if self._policy.needs_full_hidden_states:
            rows = self._hidden_rows(hidden, count, layout)
            if rows is not None:
                intake.rows[HIDDEN_KEY] = rows
        if mm_outputs is not None and not isinstance(mm_outputs, Mapping):
            raise OmniPrefixCacheContractError(
                f"step {layout.step_id}: mm_outputs is a {type(mm_outputs).__name__}, not a mapping of key to value"
            )
        self._replaced, self._added = [], []
        try:
            for key, value in (mm_outputs or {}).items():
                self._sort_one(key, value, count, layout, intake)
        except BaseException:
            self.undo()
            raise
        return intake

    def check_per_token(self, key: Key, feature: Sequence[int]) -> None:
        """Raise `OmniPrefixCacheContractError` if `sort` would not take rows of `feature` under `key` for per token."""
        if not isinstance(key, str):
            raise OmniPrefixCacheContractError(f"key {key!r} is not a string")
        policy = self._policy
        if policy.is_declared_per_token(key):
            return
        if key == HIDDEN_KEY:
            reasons = {"is skipped by the policy (needs_full_hidden_states)": not policy.needs_full_hidden_states}
        else:
            reasons = {
                "is declared in ModelCachePolicy.request_keys (or _list_keys)": policy.is_declared_per_request(key),
                "is not declared in ModelCachePolicy.token_keys, which are given": policy.token_keys is not None,
                "was seen before, and had not one row a token": not self._per_token.get(key, True),
                "is one of too many undeclared keys; declare it in ModelCachePolicy.token_keys": (
                    key not in self._per_token and len(self._per_token) >= MAX_REMEMBERED
                ),
                "has no feature dimension; declare it in ModelCachePolicy.token_keys": not feature,
            }
        for reason, holds in reasons.items():
            if holds:
                raise OmniPrefixCacheContractError(f"no rows are ever kept under key {key!r}: it {reason}")

    @property
    def remembered(self) -> tuple[int, int]:
        """How many undeclared keys, and how many paths inside leftovers, are remembered."""
        return len(self._per_token), len(self._per_request)

    def undo(self) -> None:
        """The step sorted last is not saved: what it taught about keys is forgotten."""
        for key, before in reversed(self._replaced):
            if before is None:
                del self._per_token[key]
            else:
                self._per_token[key] = before
        self._per_request.difference_update(self._added)
        self._replaced, self._added = [], []

    def _hidden_rows(self, hidden: Any, count: TokenCount, layout: StepLayout) -> torch.Tensor | None:
        if hidden is None and count.unpadded == 0:
            return None
        if not isinstance(hidden, torch.Tensor):
            raise OmniPrefixCacheContractError(
                f"step {layout.step_id}: hidden states are a {type(hidden).__name__}, not a tensor; a model without "
                "them sets requires_full_prefix_cached_hidden_states = False "
                "(ModelCachePolicy.needs_full_hidden_states)"
            )
        _check_dense(hidden, HIDDEN_KEY)
        if hidden.dim() == 0 or not count.fits(hidden.shape[0]):
            raise OmniPrefixCacheContractError(
                f"step {layout.step_id}: hidden states of shape {tuple(hidden.shape)} for {count.unpadded} tokens "
                f"({count.padded} padded); pass num_tokens_unpadded and num_tokens_padded of this very step"
            )
        if hidden.shape[0] == count.unpadded:
            return hidden if count.unpadded else None
        return hidden[: count.unpadded] if count.unpadded else None

    def _sort_one(self, key: Key, value: Any, count: TokenCount, layout: StepLayout, intake: Intake) -> None:
        if not isinstance(key, str):
            raise OmniPrefixCacheContractError(f"step {layout.step_id}: mm key {key!r} is not a string")
        if key == HIDDEN_KEY:
            raise OmniPrefixCacheContractError(
                f"step {layout.step_id}: mm key {key!r} is the hidden states' own; rename the model's output"
            )
        if isinstance(value, torch.Tensor):
            _check_dense(value, key)
        if value is None or self._emits_nothing(key, value, count):
            return
        if self._policy.is_declared_per_token(key):
            rows = self._declared_rows(key, value, count, layout)
            if rows is not None:
                intake.rows[key] = rows
        elif self._looks_per_token(key, value, count):
            intake.rows[key] = value[: count.unpadded]
        elif key in self._policy.request_list_keys:
            intake.leftovers[key] = self._one_each(key, value, layout)
        else:
            whole = key in self._policy.request_keys
            intake.leftovers[key] = self._leftover((key,), value, count, whole, layout)

    def _declared_rows(self, key: Key, value: Any, count: TokenCount, layout: StepLayout) -> torch.Tensor | None:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            raise OmniPrefixCacheContractError(
                f"step {layout.step_id}: key {key!r} is declared per token (ModelCachePolicy.token_keys or "
                f"deferred_keys) but is a {_describe(value)}"
            )
        if value.shape[0] == 0 or count.unpadded == 0:
            return None  # nothing emitted in this step
        if not count.fits(value.shape[0]):
            raise OmniPrefixCacheContractError(
                f"step {layout.step_id}: key {key!r} is declared per token (ModelCachePolicy.token_keys or "
                f"deferred_keys) but has {value.shape[0]} rows for {count.unpadded} tokens ({count.padded} padded)"
            )
        if value.shape[0] == count.unpadded:
            return value
        return value[: count.unpadded]

    def _looks_per_token(self, key: Key, value: Any, count: TokenCount) -> bool:
        """Judge an undeclared key by shape; the first sight decides, a contradiction settles against."""
        if self._policy.token_keys is not None or self._policy.is_declared_per_request(key) or count.unpadded == 0:
            return False
        fits = isinstance(value, torch.Tensor) and value.dim() > 1 and count.fits(value.shape[0])
        before = self._per_token.get(key)
        if before is None and len(self._per_token) >= MAX_REMEMBERED:
            self._warn_full(key)
            return False
        if before is not False and before is not fits and not _is_empty(value):
            self._replaced.append((key, before))
            self._per_token[key] = fits
        if before and not fits:
            logger.warning(
                "mm key %r had one row a token before and is a %s for %d tokens now: it is not cached any more. "
                "Declare it in ModelCachePolicy.token_keys or request_keys.",
                key,
                _describe(value),
                count.unpadded,
            )
        return fits and before is not False

    def _warn_full(self, key: Key) -> None:
        if not self._full:
            self._full = True
            logger.warning(
                "%d undeclared mm keys were seen: %r and any other new one is never cached. Give keys fixed names, or "
                "declare them in ModelCachePolicy.token_keys or request_keys.",
                len(self._per_token),
                key,
            )

    def _emits_nothing(self, key: Key, value: Any, count: TokenCount) -> bool:
        """Whether a key with one row a token has none in this step, which decides nothing about it."""
        return self._per_token.get(key, False) and (count.unpadded == 0 or _is_empty(value))

    def _one_each(self, key: Key, value: Any, layout: StepLayout) -> PerRequest:
        if not isinstance(value, (list, tuple)) or len(value) != len(layout.req_ids):
            raise OmniPrefixCacheContractError(
                f"step {layout.step_id}: key {key!r} is declared in ModelCachePolicy.request_list_keys but is a "
                f"{_describe(value)}, not a list of {len(layout.req_ids)} entries"
            )
        return PerRequest(tuple(to_host(v, key) for v in value))

    def _leftover(self, path: Path, value: Any, count: TokenCount, whole: bool, layout: StepLayout) -> Leftover:
        if isinstance(value, dict):
            _check_depth(len(path), path[0])
            names = layout.index
            return {
                k: self._leftover((*path, _OF_REQUEST if k in names else k), v, count, whole, layout)
                for k, v in value.items()
            }
        if not isinstance(value, torch.Tensor):
            return Whole(to_host(value, path[0], len(path)))
        if len(path) > 1:  # else it was looked at before
            _check_dense(value, path[0])
        if value.dim() and value.numel() and not whole and count.unpadded:
            if not count.fits(value.shape[0]):
                self._remember_whole(path)
            elif path not in self._per_request:
                return Sliced(_host_copy(value[: count.unpadded]))
        return Whole(_host_copy(value))

    def _remember_whole(self, path: Path) -> None:
        if path not in self._per_request and len(self._per_request) < MAX_REMEMBERED:
            self._per_request.add(path)
            self._added.append(path)


def share_of(leftover: Leftover, layout: StepLayout, req_id: ReqId) -> Any:
    """One request's own copy of its share of a leftover."""
    if isinstance(leftover, dict):
        return {k: share_of(v, layout, req_id) for k, v in leftover.items()}
    if isinstance(leftover, Sliced):
        return leftover.value[layout.rows(req_id)].clone()
    if isinstance(leftover, PerRequest):
        return to_host(leftover.values[layout.index[req_id]], "")
    return to_host(leftover.value, "")


def to_host(value: Any, key: Key, depth: int = 0) -> Any:
    """A deep copy of `value` on the host, tensors detached. Raises `OmniPrefixCacheContractError` if it has none.

    `depth` counts the containers of `key` around `value`.
    """
    if isinstance(value, torch.Tensor):
        _check_dense(value, key)
        return _host_copy(value)
    if value is None or isinstance(value, (str, bytes, int, float, bool, complex)):
        return value
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.copy()
    _check_depth(depth, key)
    return _copy_container(value, key, depth)


def _copy_container(value: Any, key: Key, depth: int) -> Any:
    if type(value) is np.ndarray and value.dtype == object:
        copied = np.empty(value.size, dtype=object)
        for i, entry in enumerate(value.flat):
            copied[i] = to_host(entry, key, depth + 1)
        return copied.reshape(value.shape)
    if isinstance(value, dict):
        return {k: to_host(v, key, depth + 1) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_host(v, key, depth + 1) for v in value)
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise OmniPrefixCacheContractError(
            f"mm key {key!r} holds a {type(value).__name__} that cannot be copied ({error}); a value that outlives its "
            "step has to be a tensor, an array, a plain container or a deep-copyable object"
        ) from error


def _host_copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", copy=True)


def _check_depth(depth: int, key: Key) -> None:
    if depth > MAX_DEPTH:
        raise OmniPrefixCacheContractError(
            f"mm key {key!r} holds more than {MAX_DEPTH} containers inside one another, or one that holds itself"
        )


def _check_dense(value: torch.Tensor, key: Key) -> None:
    """Refuse a tensor without plain rows in memory."""
    # A subclass on device meta may stand for a device that torch does not know, and hold data there.
    no_data = value.is_meta and type(value) in (torch.Tensor, torch.nn.Parameter)
    if value.layout is torch.strided and not value.is_nested and not no_data:
        return
    kind = "nested tensor" if value.is_nested else "tensor without data (device meta)" if no_data else "tensor"
    what = "hidden states are" if key == HIDDEN_KEY else f"mm key {key!r} holds"
    raise OmniPrefixCacheContractError(
        f"{what} a {kind} of layout {value.layout}; only dense tensors (torch.strided) that hold data can be kept: "
        "pass to_dense(), or a list of tensors"
    )


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == 0


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, Sequence):
        return f"{type(value).__name__} of {len(value)} entries"
    return type(value).__name__
