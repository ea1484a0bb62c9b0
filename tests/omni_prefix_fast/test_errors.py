"""The error tree is the one drawn at the top of its module, and one `except` catches all of it."""

import re

import pytest

from omni_prefix_fast import errors

PUBLIC = [value for value in vars(errors).values() if isinstance(value, type) and value.__module__ == errors.__name__]


@pytest.mark.parametrize("error", PUBLIC, ids=lambda error: error.__name__)
def test_every_error_is_caught_by_the_base(error: type[Exception]) -> None:
    """Each error that the cache raises on purpose is an `OmniPrefixCacheUnmatchError` and says what it is for."""
    assert issubclass(error, errors.OmniPrefixCacheUnmatchError)
    assert issubclass(error, RuntimeError)
    assert error.__doc__


def test_drawing_lists_every_error() -> None:
    """The tree at the top of the module names each class, once."""
    drawn = re.findall(r"^(?:[ |`-]{4,8})(OmniPrefixCache\w+)", errors.__doc__ or "", flags=re.MULTILINE)
    assert sorted(drawn) == sorted(error.__name__ for error in PUBLIC)
