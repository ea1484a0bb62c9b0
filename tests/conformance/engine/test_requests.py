"""`conformance.engine.requests`."""

import pytest

from conformance.engine import Request


def _request(tokens: list[int], block_size: int = 4) -> Request:
    return Request("r", tokens, len(tokens), 3, block_size)


def test_only_full_blocks_have_digests() -> None:
    """A block gets its digest when its last token is known, be it of the prompt or sampled."""
    request = _request([1, 2, 3])
    assert request.digests == []
    request.append_token(4)
    assert len(request.digests) == 1
    request.append_token(5)
    assert len(request.digests) == 1


def test_a_digest_covers_everything_before_it() -> None:
    """Equal blocks after different prefixes have different digests; equal prefixes have equal ones."""
    one, other = _request([1, 1, 1, 1, 7, 7, 7, 7]), _request([2, 1, 1, 1, 7, 7, 7, 7])
    assert one.digests[1] != other.digests[1]
    assert one.digests == _request([1, 1, 1, 1, 7, 7, 7, 7, 9]).digests


def test_a_request_is_done_after_its_last_sampled_token() -> None:
    """``max_tokens`` counts sampled tokens only."""
    request = _request([1])
    for _ in range(2):
        request.append_token(0)
        assert not request.is_done
    request.append_token(0)
    assert request.is_done


@pytest.mark.parametrize(("tokens", "max_tokens"), [([], 1), ([1], 0)])
def test_an_empty_request_is_refused(tokens: list[int], max_tokens: int) -> None:
    """There is nothing to compute for a request without a prompt or without a token to sample."""
    with pytest.raises(ValueError, match="at least one"):
        Request("r", tokens, len(tokens), max_tokens, 4)
