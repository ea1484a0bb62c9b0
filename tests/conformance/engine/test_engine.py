"""`conformance.engine.engine`: a run of the whole engine computes what the tokens say."""

import pytest
import torch

from conformance.engine import Engine, EngineConfig, ModelConfig, PrefixModel, StepOutput
from conformance.engine.engine import REFERENCE, TAGS
from conformance.engine.model import CODES, VOICE


def _step(engine: Engine) -> StepOutput | None:
    sched = engine.schedule()
    engine.update_batch(sched)
    if not sched.total_num_scheduled_tokens:
        return None
    output = engine.forward(sched)
    engine.finish_step(sched)
    return output


def test_every_computed_row_is_the_row_of_its_prefix() -> None:
    """Through hits, same-step hits, preemption and reuse of blocks the forward computes what the tokens say."""
    config = EngineConfig(num_blocks=12, block_size=4, max_num_seqs=5, token_budget=16, chunk_limit=6)
    engine = Engine(config)
    model = engine.model
    prompts = [[1 + n // 3 % 3, 2, 3, 4] * (1 + n % 3) + [n % 5] for n in range(24)]
    requests = {f"r{n}": engine.add_request(f"r{n}", prompt, 6) for n, prompt in enumerate(prompts)}
    checked = 0
    while engine.has_work:
        sched = engine.schedule()
        engine.update_batch(sched)
        if not sched.total_num_scheduled_tokens:
            continue
        output = engine.forward(sched)
        row = 0
        for req_id in output.req_ids:
            count = sched.num_scheduled_tokens[req_id]
            start = engine.view.num_computed(req_id)
            want = model.rows(model.chains(requests[req_id].tokens)[start : start + count])
            assert torch.equal(output.hidden[row : row + count], want.hidden)
            assert torch.equal(output.mm[CODES][row : row + count], want.mm[CODES])
            if VOICE in output.mm:
                assert torch.equal(output.mm[VOICE][row : row + count], want.mm[VOICE])
            else:
                assert not want.emits.any()
            row += count
            checked += count
        engine.finish_step(sched)
    stats = engine.scheduler.stats
    assert checked == stats.computed_tokens
    assert min(stats.hits, stats.same_step_hits, stats.preemptions, stats.resumes) > 0
    assert stats.finished == len(prompts)


def test_what_is_generated_does_not_depend_on_caching() -> None:
    """With prefix caching off the same tokens come out."""
    said = []
    for caching in (True, False):
        engine = Engine(EngineConfig(num_blocks=16, caching=caching))
        requests = [engine.add_request(f"r{n}", [7, 7, 7, 7, n % 2], 5) for n in range(6)]
        while engine.has_work:
            _step(engine)
        said.append([request.tokens for request in requests])
    assert said[0] == said[1]


def test_padding_adds_rows_to_hidden_and_to_some_keys_only() -> None:
    """A padded step has real rows first; not every output is padded."""
    engine = Engine(EngineConfig(pad_to=8))
    engine.add_request("a", [1, 2, 3, 4, 5], 1)
    output = _step(engine)
    assert output is not None
    assert (output.num_tokens, output.num_padded, len(output.hidden)) == (5, 8, 8)
    assert len(output.mm[CODES]) == 8
    assert len(output.mm["features"]) == 5


def test_outputs_are_live_buffers() -> None:
    """The next forward overwrites what the last one returned, and scribbling does so at once."""
    engine = Engine(EngineConfig(), PrefixModel(ModelConfig(hidden_size=2)))
    engine.add_request("a", [1, 2, 3], 2)
    output = _step(engine)
    assert output is not None
    engine.scribble()
    assert (output.hidden == 99).all()
    assert (output.mm[REFERENCE] == 99).all()


def test_leftovers_are_per_request_or_whole() -> None:
    """``tags`` has one entry for each request of the batch; ``reference`` has three rows whatever the step's tokens."""
    engine = Engine(EngineConfig())
    for name in "ab":
        engine.add_request(name, [1, 2], 1)
    output = _step(engine)
    assert output is not None
    assert len(output.mm[TAGS]) == 2
    assert output.mm[REFERENCE].shape == (3, 2)


def test_a_step_after_an_abort_may_have_no_tokens() -> None:
    """It only reports the request as finished."""
    engine = Engine(EngineConfig())
    engine.add_request("a", [1, 2], 5)
    _step(engine)
    engine.abort("a")
    assert _step(engine) is None
    assert not engine.has_work


@pytest.mark.parametrize("setting", [{"token_budget": 0}, {"max_num_seqs": 0}, {"pad_to": 0}, {"chunk_limit": -1}])
def test_impossible_settings_are_refused(setting: dict[str, int]) -> None:
    """The error shows the settings."""
    with pytest.raises(ValueError, match=f"{next(iter(setting))}"):
        EngineConfig(**setting)  # type: ignore[arg-type]
