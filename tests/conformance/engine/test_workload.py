"""`conformance.engine.workload`: seeded, and with the shapes that it promises."""

from collections import Counter

import pytest

from conformance.engine import WorkloadConfig, make_workload

CONFIG = WorkloadConfig(num_requests=600, block_size=4, vocab_size=61)


def test_a_seed_decides_everything() -> None:
    """The same seed gives the same requests, another seed others."""
    assert make_workload(3, CONFIG) == make_workload(3, CONFIG)
    assert make_workload(3, CONFIG) != make_workload(4, CONFIG)


def test_requests_come_in_order_with_ids_of_their_own() -> None:
    """Arrivals never go back; the number of requests is the one asked for."""
    planned = make_workload(0, CONFIG)
    assert len({request.req_id for request in planned}) == len(planned) == CONFIG.num_requests
    assert [request.arrival for request in planned] == sorted(request.arrival for request in planned)
    assert all(1 <= len(request.prompt) <= CONFIG.max_prompt for request in planned)


def test_all_shapes_occur() -> None:
    """Shared prefixes, identical prompts at once, prompts below a block, exact multiples, aborts."""
    planned = make_workload(1, CONFIG)
    lengths = [len(request.prompt) for request in planned]
    firsts = Counter(request.prompt[:4] for request in planned if len(request.prompt) >= 4)
    twins = Counter((request.arrival, request.prompt) for request in planned)
    assert min(lengths) < 4
    assert sum(length % 4 == 0 for length in lengths) > 60
    assert firsts.most_common(1)[0][1] > 20
    assert sum(count > 1 for count in twins.values()) > 20
    assert 10 < sum(request.abort_after is not None for request in planned) < 120


def test_a_prompt_limit_without_room_is_refused() -> None:
    """Two blocks and a tail must fit."""
    with pytest.raises(ValueError, match="max_prompt"):
        WorkloadConfig(num_requests=1, block_size=16, vocab_size=61, max_prompt=20)
