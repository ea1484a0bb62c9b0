"""Wrong use of every public call: what is raised, what the message says to change, and that the cache still works.

Each row of the tables is one misuse at a moment when everything is in play: A was saved and is not consumed, its
deferred write is open, B is running, and a step with a hit for C was started and is not saved yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_prefix_fast import (
    HIDDEN_KEY,
    ModelCachePolicy,
    OmniPrefixCacheClosedError,
    OmniPrefixCacheConfigError,
    OmniPrefixCacheContractError,
    OmniPrefixCacheManager,
    OmniPrefixCacheStagingTimeoutError,
    OmniPrefixCacheUnmatchError,
    OmniPrefixCacheWriteError,
    PrefixCacheConfig,
)
from tests.omni_prefix_fast.harness import Engine, ManualRuntime, View, column, filled, per_token

POLICY = ModelCachePolicy(
    token_keys=frozenset({"k"}),
    deferred_keys=frozenset({"d"}),
    request_list_keys=frozenset({"each"}),
)
MM = {"k": per_token(2), "d": per_token(3)}
C_TOKENS = 3

pytestmark = pytest.mark.eager_only("the manual clock, which shows that nobody waits, has one thread")


@dataclass
class Scene:
    """The moment at which the misuse happens."""

    engine: Engine
    consumed: int
    """Step that was materialized."""
    saved: int
    """Step of A and B that nobody has consumed."""

    @property
    def cache(self) -> OmniPrefixCacheManager:
        return self.engine.cache

    def save(self, **changes: Any) -> int:
        """`save_outputs` of C's step, with some arguments replaced."""
        rows = self.engine.rows
        arguments: dict[str, Any] = {
            "hidden": rows(2),
            "mm_outputs": {"k": rows(2), "d": rows(3)},
            "num_tokens_unpadded": C_TOKENS,
            "num_tokens_padded": 8,
        }
        mm = changes.pop("mm", None)
        arguments.update(changes)
        if mm is not None:
            arguments["mm_outputs"] = {**arguments["mm_outputs"], **mm}
        hidden, mm_outputs = arguments.pop("hidden"), arguments.pop("mm_outputs")
        return self.cache.save_outputs(hidden, mm_outputs, **arguments)


def make_scene() -> Scene:
    """Set the scene."""
    engine = Engine(
        num_blocks=16, policy=POLICY, staging_capacity_tokens=16, staging_claim_timeout_s=5.0, runtime=ManualRuntime()
    )
    consumed = engine.step(new=[("A", [0], 0, 4)], mm=MM)
    engine.take(consumed, "A")
    saved = engine.step(cached=[("A", 1, [1])], new=[("B", [2], 0, 2)], base={"B": 20}, mm=MM)
    engine.start(new=[("C", [0, 3], 4, C_TOKENS)], base={"C": 50})
    return Scene(engine, consumed, saved)


def still_right(scene: Scene) -> None:
    """The step that was started can be saved, everything is handed over, and a later hit is right."""
    outs = scene.engine.take(scene.save(), "C")
    rows = [0, 1, 2, 3, 54, 55, 56]
    assert outs.hidden_states is not None
    assert (
        column(outs.hidden_states["C"])
        == column(outs.mm_outputs["k"]["C"])
        == column(outs.mm_outputs["d"]["C"])
        == rows
    )
    assert scene.engine.mm(scene.saved, "d", "B") == [20, 21]
    late = scene.engine.step(new=[("late", [0, 4], 4, 1)], finished=["A", "B", "C"], mm=MM)
    assert scene.engine.mm(late, "d", "late") == [0, 1, 2, 3, 4]


@dataclass(frozen=True)
class Misuse:
    """One row: what is done, and words that the message has to contain."""

    name: str
    do: Callable[[Scene], object]
    words: str
    error: type[OmniPrefixCacheUnmatchError] = OmniPrefixCacheContractError

    def __str__(self) -> str:
        return self.name


def output(**fields: Any) -> SimpleNamespace:
    """A scheduler output with some fields."""
    return SimpleNamespace(**fields)


NEVER = 999

SAVE = [
    Misuse("hidden missing", lambda s: s.save(hidden=None), r"hidden states are a NoneType.*needs_full_hidden_states"),
    Misuse("hidden no tensor", lambda s: s.save(hidden=[1, 2, 3]), r"hidden states are a list.*not a tensor"),
    Misuse("hidden scalar", lambda s: s.save(hidden=torch.tensor(1.0)), r"shape \(\).*num_tokens_unpadded"),
    Misuse("hidden too short", lambda s: s.save(hidden=torch.zeros(2, 2)), r"shape \(2, 2\) for 3 tokens \(8 padded\)"),
    Misuse("hidden too long", lambda s: s.save(hidden=torch.zeros(5, 2)), r"\(5, 2\).*num_tokens_padded"),
    Misuse("hidden width", lambda s: s.save(hidden=torch.zeros(3, 4)), rf"'{HIDDEN_KEY}'.*\(2,\).*\(4,\)"),
    Misuse("hidden rank", lambda s: s.save(hidden=torch.zeros(3, 2, 1)), rf"'{HIDDEN_KEY}'.*\(2,\).*\(2, 1\)"),
    Misuse(
        "hidden wider type",
        lambda s: s.save(hidden=torch.zeros(3, 2, dtype=torch.float64)),
        rf"'{HIDDEN_KEY}'.*torch\.float32.*torch\.float64",
    ),
    Misuse("hidden integers", lambda s: s.save(hidden=torch.zeros(3, 2, dtype=torch.int32)), r"torch\.int32"),
    Misuse("hidden complex", lambda s: s.save(hidden=torch.zeros(3, 2, dtype=torch.complex64)), r"torch\.complex64"),
    Misuse("mm no mapping", lambda s: s.save(mm_outputs=[torch.zeros(3, 2)]), r"mm_outputs is a list, not a mapping"),
    Misuse("mm key no string", lambda s: s.save(mm={7: torch.zeros(3, 2)}), r"mm key 7 is not a string"),
    Misuse("mm key of hidden", lambda s: s.save(mm={HIDDEN_KEY: torch.zeros(3, 2)}), r"hidden states' own; rename"),
    Misuse("declared key a list", lambda s: s.save(mm={"k": [1, 2, 3]}), r"'k' is declared per token.*token_keys"),
    Misuse("declared key a scalar", lambda s: s.save(mm={"d": torch.tensor(1)}), r"'d' is declared.*deferred_keys"),
    Misuse("declared key too long", lambda s: s.save(mm={"k": torch.zeros(4, 2)}), r"'k'.*4 rows for 3 tokens"),
    Misuse("declared key's width", lambda s: s.save(mm={"k": torch.zeros(3, 3)}), r"'k'.*another name.*request_keys"),
    Misuse("deferred key's width", lambda s: s.save(mm={"d": torch.zeros(3, 2)}), r"'d' holds.*\(3,\).*\(2,\)"),
    Misuse("deferred key's type", lambda s: s.save(mm={"d": torch.zeros(3, 3).int()}), r"'d'.*torch\.int32"),
    Misuse(
        "type that cannot be kept",
        lambda s: s.save(mm={"k": torch.zeros(3, 2, dtype=torch.bits8)}),
        r"'k'.*torch\.bits8.*convert them",
    ),
    Misuse(
        "list key no list", lambda s: s.save(mm={"each": torch.zeros(3)}), r"'each'.*request_list_keys.*shape \(3,\)"
    ),
    Misuse("list key's length", lambda s: s.save(mm={"each": [1, 2]}), r"'each'.*list of 2 entries.*list of 1 entries"),
    Misuse("leftover cannot be copied", lambda s: s.save(mm={"gen": (i for i in range(3))}), r"'gen'.*deep-copyable"),
    Misuse("count too small", lambda s: s.save(num_tokens_unpadded=2), r"num_tokens_unpadded is 2.*schedules 3"),
    Misuse("count too large", lambda s: s.save(num_tokens_unpadded=4), r"num_tokens_unpadded is 4.*schedules 3"),
    Misuse("count negative", lambda s: s.save(num_tokens_unpadded=-3), r"num_tokens_unpadded is -3"),
    Misuse(
        "count no number", lambda s: s.save(num_tokens_unpadded=None), r"num_tokens_unpadded is None, not an integer"
    ),
    Misuse("count a float", lambda s: s.save(num_tokens_unpadded=3.0), r"num_tokens_unpadded is 3\.0, not an integer"),
    Misuse("padded below", lambda s: s.save(num_tokens_padded=2), r"num_tokens_padded \(2\) is below"),
    Misuse("padded no number", lambda s: s.save(num_tokens_padded="8"), r"num_tokens_padded is '8', not an integer"),
]

CONSUME = [
    Misuse("materialize twice", lambda s: s.engine.take(s.consumed, "A"), r"consumed already.*exactly once.*\[1\]"),
    Misuse("discard after materialize", lambda s: s.cache.discard_step(s.consumed), r"step id 0 was consumed already"),
    Misuse("materialize unknown", lambda s: s.engine.take(NEVER, "A"), r"step id 999 was never issued by save_outputs"),
    Misuse(
        "discard unknown", lambda s: s.cache.discard_step(NEVER), r"999 was never issued.*Unconsumed step ids: \[1\]"
    ),
    Misuse(
        "materialize unsaved", lambda s: s.engine.take(2, "C"), r"step id 2 was consumed already, or its save failed"
    ),
    Misuse("negative id", lambda s: s.engine.take(-1, "A"), r"step id -1 was never issued"),
    Misuse("id None", lambda s: s.cache.discard_step(None), r"step id None was never issued"),  # type: ignore[arg-type]
    Misuse("id a string", lambda s: s.cache.discard_step("1"), r"step id '1' was never issued"),  # type: ignore[arg-type]
    Misuse(
        "arguments swapped",
        lambda s: s.cache.materialize(["A"], s.saved),  # type: ignore[arg-type]
        r"req_ids is 1;.*materialize\(step_id, \['\.\.\.'\]\)",
    ),
    Misuse("id a list", lambda s: s.cache.materialize([1], ["A"]), r"step id \[1\] was never issued"),  # type: ignore[arg-type]
    Misuse("stranger", lambda s: s.engine.take(s.saved, "A", "Z"), r"\['Z'\] were not in the batch.*\['A', 'B'\]"),
    Misuse("request of another step", lambda s: s.engine.take(s.saved, "C"), r"\['C'\] were not in the batch when"),
    Misuse("single string", lambda s: s.cache.materialize(s.saved, "A"), r"req_ids is 'A'; materialize takes.*list"),
    Misuse("no ids", lambda s: s.cache.materialize(s.saved, None), r"req_ids is None; materialize takes"),  # type: ignore[arg-type]
    Misuse("ids of lists", lambda s: s.cache.materialize(s.saved, [["A"]]), r"req_ids is \[\['A'\]\]"),  # type: ignore[list-item]
]

START = [
    Misuse("counts no mapping", lambda s: s.cache.new_step_starts(output(num_scheduled_tokens=[3])), r"cannot be read"),
    Misuse(
        "negative count",
        lambda s: s.cache.new_step_starts(output(num_scheduled_tokens={"A": -1})),
        r"num_scheduled_tokens is negative.*\['A'\]",
    ),
    Misuse(
        "total does not add up",
        lambda s: s.cache.new_step_starts(output(num_scheduled_tokens={"A": 1}, total_num_scheduled_tokens=2)),
        r"total_num_scheduled_tokens is 2.*adds up to 1",
    ),
    Misuse(
        "new request without id",
        lambda s: s.cache.new_step_starts(output(scheduled_new_reqs=[output(num_computed_tokens=0)])),
        r"cannot be read.*req_id.*SchedulerOutput",
    ),
    Misuse("new requests no list", lambda s: s.cache.new_step_starts(output(scheduled_new_reqs=1)), r"cannot be read"),
]

REGISTER = [
    Misuse("policy None", lambda s: s.cache.register_policy(None), r"not a NoneType.*from_model"),  # type: ignore[arg-type]
    Misuse("policy a model", lambda s: s.cache.register_policy(object()), r"not a object.*from_model"),  # type: ignore[arg-type]
    Misuse(
        "policy changed after the first save",
        lambda s: s.cache.register_policy(ModelCachePolicy()),
        r"after the first save.*when the model is loaded",
    ),
]


@pytest.mark.parametrize("misuse", [*SAVE, *CONSUME, *START, *REGISTER], ids=str)
def test_refused_call_changes_nothing(misuse: Misuse) -> None:
    """The message says what to change, no table moved, nobody waited, and the next valid calls are right."""
    scene = make_scene()
    before, totals, footprint = scene.engine.settled(), scene.cache.statistics(), scene.cache.footprint()
    with pytest.raises(misuse.error) as told:
        misuse.do(scene)
    assert type(told.value) is misuse.error
    assert re.search(misuse.words, str(told.value)), str(told.value)
    assert (scene.cache.inspect(), scene.cache.statistics(), scene.cache.footprint()) == (before, totals, footprint)
    still_right(scene)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"blocks": [0]}, r"'D' has 5 computed tokens but a block table of 1 blocks of 4.*cover the hit"),
        ({"blocks": None}, r"'D' has 5 computed tokens but no block_ids"),
        ({"blocks": [0, 16]}, r"'D' has block ids 0\.\.16, outside 0\.\.15.*num_blocks"),
        ({"blocks": [-1, 0]}, r"'D' has block ids -1\.\.0, outside"),
    ],
    ids=["table too short", "no table", "block beyond the pool", "negative block"],
)
def test_refused_request_harms_no_other(changes: dict[str, Any], words: str) -> None:
    """An unusable entry refuses its step by the request's name; the finished request landed, the cache works on."""
    scene = make_scene()
    still_right(scene)
    engine = scene.engine
    step = engine.schedule(new=[("D", [5, 6], 5, 1)], finished=["late"])
    (entry,) = step.scheduled_new_reqs
    entry.block_ids = (changes["blocks"],) if changes.get("blocks", ()) else changes.get("blocks", entry.block_ids)
    with pytest.raises(OmniPrefixCacheContractError, match=words):
        engine.cache.new_step_starts(step)
    engine.update(step, finished=["late"])
    with pytest.raises(OmniPrefixCacheContractError, match=f"new_step_starts refused it.*{words}"):
        engine.save()
    assert "late" not in engine.cache.inspect().emitted
    assert engine.mm(engine.step(new=[("E", [0, 7], 4, 2)], finished=["D"], mm=MM), "d", "E") == [0, 1, 2, 3, 4, 5]


def test_request_at_an_impossible_position_is_fatal_if_its_step_is_run() -> None:
    """It is refused by name; which rows the engine's step made stale cannot be told, so the next step fails loudly."""
    scene = make_scene()
    still_right(scene)
    engine = scene.engine
    step = engine.schedule(new=[("D", [5, 6], 5, 1)])
    step.scheduled_new_reqs[0].num_computed_tokens = -1
    with pytest.raises(OmniPrefixCacheContractError, match=r"'D' has num_computed_tokens=-1"):
        engine.cache.new_step_starts(step)
    engine.update(step)
    with pytest.raises(OmniPrefixCacheWriteError, match=r"giving up step 4.*num_computed_tokens"):
        engine.start()


def test_resumed_request_without_blocks_is_refused() -> None:
    """A preempted request that comes back without its block table is named."""
    scene = make_scene()
    still_right(scene)
    engine = scene.engine
    step = engine.schedule(resumed=[("late", [0, 4], 4, 2)])
    step.scheduled_cached_reqs.new_block_ids = [None]
    with pytest.raises(OmniPrefixCacheContractError, match=r"'late' came back without block ids"):
        engine.cache.new_step_starts(step)


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda s: s.save(), r"save_outputs without new_step_starts.*once before each save"),
        (lambda s: s.engine.take(3, "C"), r"step id 3 was never issued"),
    ],
    ids=["saved twice", "materialized before it was saved"],
)
def test_order_of_calls(do: Callable[[Scene], object], words: str) -> None:
    """A second save of one step, and a step that is not saved yet, are refused; nothing is changed."""
    scene = make_scene()
    engine = scene.engine
    step = scene.save()
    before = engine.settled()
    with pytest.raises(OmniPrefixCacheContractError, match=words):
        do(scene)
    assert engine.cache.inspect() == before
    assert engine.hidden(step, "C") == [0, 1, 2, 3, 54, 55, 56]


def test_save_before_anything_started() -> None:
    """The very first call cannot be a save, and a policy may be registered late before the first save."""
    engine = Engine()
    with pytest.raises(OmniPrefixCacheContractError, match="without new_step_starts"):
        engine.save()
    engine.start(new=[("A", [0], 0, 2)])
    engine.cache.register_policy(POLICY)
    assert engine.hidden(engine.save(), "A") == [0, 1]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda view: view.order.remove("C"), r"scheduled requests \['C'\] are not in the batch"),
        (lambda view: view.order.append("C"), r"lists a request twice"),
        (lambda view: view.computed.update(C=5), r"do not stand where.*num_computed_tokens"),
        (lambda view: view.tables.update(C=[0, 99]), r"396\.\.398 are outside 0\.\.63.*num_blocks"),
    ],
    ids=["request missing", "request twice", "positions shifted", "block beyond the pool"],
)
def test_batch_that_is_not_the_scheduled_one(spoil: Callable[[View], object], words: str) -> None:
    """A view that disagrees with the schedule is refused at save; once it agrees the same step is saved."""
    scene = make_scene()
    view = scene.engine.view
    kept = (dict(view.tables), dict(view.computed), list(view.order))
    before = scene.engine.settled()
    spoil(view)
    with pytest.raises(OmniPrefixCacheContractError, match=words):
        scene.save()
    assert scene.cache.inspect() == before
    view.tables, view.computed, view.order = kept
    still_right(scene)


def test_slot_computed_twice_in_one_step() -> None:
    """Two requests that write one KV slot are refused, naming the block."""
    engine = Engine()
    engine.start(new=[("A", [3], 0, 2), ("B", [3], 0, 2)])
    with pytest.raises(OmniPrefixCacheContractError, match=r"slot 12 \(block 3\) twice"):
        engine.save()


def test_no_page_free_waits_and_says_who_holds_them() -> None:
    """Unconsumed steps are named after the configured time, on the cache's own clock; the step can be saved later."""
    runtime = ManualRuntime()
    engine = Engine(policy=POLICY, staging_depth=1, staging_claim_timeout_s=7.0, runtime=runtime)
    first = engine.step(new=[("A", [0], 0, 4)], mm=MM)
    engine.start(new=[("B", [0, 1], 4, 1)])
    before = engine.settled()
    with pytest.raises(OmniPrefixCacheStagingTimeoutError, match=r"7 s.*\[0\].*materialize or discard_step.*depth"):
        engine.save(mm=MM)
    assert runtime.now == 7.0
    assert engine.cache.inspect() == before
    engine.cache.discard_step(first)
    assert engine.mm(engine.save(mm=MM), "d", "B") == [0, 1, 2, 3, 4]


SETUP: Mapping[str, tuple[Callable[[], object], str]] = {
    "config a dict": (lambda: OmniPrefixCacheManager({}, View(4)), r"dict; build a PrefixCacheConfig"),  # type: ignore[arg-type]
    "no blocks": (lambda: PrefixCacheConfig(num_blocks=0, block_size=4), r"num_blocks"),
    "size a string": (lambda: PrefixCacheConfig(num_blocks="8", block_size=4), r"num_blocks"),  # type: ignore[arg-type]
    "depth zero": (lambda: PrefixCacheConfig(num_blocks=8, block_size=4, staging_depth=0), r"staging_depth"),
    "no time": (lambda: PrefixCacheConfig(num_blocks=8, block_size=4, staging_claim_timeout_s=0), r"timeout_s"),
    "unknown setting": (lambda: PrefixCacheConfig(num_blocks=8, block_size=4, depth=1), r"depth"),  # type: ignore[call-arg]
    "key declared twice": (
        lambda: ModelCachePolicy(deferred_keys=frozenset("k"), request_keys=frozenset("k")),
        r"both per token and per request.*'k'",
    ),
    "hidden as mm key": (lambda: ModelCachePolicy(token_keys=frozenset({HIDDEN_KEY})), r"needs_full_hidden_states"),
    "attribute of another type": (
        lambda: ModelCachePolicy.from_model(SimpleNamespace(deferred_prefix_cache_mm_keys=[1])),
        r"SimpleNamespace\.deferred_prefix_cache_mm_keys",
    ),
}


@pytest.mark.parametrize("row", SETUP)
def test_refused_setup(row: str) -> None:
    """A setting that cannot work is refused when it is made, by its name."""
    do, words = SETUP[row]
    with pytest.raises(OmniPrefixCacheConfigError, match=words):
        do()


@pytest.mark.parametrize("misuse", [*SAVE, *CONSUME, *START, *REGISTER], ids=str)
def test_closed_cache_answers_before_anything_else(misuse: Misuse) -> None:
    """After shutdown every call says so, right or wrong arguments alike."""
    scene = make_scene()
    scene.cache.shutdown()
    with pytest.raises(OmniPrefixCacheClosedError, match="shut down"):
        misuse.do(scene)
    scene.cache.shutdown()


def test_filled_rows_tell_a_wrong_row() -> None:
    """The harness's own values: a row that is not the expected one, or not one row, fails the comparison."""
    assert column(filled([3, 4], 2)) == [3, 4]
    with pytest.raises(AssertionError, match="columns differ"):
        column(torch.tensor([[1.0, 2.0]]))
