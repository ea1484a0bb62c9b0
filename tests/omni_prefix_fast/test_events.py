"""What is read out of a scheduler output."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omni_prefix_fast import OmniPrefixCacheContractError
from omni_prefix_fast.events import Resumed, Started, StepEvents, read_scheduler_output


def new(req_id: str = "A", computed: Any = 4, blocks: Any = ([0, 1],), prompt: Any = (1, 2, 3)) -> SimpleNamespace:
    """A new request's entry."""
    return SimpleNamespace(
        req_id=req_id,
        num_computed_tokens=computed,
        block_ids=blocks,
        prompt_token_ids=None if prompt is None else prompt,
    )


def cached(**fields: Any) -> SimpleNamespace:
    """An output with nothing but cached requests A (running) and B (resumed); `fields` replace theirs."""
    entry: dict[str, Any] = {
        "req_ids": ["A", "B"],
        "resumed_req_ids": {"B"},
        "new_block_ids": [None, ([4, 5],)],
        "num_computed_tokens": [9, 4],
    }
    entry.update(fields)
    kept = {name: value for name, value in entry.items() if not (isinstance(value, str) and value == "left out")}
    return SimpleNamespace(scheduled_cached_reqs=SimpleNamespace(**kept))


def test_empty_output_is_an_empty_step() -> None:
    """Every field is optional: an object with none of them is a step of zero tokens."""
    empty = StepEvents((), (), {}, {}, 0, ())
    assert read_scheduler_output(object()) == empty
    nothing = dict.fromkeys(
        ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"), None
    )
    assert read_scheduler_output(SimpleNamespace(**nothing)) == empty


def test_all_fields_are_read() -> None:
    """Finished ids, new and resumed requests with their tables, counts and positions."""
    output = SimpleNamespace(
        scheduled_new_reqs=[new()],
        scheduled_cached_reqs=cached(
            req_ids=["B"], new_block_ids=[([4, 5],)], num_computed_tokens=[7]
        ).scheduled_cached_reqs,
        num_scheduled_tokens={"A": 3, "B": 1},
        total_num_scheduled_tokens=4,
        finished_req_ids={"Z"},
    )
    events = read_scheduler_output(output)
    assert events.finished == ("Z",)
    assert events.admitted == (Started("A", 4, [0, 1], 3), Resumed("B", 7, [4, 5]))
    assert events.num_scheduled == {"A": 3, "B": 1}
    assert events.computed == {"A": 4, "B": 7}
    assert events.total == 4
    assert events.problems == ()


def test_running_requests_are_not_admitted() -> None:
    """A request that merely goes on tells its position and nothing else."""
    events = read_scheduler_output(cached(resumed_req_ids=set(), new_block_ids=[([7],), None]))
    assert events.admitted == ()
    assert events.computed == {"A": 9, "B": 4}


def test_positions_of_any_whole_type_are_read() -> None:
    """Positions may come as an array or a tensor; they are integers all the same."""
    for counts in (np.array([9, 4]), torch.tensor([9, 4]), [np.int32(9), 4]):
        events = read_scheduler_output(cached(num_computed_tokens=counts))
        assert events.computed == {"A": 9, "B": 4}
        assert {type(n) for n in events.computed.values()} == {int}


def test_requests_without_tokens_are_not_scheduled() -> None:
    """Only requests with at least one token are in the step."""
    assert read_scheduler_output(SimpleNamespace(num_scheduled_tokens={"A": 0, "B": 2})).num_scheduled == {"B": 2}


def test_older_flags_of_resumption_are_understood() -> None:
    """Engines that tell resumption as a list of flags serve as well."""
    events = read_scheduler_output(cached(resumed_req_ids="left out", resumed_from_preemption=[False, True]))
    assert events.admitted == (Resumed("B", 4, [4, 5]),)


def test_flat_block_table_is_taken_as_the_only_group() -> None:
    """Block ids come as one list a KV group, or as that list itself; none at all is an empty table."""
    tables: list[Any] = [([0, 1],), [[0, 1]], [0, 1], (0, 1)]
    for array in (np.array([0, 1]), np.array([0, 1], dtype=np.uint32), torch.tensor([0, 1])):
        tables += [array, (array,), array[None], list(array)]
    admitted = [read_scheduler_output(SimpleNamespace(scheduled_new_reqs=[new(blocks=b)])).admitted[0] for b in tables]
    assert [list(a.block_ids) for a in admitted] == [[0, 1]] * len(tables)
    no_blocks: list[Any] = [None, (), [], ([],), np.empty(0, dtype=np.int64)]
    for blocks in no_blocks:
        (fresh,) = read_scheduler_output(SimpleNamespace(scheduled_new_reqs=[new(computed=0, blocks=blocks)])).admitted
        assert list(fresh.block_ids) == []


def test_prompt_may_be_unknown() -> None:
    """A request given as embeddings has no prompt tokens."""
    (admitted,) = read_scheduler_output(SimpleNamespace(scheduled_new_reqs=[new(prompt=None)])).admitted
    assert admitted == Started("A", 4, [0, 1], None)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (SimpleNamespace(scheduled_new_reqs=[new(computed=-1)]), "'A'.*num_computed_tokens=-1"),
        (SimpleNamespace(scheduled_new_reqs=[new(blocks=None)]), "'A'.*4 computed tokens but no block_ids"),
        *(
            (SimpleNamespace(scheduled_new_reqs=[new(computed=n)]), "'A'.*num_computed_tokens is")
            for n in (4.5, float("nan"), float("inf"), "4", "many", 2**70, [4])
        ),
        *(
            (SimpleNamespace(scheduled_new_reqs=[new(blocks=b)]), "'A'.*block_ids hold a")
            for b in ("01", {0, 1}, {0: 1}, 5, ({0: 1},), np.array(1))
        ),
        (cached(new_block_ids=[None, "45"]), "'B'.*block_ids hold a str"),
        (cached(new_block_ids=[None, None]), "'B' came back without block ids"),
        (cached(new_block_ids="left out"), "'B' came back without block ids"),
        (cached(num_computed_tokens="left out"), "'B' came back without num_computed_tokens"),
    ],
)
def test_unusable_entry_is_a_problem_of_its_own(output: SimpleNamespace, words: str) -> None:
    """A request that cannot be placed is reported by name and harms no other."""
    output.finished_req_ids = ["Z"]
    output.num_scheduled_tokens = {"C": 2}
    events = read_scheduler_output(output)
    (problem,) = events.problems
    assert re.search(words, problem)
    assert events.admitted == ()
    assert events.finished == ("Z",)
    assert events.num_scheduled == {"C": 2}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (SimpleNamespace(num_scheduled_tokens={"A": 3, "B": -2}), r"negative.*\['B'\]"),
        (SimpleNamespace(num_scheduled_tokens={"A": 3}, total_num_scheduled_tokens=4), "is 4, but.*adds up to 3"),
        (SimpleNamespace(num_scheduled_tokens=[3]), "SimpleNamespace.*cannot be read.*SchedulerOutput"),
        (SimpleNamespace(num_scheduled_tokens={"A": None}), "cannot be read"),
        (SimpleNamespace(scheduled_new_reqs=[SimpleNamespace()]), "cannot be read.*req_id"),
        (SimpleNamespace(scheduled_new_reqs=5), "cannot be read"),
        (SimpleNamespace(scheduled_new_reqs=[new(["x"])]), "cannot be read"),  # type: ignore[arg-type]
        (SimpleNamespace(finished_req_ids="abc"), "cannot be read.*finished_req_ids"),
        (SimpleNamespace(finished_req_ids=[["a"]]), "cannot be read"),
        (SimpleNamespace(finished_req_ids=5), "cannot be read"),
        *((SimpleNamespace(num_scheduled_tokens={"A": n}), "cannot be read") for n in (2.0, float("nan"), "2", 2**70)),
        *((SimpleNamespace(total_num_scheduled_tokens=n), "cannot be read") for n in (0.0, float("inf"), "x")),
        *((cached(num_computed_tokens=[9, n]), "cannot be read") for n in (4.5, float("inf"), "4", None, 2**70)),
        (cached(num_computed_tokens=[9]), "cannot be read"),
        (cached(new_block_ids=[None]), "cannot be read"),
    ],
)
def test_nonsense_is_refused_whole(output: Any, words: str) -> None:
    """Counts that do not add up and fields of another type are refused, saying what they should be."""
    with pytest.raises(OmniPrefixCacheContractError, match=words):
        read_scheduler_output(output)
