"""`conformance.engine.model`: rows as a function of the token prefix."""

import numpy as np
import pytest
import torch

from conformance.engine import ModelConfig, PrefixModel
from conformance.engine.model import CODES, FEATURES, TOKEN_KEYS, VOICE


def test_rows_depend_on_the_whole_prefix_and_on_nothing_else() -> None:
    """Equal prefixes have equal rows; after the first difference all rows differ, under every key."""
    model = PrefixModel()
    one = model.rows(model.chains([3, 1, 4, 1, 5, 9]))
    same = model.rows(model.chains([3, 1, 4, 1, 5, 9, 2])[:6])
    other = model.rows(model.chains([3, 1, 7, 1, 5, 9]))
    assert torch.equal(one.hidden, same.hidden)
    assert torch.equal(one.hidden[:2], other.hidden[:2])
    assert not (one.hidden[2:] == other.hidden[2:]).all(dim=1).any()
    for key in (CODES, FEATURES):
        assert torch.equal(one.mm[key][:2], other.mm[key][:2])
        assert not (one.mm[key][2:] == other.mm[key][2:]).flatten(1).all(dim=1).any()


def test_advancing_token_by_token_is_the_same_as_from_scratch() -> None:
    """A forward that continues from a stored chain value computes the same rows."""
    model = PrefixModel()
    tokens = [5, 0, 60, 17]
    chain = None
    for token in tokens:
        chain = model.advance(chain, token)
    assert chain == int(model.chains(tokens)[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_has_a_value_that_could_stand_for_nothing(dtype: torch.dtype) -> None:
    """Every hidden value is finite and none is zero, so that zeros and leftovers of a buffer show."""
    model = PrefixModel(ModelConfig(hidden_dtype=dtype, hidden_size=16))
    hidden = model.rows(model.chains(list(range(50)) * 20)).hidden
    assert hidden.dtype is dtype
    assert torch.isfinite(hidden).all()
    assert (hidden != 0).all()


def test_rows_are_all_different() -> None:
    """A thousand different prefixes give a thousand different rows."""
    model = PrefixModel()
    hidden = model.rows(model.chains([n % 61 for n in range(1000)])).hidden
    assert len(torch.unique(hidden, dim=0)) == 1000


def test_only_some_requests_and_only_some_of_their_tokens_speak() -> None:
    """``voice`` belongs to requests whose first token is odd; where a token has no row there are zeros."""
    model = PrefixModel()
    silent, speaking = (model.rows(model.chains([first, *range(40)])) for first in (2, 3))
    assert not silent.emits.any()
    assert 0 < speaking.emits.sum() < 41
    assert torch.equal((speaking.mm[VOICE] != 0).all(dim=1), torch.from_numpy(speaking.emits))
    assert (silent.mm[VOICE] == 0).all()


def test_shapes_and_dtypes_are_as_documented() -> None:
    """Keys of one, two and three dimensions, of whole and of floating numbers."""
    rows = PrefixModel(ModelConfig(hidden_size=5)).rows(np.arange(7, dtype=np.uint64))
    assert rows.hidden.shape == (7, 5)
    assert {key: (tuple(rows.mm[key].shape), rows.mm[key].dtype) for key in TOKEN_KEYS} == {
        CODES: ((7, 2), torch.int64),
        FEATURES: ((7, 2, 3), torch.float32),
        VOICE: ((7, 4), torch.float32),
    }


def test_another_hidden_dtype_is_refused() -> None:
    """The model draws bits for two formats."""
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        PrefixModel(ModelConfig(hidden_dtype=torch.int8))
