"""The machine's actions one by one: names, guards, and that a state never changes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_prefix_ref import HIDDEN_KEY, BatchItem, KeySpec, Machine, Settings
from omni_prefix_ref.errors import NotEnabled, OmniPrefixCacheContractError, OmniPrefixCacheRowError
from omni_prefix_ref.state import Occupancy, TaskState

ROOT = Path(__file__).parents[2]
CODES = "codes"
SLOTS = (0, 1)
BATCH = (BatchItem("a", 0, SLOTS),)
BOTH = frozenset((HIDDEN_KEY, CODES))
ROWS = {HIDDEN_KEY: (11, 12), CODES: (21, 22)}


def start() -> Machine:
    """A machine of four blocks of two, with room for one chunk of two rows on the device."""
    keys = (KeySpec(HIDDEN_KEY, 4), KeySpec(CODES, 8, deferred=True))
    return Machine.start(Settings(2, 4, keys, staging_depth=1, page_rows=8, budget_bytes=16))


def saved() -> Machine:
    """One step of request a is saved: an immediate write for hidden rows, an open deferred one for codes."""
    machine = start().start_request("a", 0, (0,)).claim_page(1, ROWS).reserve_budget(16).claim_slots(1, SLOTS, BOTH)
    machine = machine.register_write(1, SLOTS, frozenset((HIDDEN_KEY,)))
    return machine.append_rows(BATCH, {CODES: (21, 22)}, 16).open_step(1, BATCH, BOTH)


def task_of(machine: Machine, req: str | None) -> int:
    """The write of a request; None: the immediate one."""
    return next(number for number, task in machine.tasks.items() if task.req == req)


def written(machine: Machine, task: int) -> Machine:
    """Take a pending write through the whole chain."""
    return machine.queue_task(task).claim_copy().finish_copy(task).write_pool(task).commit_task(task)


def test_every_action_of_the_page_is_a_method() -> None:
    """The actions that docs/machine.md numbers are methods of the machine, in snake case."""
    page = (ROOT / "docs" / "machine.md").read_text(encoding="utf-8")
    numbered = "\n".join(line for line in page.splitlines() if re.match(r"\d+\. ", line))
    names = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)(?:\(\w*(?:, \w+)*\))?`", numbered))
    assert len(names) > 15, "the page's list of actions was not found"
    methods = {name for name, _ in inspect.getmembers(Machine, inspect.isfunction)}
    assert {re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in names} - methods == set()


def test_every_other_method_is_explained() -> None:
    """A public method that the page does not number stands in the package's README."""
    page = (ROOT / "docs" / "machine.md").read_text(encoding="utf-8")
    readme = (ROOT / "omni_prefix_ref" / "README.md").read_text(encoding="utf-8")
    for name, _ in inspect.getmembers(Machine, inspect.isfunction):
        camel = "".join(part.capitalize() for part in name.split("_"))
        if not name.startswith("_"):
            assert camel in page or f"`{name}`" in readme, name


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda m: m.claim_page(2, ROWS), id="claim_page with no page free"),
        pytest.param(lambda m: m.reserve_budget(1), id="reserve_budget over the budget"),
        pytest.param(lambda m: m.queue_task(task_of(m, "a")), id="queue_task of an open write"),
        pytest.param(lambda m: m.claim_copy(), id="claim_copy with nothing queued"),
        pytest.param(lambda m: m.finish_copy(task_of(m, None)), id="finish_copy before claim_copy"),
        pytest.param(lambda m: m.write_pool(task_of(m, None)), id="write_pool before finish_copy"),
        pytest.param(lambda m: m.commit_task(task_of(m, None)), id="commit_task before write_pool"),
        pytest.param(lambda m: m.release_step(1), id="release_step before take_step"),
        pytest.param(
            lambda m: m.queue_task(task_of(m, None)).queue_task(task_of(m, None)), id="queue_task a second time"
        ),
    ],
)
def test_guards(act: Callable[[Machine], Machine]) -> None:
    """An action whose guard is false is not enabled, and the state it was tried on is as before."""
    machine = saved()
    before = vars(machine).copy()
    with pytest.raises(NotEnabled):
        act(machine)
    assert vars(machine) == before


def test_one_task_is_claimed_at_a_time() -> None:
    """The next task can be claimed only once the one before it is written."""
    machine = saved().seal_write("a")
    first, second = task_of(machine, None), task_of(machine, "a")
    machine = machine.queue_task(first).queue_task(second).claim_copy()
    with pytest.raises(NotEnabled):
        machine.claim_copy()
    machine = machine.finish_copy(first).write_pool(first).claim_copy()
    assert machine.tasks[second].state is TaskState.COPYING


def test_rows_are_committed_only_where_the_tenancy_lasts() -> None:
    """A slot claimed by another step before the write lands keeps the other's occupancy, and its pool row."""
    machine = written(saved(), task_of(saved(), None)).take_step(1, ()).release_step(1)
    machine = machine.claim_page(9, {HIDDEN_KEY: (31,)}).claim_slots(9, (1,), frozenset((HIDDEN_KEY,)))
    machine = written(machine.seal_write("a"), task_of(machine, "a"))
    assert machine.occupancy[CODES][:2] == (Occupancy.COMMITTED, Occupancy.ABSENT)
    assert machine.pool[CODES][:2] == (21, 0)
    assert machine.occupancy[HIDDEN_KEY][:2] == (Occupancy.COMMITTED, Occupancy.IN_TRANSIT)
    assert (machine.version[:3], machine.owner[:3]) == ((1, 2, 0), (1, 9, None))


def test_charge_ends_with_the_last_holder() -> None:
    """The chunk is charged once, and is given back when its write landed and its reader fetched."""
    machine = saved().start_request("b", 2, (0,))
    (read,) = machine.reads
    machine = machine.plan_read(read).seal_write("a")
    machine = written(machine, task_of(machine, "a"))
    assert machine.charged == 16
    machine = written(machine, task_of(machine, None)).fetch_read(read)
    assert machine.charged == 0
    assert machine.reads[read].rows == {HIDDEN_KEY: (11, 12), CODES: (21, 22)}


def test_fetch_waits_for_the_writer_and_happens_once() -> None:
    """A row in transit is fetched when its write is done, not before; a second fetch changes nothing."""
    machine = saved().start_request("b", 2, (0,))
    (read,) = machine.reads
    machine = machine.plan_read(read)
    with pytest.raises(NotEnabled):
        machine.fetch_read(read)
    machine = written(machine, task_of(machine, None)).fetch_read(read)
    assert machine.fetch_read(read) is machine
    assert set(machine.pins) == {0}


def test_absent_hidden_row_fails_its_read_for_good() -> None:
    """The read is failed when the step opens, keeps nothing pinned, and raises whenever it is fetched."""
    machine = start().start_request("b", 2, (3,))
    (read,) = machine.reads
    machine = machine.plan_read(read).claim_page(9, {}).open_step(9, (BatchItem("b", 2, ()),), frozenset())
    assert set(machine.pins) == {0}
    for _ in range(2):
        with pytest.raises(OmniPrefixCacheRowError, match="'b'"):
            machine.fetch_read(read)


def test_refused_calls_consume_nothing() -> None:
    """A wrong step id, or a request outside the snapshot, leaves the step to be taken."""
    machine = saved()
    with pytest.raises(OmniPrefixCacheContractError):
        machine.take_step(2, ())
    with pytest.raises(OmniPrefixCacheContractError):
        machine.take_step(1, ("a", "stranger"))
    assert machine.take_step(1, ("a",)).outputs(1).rows[HIDDEN_KEY] == {"a": (11, 12)}


def test_cancelled_save_gives_back_page_and_reservation() -> None:
    """A save that fails before its claim leaves no trace."""
    machine = start().claim_page(1, ROWS).reserve_budget(16).cancel_step(1)
    assert (machine.charged, machine.reserved) == (0, 0)
    assert all(not page.holders for page in machine.pages)
