"""What a forward returned, sorted into rows and leftovers, and what is remembered of undeclared keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_prefix_fast import HIDDEN_KEY, ModelCachePolicy, OmniPrefixCacheContractError
from omni_prefix_fast import intake as intake_module
from omni_prefix_fast.intake import MAX_DEPTH, KeySorter, PerRequest, Sliced, TokenCount, Whole, share_of, to_host
from omni_prefix_fast.layout import StepLayout

NO_HIDDEN = ModelCachePolicy(needs_full_hidden_states=False)


def layout_of(**counts: int) -> StepLayout:
    """Requests one after another from position 0 on."""
    offsets = [0, *np.cumsum(list(counts.values())).tolist()]
    return StepLayout(
        3,
        tuple(counts),
        {r: i for i, r in enumerate(counts)},
        counts=tuple(counts.values()),
        offsets=tuple(offsets),
        starts=tuple(0 for _ in counts),
        ends=tuple(counts.values()),
        slots=np.arange(offsets[-1]),
    )


AB = layout_of(A=2, B=3)


def sort(sorter: KeySorter, mm: Any, layout: StepLayout = AB, padded: int | None = None) -> tuple[set[str], set[str]]:
    """Keys that are rows, and keys that are leftovers."""
    intake = sorter.sort(None, mm, layout, layout.num_tokens if padded is None else padded)
    return set(intake.rows), set(intake.leftovers)


@given(unpadded=st.integers(0, 9), extra=st.integers(0, 9), rows=st.integers(0, 20))
def test_two_lengths_fit(unpadded: int, extra: int, rows: int) -> None:
    """A per-token tensor has the step's tokens or the padded batch's, nothing between."""
    assert TokenCount(unpadded, unpadded + extra).fits(rows) == (rows in {unpadded, unpadded + extra})


def test_hidden_states_come_first_and_lose_their_padding() -> None:
    """Rows are live tensors cut to the step's tokens, hidden states before mm keys."""
    hidden, k = torch.arange(16.0).reshape(8, 2), torch.ones(5, 3)
    intake = KeySorter(ModelCachePolicy()).sort(hidden, {"k": k}, AB, 8)
    assert list(intake.rows) == [HIDDEN_KEY, "k"]
    assert intake.rows[HIDDEN_KEY].shape == (5, 2)
    assert intake.rows[HIDDEN_KEY].data_ptr() == hidden.data_ptr()


def test_skipped_hidden_states_are_not_looked_at() -> None:
    """A policy without hidden states takes anything there."""
    assert KeySorter(NO_HIDDEN).sort("anything", None, AB, 5).rows == {}


@pytest.mark.parametrize(
    ("value", "is_rows"),
    [
        (torch.zeros(5, 2), True),
        (torch.zeros(8, 2), True),
        (torch.zeros(5, 1, 2), True),
        (torch.zeros(5), False),
        (torch.zeros(4, 2), False),
        (torch.zeros(5, 2).tolist(), False),
        (torch.tensor(1), False),
    ],
    ids=["unpadded", "padded", "rank 2", "vector", "other length", "list", "scalar"],
)
def test_undeclared_key_at_first_sight(value: Any, is_rows: bool) -> None:
    """A key nobody declared has a row a token if its tensor has the length and a feature dimension."""
    assert sort(KeySorter(NO_HIDDEN), {"k": value}, padded=8) == (({"k"}, set()) if is_rows else (set(), {"k"}))


@pytest.mark.parametrize("declared", [frozenset[str](), frozenset({"t"})])
def test_declared_token_keys_leave_no_guess(declared: frozenset[str]) -> None:
    """With a declaration no other key is per token, whatever its shape; a vector is, if it is declared."""
    sorter = KeySorter(NO_HIDDEN.model_copy(update={"token_keys": declared}))
    assert sort(sorter, {"t": torch.zeros(5), "u": torch.zeros(5, 2)}) == (set(declared), {"t", "u"} - declared)


@pytest.mark.parametrize("first", [True, False], ids=["rows first", "leftover first"])
def test_first_sight_decides_and_a_contradiction_settles(first: bool) -> None:
    """Once a leftover, always a leftover."""
    sorter = KeySorter(NO_HIDDEN)
    seen = [sort(sorter, {"k": torch.zeros(n, 2)})[0] for n in ([5, 4, 5] if first else [4, 5, 5])]
    assert seen == ([{"k"}, set(), set()] if first else [set(), set(), set()])


@pytest.mark.parametrize("nothing", [None, torch.zeros(0, 2), torch.zeros(0)])
def test_nothing_decides_nothing(nothing: Any) -> None:
    """Emitting nothing neither makes a key per token nor stops it from being so."""
    sorter = KeySorter(NO_HIDDEN)
    sort(sorter, {"k": nothing})
    assert sort(sorter, {"k": torch.zeros(5, 2)}) == ({"k"}, set())
    assert sort(sorter, {"k": nothing}) == (set(), set())
    assert sort(sorter, {"k": torch.zeros(8, 2)}, layout_of(), padded=8) == (set(), set())
    assert sort(sorter, {"k": torch.zeros(5, 2)}) == ({"k"}, set())


def test_undo_forgets_the_last_step_only() -> None:
    """What an earlier step taught stays, what the last one taught goes."""
    sorter = KeySorter(NO_HIDDEN)
    sort(sorter, {"k": torch.zeros(5, 2)})
    sort(sorter, {"k": torch.zeros(4, 2), "new": torch.zeros(5, 2)})
    sorter.undo()
    assert sort(sorter, {"k": torch.zeros(5, 2), "new": torch.zeros(4, 2)}) == ({"k"}, {"new"})


def test_refused_step_is_undone() -> None:
    """A step that raises teaches nothing either."""
    sorter = KeySorter(NO_HIDDEN)
    with pytest.raises(OmniPrefixCacheContractError, match="not a string"):
        sort(sorter, {"k": torch.zeros(4, 2), 3: 1})
    assert sort(sorter, {"k": torch.zeros(5, 2)}) == ({"k"}, set())


def test_shares_of_leftovers() -> None:
    """Slices by request, whole values as copies, lists by place, dicts entry by entry."""
    sorter = KeySorter(NO_HIDDEN.model_copy(update={"request_list_keys": frozenset({"each"})}))
    value = {"v": torch.arange(5), "ref": torch.arange(3), "each": ["a", "b"], "deep": {"v": torch.arange(5), "n": 1}}
    leftovers = sorter.sort(None, value, AB, 5).leftovers
    kinds = {key: type(leftover) for key, leftover in leftovers.items()}
    assert kinds == {"v": Sliced, "ref": Whole, "each": PerRequest, "deep": dict}
    assert share_of(leftovers["v"], AB, "B").tolist() == [2, 3, 4]
    assert share_of(leftovers["each"], AB, "B") == "b"
    deep = share_of(leftovers["deep"], AB, "A")
    assert (deep["v"].tolist(), deep["n"]) == ([0, 1], 1)
    share_of(leftovers["ref"], AB, "A").fill_(9)
    assert share_of(leftovers["ref"], AB, "B").tolist() == [0, 1, 2]


def test_host_copies_share_nothing() -> None:
    """Tensors, arrays and containers are copied to the bottom; plain values are kept."""

    class Custom:
        def __init__(self) -> None:
            self.items = [1]

    value = {"t": torch.zeros(2, requires_grad=True), "l": [np.zeros(2), (torch.zeros(1), "x")], "c": Custom()}
    copied = to_host(value, "k")
    assert not copied["t"].requires_grad
    with torch.no_grad():
        value["t"].fill_(9)  # type: ignore[attr-defined]
    value["l"][0].fill(9)  # type: ignore[index]
    value["c"].items.append(2)  # type: ignore[attr-defined]
    assert copied["t"].tolist() == [0, 0]
    assert copied["l"][0].tolist() == [0, 0]
    assert copied["c"].items == [1]
    assert isinstance(copied["l"][1], tuple)
    for plain in (None, "x", b"x", 1, 1.5, True, 1j):
        assert to_host(plain, "k") is plain


def test_value_that_cannot_be_copied_is_named() -> None:
    """A value that cannot outlive its step is refused with its key and type."""
    with pytest.raises(OmniPrefixCacheContractError, match=r"'k'.*generator.*plain container"):
        to_host([(i for i in range(2))], "k")


def test_object_arrays_share_nothing() -> None:
    """Objects inside an array of objects are copied too: neither the live buffer nor another request's copy shows."""
    live = torch.ones(3)
    array = np.array([[None, 7], [None, "x"]], dtype=object)
    array[0, 0], array[1, 0] = live, [live]
    leftover = Whole(to_host(array, "k"))
    live.fill_(9)
    mine, others = share_of(leftover, AB, "A"), share_of(leftover, AB, "B")
    mine[0, 0].fill_(5)
    assert others.shape == (2, 2)
    assert others[0, 0].tolist() == others[1, 0][0].tolist() == [1, 1, 1]
    assert (others[0, 1], others[1, 1]) == (7, "x")


def share_b(sorter: KeySorter, mm: Any, layout: StepLayout = AB, padded: int = 5) -> Any:
    """Request B's share of every leftover."""
    leftovers = sorter.sort(None, mm, layout, padded).leftovers
    return {key: share_of(leftover, layout, "B") for key, leftover in leftovers.items()}


def test_paths_do_not_collide() -> None:
    """A slash in a key does not make it another dict's entry: B sees its own rows of the per-token one."""
    reference, rows = torch.zeros(7, 1), torch.arange(5)
    sorter = KeySorter(NO_HIDDEN)
    for _ in range(2):
        share = share_b(sorter, {"x/y": reference, "x": {"y": rows}})
        assert share["x"]["y"].tolist() == [2, 3, 4]
        assert share["x/y"].shape == (7, 1)


def test_padding_says_nothing_against_slicing() -> None:
    """A nested per-token tensor is sliced in padded steps, and in unpadded ones after them."""
    sorter = KeySorter(NO_HIDDEN)
    for rows, padded in ((8, 8), (5, 8), (5, 5), (9, 9)):
        share = share_b(sorter, {"x": {"y": torch.arange(rows)}, "v": torch.arange(rows)}, padded=padded)
        assert share["x"]["y"].tolist() == share["v"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("rows", [5, 8], ids=["unpadded", "padded"])
def test_nested_reference_once_seen_stays_whole(rows: int) -> None:
    """A nested tensor that had neither count of rows is handed over whole also when it happens to have one."""
    sorter = KeySorter(NO_HIDDEN)
    for n in (7, rows):
        assert share_b(sorter, {"x": {"y": torch.arange(n)}}, padded=8)["x"]["y"].tolist() == list(range(n))


def test_memory_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Keys and paths named after what passes through stop being remembered; those known by then still are.

    A new key is never cached from then on, which is said once; a new nested path is judged at each step.
    """
    monkeypatch.setattr(intake_module, "MAX_REMEMBERED", 4)
    sorter = KeySorter(NO_HIDDEN)
    sort(sorter, {"rows": torch.zeros(5, 2), "d": {"ref": torch.zeros(7)}})
    for i in range(20):
        sort(sorter, {f"codes.{i}": torch.zeros(9, 3), "d": {f"image-{i}": torch.zeros(7)}})
    assert sorter.remembered == (4, 4)
    late = {"rows": torch.zeros(5, 2), "late": torch.zeros(5, 2), "d": {"ref": torch.zeros(5), "new": torch.zeros(5)}}
    assert sort(sorter, late) == ({"rows"}, {"late", "d"})
    share = share_b(sorter, late)
    assert share["late"].shape == (3, 2)
    assert {k: len(v) for k, v in share["d"].items()} == {"ref": 5, "new": 3}
    assert len([r for r in caplog.records if "undeclared mm keys" in r.getMessage()]) == 1
    with pytest.raises(OmniPrefixCacheContractError, match=r"'late'.*too many undeclared"):
        sorter.check_per_token("late", (2,))


def test_undo_of_nested_paths_and_of_nothing() -> None:
    """What a step taught of nested tensors is undone with it, once."""
    sorter = KeySorter(NO_HIDDEN)
    share_b(sorter, {"d": {"old": torch.zeros(7)}})
    share_b(sorter, {"d": {"old": torch.zeros(7), "new": torch.zeros(7)}})
    sorter.undo()
    sorter.undo()
    share = share_b(sorter, {"d": {"old": torch.zeros(5), "new": torch.zeros(5)}})
    assert {k: len(v) for k, v in share["d"].items()} == {"old": 5, "new": 3}


NOT_DENSE = {
    "sparse": lambda: torch.ones(5, 2).to_sparse(),
    "sparse vector": lambda: torch.ones(5).to_sparse(),
    "sparse of other length": lambda: torch.ones(3, 2).to_sparse(),
    "csr": lambda: torch.ones(5, 2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 2)] * 5),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 2)] * 5, layout=torch.jagged),
    "meta": lambda: torch.ones(5, 2, device="meta"),
    "mkldnn": lambda: torch.ones(5, 2).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.parametrize("where", ["hidden", "mm", "declared", "nested", "list", "request"])
def test_tensor_that_is_not_dense_is_refused_when_saved(kind: str, where: str) -> None:
    """Sparse, nested, mkldnn and meta tensors are refused with key and layout, wherever they stand."""
    policy = ModelCachePolicy(
        needs_full_hidden_states=where == "hidden",
        token_keys=frozenset({"k"}) if where == "declared" else None,
        request_keys=frozenset({"k"}) if where == "request" else frozenset(),
    )
    try:
        tensor = NOT_DENSE[kind]()
    except RuntimeError as error:
        pytest.skip(f"this build of torch makes none: {error}")
    value = {"nested": {"a": {"b": tensor}}, "list": [tensor]}.get(where, tensor)
    hidden, mm = (tensor, None) if where == "hidden" else (None, {"k": value})
    who = "hidden states" if where == "hidden" else "'k'"
    with pytest.raises(OmniPrefixCacheContractError, match=f"{who}.*layout torch"):
        KeySorter(policy).sort(hidden, mm, AB, 5)


def holds_itself(container: Any) -> Any:
    """A dict, list or array of objects inside itself."""
    container[0] = container
    return container


@pytest.mark.parametrize("container", [{}, [None], np.empty(1, dtype=object)], ids=["dict", "list", "array"])
@pytest.mark.parametrize("nested", [False, True])
def test_container_that_holds_itself_is_refused(container: Any, nested: bool) -> None:
    """A value without a bottom is refused by key, and a deep one is not."""
    value = holds_itself(container)
    sorter = KeySorter(NO_HIDDEN)
    with pytest.raises(OmniPrefixCacheContractError, match=r"'k'.*holds itself"):
        sort(sorter, {"k": [value] if nested else value})
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert share_b(sorter, {"k": deep})["k"] == deep
