"""What may be saved and what comes back: types, shapes, padding, keys judged and declared, leftovers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_prefix_fast import (
    ModelCachePolicy,
    OmniPrefixCacheContractError,
)
from tests.omni_prefix_fast.harness import (
    Engine,
    column,
    filled,
    per_token,
)

DEFER = ModelCachePolicy(deferred_keys=frozenset({"d"}))
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.complex64,
]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal type, shape and bytes."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.numel() == 0 or torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("feature", [(), (1,), (3,), (2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
def test_any_type_and_feature_rank(deferred: bool, dtype: torch.dtype, feature: tuple[int, ...]) -> None:
    """Hidden rows and mm rows of every type and rank come back bit for bit: fresh, from the pool and from the log."""
    policy = ModelCachePolicy(token_keys=frozenset({"k"}), deferred_keys=frozenset({"k"} if deferred else ()))
    engine = Engine(policy=policy)

    def step(**admitted: Any) -> int:
        engine.start(**admitted)
        rows = engine.rows(*feature, dtype=dtype)
        return engine.save(hidden=rows, mm={"k": rows})

    first = engine.take(step(new=[("A", [0, 1], 0, 7)]), "A")
    second = engine.take(step(new=[("B", [0, 2], 4, 3)], finished=["A"]), "B")
    for outs, req_id in ((first, "A"), (second, "B")):
        assert outs.hidden_states is not None
        for rows in (outs.hidden_states[req_id], outs.mm_outputs["k"][req_id]):
            assert same_bits(rows, filled(range(7), *feature, dtype=dtype))


@pytest.mark.parametrize("padded", [None, 5, 8, 64])
@pytest.mark.parametrize("tensor_padded", [False, True])
def test_padded_and_unpadded_first_dimension(padded: int | None, tensor_padded: bool) -> None:
    """Rows behind the unpadded count are never cached nor handed over, whichever of the two lengths a tensor has."""
    engine = Engine()
    engine.start(new=[("A", [0, 1], 0, 5)])
    rows = engine.rows(2, padded=padded if tensor_padded else None)
    step = engine.save(hidden=rows, mm={"k": rows.clone()}, padded=padded)
    assert engine.hidden(step, "A") == [0, 1, 2, 3, 4]
    step = engine.step(new=[("B", [0, 1], 5, 1)], mm={"k": per_token(2)})
    outs = engine.take(step, "B")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["B"]) == column(outs.mm_outputs["k"]["B"]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("source", ["strided", "requires grad", "expanded"])
def test_live_buffers_of_any_make(source: str) -> None:
    """Strides, gradients and shared memory of what is saved do not matter, and it may be overwritten at once."""
    engine = Engine(policy=ModelCachePolicy(token_keys=frozenset({"k"}), deferred_keys=frozenset({"d"})))
    engine.start(new=[("A", [0], 0, 4)])
    values = torch.arange(4.0)
    made = {
        "strided": lambda: torch.stack([values, values]).T,
        "requires grad": lambda: filled(range(4), 2).requires_grad_(),
        "expanded": lambda: values[:, None].clone().expand(4, 2),
    }
    buffers = [made[source]() for _ in range(3)]
    step = engine.save(hidden=buffers[0], mm={"k": buffers[1], "d": buffers[2]})
    with torch.no_grad():
        for buffer in buffers:
            (buffer if source != "expanded" else buffer[:, :1]).fill_(99)
    outs = engine.take(step, "A")
    assert outs.hidden_states is not None
    for rows in (outs.hidden_states["A"], outs.mm_outputs["k"]["A"], outs.mm_outputs["d"]["A"]):
        assert column(rows) == [0, 1, 2, 3]
        assert not rows.requires_grad


@pytest.mark.parametrize("key", ["hidden", "k", "d"])
@pytest.mark.parametrize(
    "brought",
    [(3, torch.float32), (2, torch.float64), (2, torch.int32)],
    ids=["width", "wider type", "another kind"],
)
def test_changed_width_or_type_is_refused_with_the_tables_unharmed(key: str, brought: tuple[int, torch.dtype]) -> None:
    """The key is named, nothing is changed, and the same step saved again with the right rows is right."""
    engine = Engine(policy=ModelCachePolicy(token_keys=frozenset({"k"}), deferred_keys=frozenset({"d"})))
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"k": per_token(2), "d": per_token(2)}), "A")
    engine.start(new=[("B", [0, 1], 4, 2)])
    before = engine.settled()
    wrong = engine.rows(brought[0], dtype=brought[1])
    mm: dict[str, Any] = {"k": per_token(2), "d": per_token(2)}
    name = "__hidden_states__" if key == "hidden" else key
    save: dict[str, Any] = {"hidden": wrong, "mm": mm} if key == "hidden" else {"mm": {**mm, key: wrong}}
    with pytest.raises(OmniPrefixCacheContractError, match=rf"{name!r}.*float32 \(2,\)"):
        engine.save(**save)
    assert engine.settled() == before
    outs = engine.take(engine.save(mm=mm), "B")
    assert outs.hidden_states is not None
    for rows in (outs.hidden_states["B"], outs.mm_outputs["k"]["B"], outs.mm_outputs["d"]["B"]):
        assert column(rows) == [0, 1, 2, 3, 4, 5]


def test_narrower_type_keeps_its_values_in_the_type_of_the_key() -> None:
    """Half-precision rows under a key of full precision are handed over as the key's type, cached ones and new ones."""
    engine = Engine(policy=DEFER)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"d": per_token(2)}), "A")
    step = engine.step(
        new=[("B", [0, 1], 4, 2)],
        hidden=filled([4, 5], 2, dtype=torch.float16),
        mm={"d": per_token(2, dtype=torch.bfloat16)},
    )
    outs = engine.take(step, "B")
    assert outs.hidden_states is not None
    for rows in (outs.hidden_states["B"], outs.mm_outputs["d"]["B"]):
        assert rows.dtype == torch.float32
        assert column(rows) == [0, 1, 2, 3, 4, 5]


def test_outputs_share_no_memory() -> None:
    """What is handed over may be overwritten: no later hit, and no other request of the step, sees it."""
    engine = Engine()
    step = engine.step(
        new=[("A", [0], 0, 4), ("B", [1], 0, 4)], base={"B": 50}, mm={"k": per_token(2), "ref": [torch.ones(2)]}
    )
    outs = engine.take(step, "A", "B")
    assert outs.hidden_states is not None
    outs.hidden_states["A"].fill_(99)
    outs.mm_outputs["k"]["A"].fill_(99)
    outs.mm_outputs["ref"]["A"][0].fill_(99)
    assert column(outs.hidden_states["B"]) == [50, 51, 52, 53]
    assert outs.mm_outputs["ref"]["B"][0].tolist() == [1, 1]
    outs = engine.take(engine.step(new=[("C", [0, 2], 4, 1)], mm={"k": per_token(2)}), "C")
    assert outs.hidden_states is not None
    assert column(outs.hidden_states["C"]) == column(outs.mm_outputs["k"]["C"]) == [0, 1, 2, 3, 4]


def test_leftovers_by_kind() -> None:
    """A tensor of the step's length is sliced, a dict is mapped over, lists and anything else pass whole."""
    engine = Engine()
    lengths = torch.arange(5)
    meta = {"t": torch.arange(5) * 10, "deep": {"u": torch.arange(5.0)}, "name": "x"}
    value = object()
    step = engine.step(
        new=[("A", [0], 0, 2), ("B", [1], 0, 3)],
        mm={
            "lengths": lengths,
            "meta": meta,
            "refs": [torch.ones(1), torch.ones(2)],
            "scalar": torch.tensor(7),
            "whole": torch.arange(3),
            "text": "hello",
            "nothing": None,
            "object": value,
        },
    )
    lengths.fill_(99)
    mm = engine.take(step, "A", "B").mm_outputs
    assert (mm["lengths"]["A"].tolist(), mm["lengths"]["B"].tolist()) == ([0, 1], [2, 3, 4])
    assert mm["meta"]["B"]["t"].tolist() == [20, 30, 40]
    assert mm["meta"]["A"]["deep"]["u"].tolist() == [0, 1]
    assert mm["meta"]["A"]["name"] == "x"
    assert [r.tolist() for r in mm["refs"]["B"]] == [[1], [1, 1]]
    assert mm["scalar"]["A"] == 7
    assert mm["whole"]["A"].tolist() == [0, 1, 2]
    assert mm["text"] == {"A": "hello", "B": "hello"}
    assert type(mm["object"]["A"]) is object
    assert mm["object"]["A"] is not value
    assert "nothing" not in mm


def test_declared_request_keys_are_never_per_token() -> None:
    """A reference tensor with as many rows as the step is whole for everybody; a list gives one each."""
    policy = ModelCachePolicy(request_keys=frozenset({"ref"}), request_list_keys=frozenset({"refs"}))
    engine = Engine(policy=policy)
    mm = {"ref": filled(range(5), 2), "refs": [torch.ones(8), torch.ones(12)]}
    outs = engine.take(engine.step(new=[("A", [0], 0, 2), ("B", [1], 0, 3)], mm=mm), "B", "A").mm_outputs
    assert column(outs["ref"]["A"]) == column(outs["ref"]["B"]) == list(range(5))
    assert (len(outs["refs"]["A"]), len(outs["refs"]["B"])) == (8, 12)
    assert "ref" not in engine.cache.footprint().pool_bytes


def test_undeclared_key_that_contradicts_its_shape_is_not_cached_any_more(caplog: pytest.LogCaptureFixture) -> None:
    """First seen with a row a token, then with another length: it is whole from then on, and a warning says why."""
    engine = Engine()
    ref = filled(range(4), 2)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"ref": ref}), "A")
    step = engine.step(new=[("B", [0, 1], 4, 2)], mm={"ref": ref})
    assert "'ref'" in caplog.text
    assert "request_keys" in caplog.text
    assert engine.mm(step, "ref", "B") == [0, 1, 2, 3]
    for n in (1, 4):
        step = engine.step(new=[(f"C{n}", [0, 2], 4, n)], mm={"ref": ref})
        assert engine.mm(step, "ref", f"C{n}") == [0, 1, 2, 3]
    assert engine.cache.statistics().keys_demoted == 1


@pytest.mark.parametrize("contradiction", [[torch.ones(2)], "text", torch.tensor([1.0, 2.0]), torch.tensor(1.0), {}])
def test_value_of_another_kind_contradicts_too(contradiction: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A list, a scalar or a vector under a key that had rows settles it as well, with the warning, once and for all."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"k": per_token(2)}), "A")
    engine.take(engine.step(new=[("B", [0, 1], 4, 3)], mm={"k": contradiction}), "B")
    assert "'k'" in caplog.text
    outs = engine.take(engine.step(new=[("C", [0, 2], 4, 2)], mm={"k": per_token(2)}), "C")
    assert column(outs.mm_outputs["k"]["C"]) == [4, 5]
    assert outs.mm_spans == {}


@pytest.mark.parametrize("nothing", [None, torch.zeros(0, 2), torch.zeros(0)], ids=["None", "no rows", "no entries"])
@pytest.mark.parametrize("policy", [ModelCachePolicy(), ModelCachePolicy(token_keys=frozenset("k"))])
def test_emitting_nothing_decides_nothing(policy: ModelCachePolicy, nothing: Any) -> None:
    """A step without a value, or with an empty one, does not take a key's rows away."""
    engine = Engine(policy=policy)
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"k": per_token(2)}), "A")
    engine.take(engine.step(cached=[("A", 1, [1])], mm={"k": nothing}), "A")
    assert engine.mm(engine.step(new=[("B", [0, 2], 4, 1)], mm={"k": per_token(2)}), "k", "B") == [0, 1, 2, 3, 4]


def test_refused_save_teaches_nothing_about_keys() -> None:
    """A step that is refused for one key does not demote another; saved again, both are right."""
    engine = Engine()
    engine.take(engine.step(new=[("A", [0], 0, 4)], mm={"k": per_token(2), "l": per_token(2)}), "A")
    engine.start(new=[("B", [0, 1], 4, 2)])
    with pytest.raises(OmniPrefixCacheContractError, match="'l'"):
        engine.save(mm={"k": filled(range(9), 2), "l": per_token(3)})
    assert engine.mm(engine.save(mm={"k": per_token(2), "l": per_token(2)}), "k", "B") == [0, 1, 2, 3, 4, 5]
