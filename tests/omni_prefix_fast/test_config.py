"""Settings: what is refused, and what a model's attributes turn into."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from omni_prefix_fast import HIDDEN_KEY, ModelCachePolicy, OmniPrefixCacheConfigError, PrefixCacheConfig

SIZES = {"num_blocks": 8, "block_size": 4}


def test_slots_are_blocks_times_block_size() -> None:
    """Every token of every block has a slot."""
    assert PrefixCacheConfig(num_blocks=8, block_size=4).num_slots == 32


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": -1}, "num_blocks"),
        ({"num_blocks": None}, "num_blocks"),
        ({"num_blocks": "8"}, "num_blocks"),
        ({"num_blocks": 8.0}, "num_blocks"),
        ({"num_blocks": True}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"gpu_staging_bytes": -1}, "gpu_staging_bytes"),
        ({"staging_depth": 0}, "staging_depth"),
        ({"staging_capacity_tokens": 0}, "staging_capacity_tokens"),
        ({"staging_claim_timeout_s": 0.0}, "staging_claim_timeout_s"),
        ({"staging_claim_timeout_s": -1.0}, "staging_claim_timeout_s"),
        ({"staging_claim_timeout_s": "30"}, "staging_claim_timeout_s"),
        ({"staging_claim_timeout_s": float("inf")}, "staging_claim_timeout_s"),
        ({"staging_claim_timeout_s": float("nan")}, "staging_claim_timeout_s"),
        ({"staging_claim_timeout_s": 1e12}, "staging_claim_timeout_s"),
        ({"copy_chunk_bytes": 0}, "copy_chunk_bytes"),
        ({"blocks": 8}, "blocks"),
    ],
)
def test_refused_setting_is_named(settings: dict[str, Any], named: str) -> None:
    """A setting out of range, of another type or unknown is refused by its name."""
    with pytest.raises(OmniPrefixCacheConfigError, match=rf"PrefixCacheConfig: .*\b{named}\b"):
        PrefixCacheConfig(**{**SIZES, **settings})


def test_missing_sizes_are_named() -> None:
    """Both sizes are required."""
    nothing: dict[str, Any] = {}
    with pytest.raises(OmniPrefixCacheConfigError, match=r"num_blocks.*block_size"):
        PrefixCacheConfig(**nothing)


def test_config_is_frozen() -> None:
    """Sizes cannot change under a running cache."""
    config = PrefixCacheConfig(num_blocks=8, block_size=4)
    with pytest.raises(ValidationError, match="frozen"):
        config.num_blocks = 9


@pytest.mark.parametrize(
    ("scheduler", "model", "overrides", "capacity"),
    [
        (SimpleNamespace(max_num_batched_tokens=2048), SimpleNamespace(max_model_len=4096), {}, 2048),
        (SimpleNamespace(), SimpleNamespace(max_model_len=4096), {}, 4096),
        (None, SimpleNamespace(max_model_len=4096), {}, 4096),
        (None, None, {}, 1024),
        (SimpleNamespace(max_num_batched_tokens=2048), None, {"staging_capacity_tokens": 16}, 16),
    ],
)
def test_page_holds_the_largest_step(scheduler: Any, model: Any, overrides: dict[str, Any], capacity: int) -> None:
    """A page is sized by `max_num_batched_tokens`, else by `max_model_len`, unless it is set."""
    config = PrefixCacheConfig.from_vllm_config(
        num_blocks=8, block_size=4, scheduler_config=scheduler, model_config=model, **overrides
    )
    assert config.staging_capacity_tokens == capacity


def test_overrides_reach_any_field() -> None:
    """`from_vllm_config` passes every other setting on."""
    config = PrefixCacheConfig.from_vllm_config(num_blocks=8, block_size=4, staging_depth=7, gpu_staging_bytes=1)
    assert (config.staging_depth, config.gpu_staging_bytes) == (7, 1)


def test_policy_of_a_model_that_declares_nothing() -> None:
    """Every attribute is optional; the default caches hidden states and judges keys by shape."""
    policy = ModelCachePolicy.from_model(object())
    assert policy == ModelCachePolicy()
    assert policy.needs_full_hidden_states
    assert policy.token_keys is None
    assert not policy.is_declared_per_token("k")
    assert not policy.is_declared_per_request("k")


def test_policy_reads_every_attribute() -> None:
    """Hidden states, deferred keys, per-token keys and both kinds of per-request keys come from the model."""
    model = SimpleNamespace(
        requires_full_prefix_cached_hidden_states=False,
        deferred_prefix_cache_mm_keys=["d"],
        prefix_cache_token_keys=("t", "u"),
        prefix_cache_request_keys={"r"},
        prefix_cache_request_list_keys=["l"],
    )
    policy = ModelCachePolicy.from_model(model)
    assert not policy.needs_full_hidden_states
    assert policy.deferred_keys == {"d"}
    assert policy.token_keys == frozenset("tu")
    assert [k for k in "dturl" if policy.is_declared_per_token(k)] == ["d", "t", "u"]
    assert [k for k in "dturl" if policy.is_declared_per_request(k)] == ["r", "l"]


def test_one_name_is_one_key() -> None:
    """A single string is a key, not its letters; None declares nothing."""
    model = SimpleNamespace(deferred_prefix_cache_mm_keys="codes", prefix_cache_request_keys=None)
    policy = ModelCachePolicy.from_model(model)
    assert policy.deferred_keys == {"codes"}
    assert policy.request_keys == frozenset()


def test_no_per_token_keys_differs_from_undeclared() -> None:
    """An empty set says that no key but the deferred ones is per token; None leaves it to the shapes."""
    assert ModelCachePolicy.from_model(SimpleNamespace(prefix_cache_token_keys=())).token_keys == frozenset()
    assert ModelCachePolicy.from_model(SimpleNamespace(prefix_cache_token_keys=None)).token_keys is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"token_keys": {"k"}, "request_keys": {"k"}}, "per token and per request.*'k'"),
        ({"deferred_keys": {"k"}, "request_list_keys": {"k"}}, "per token and per request.*'k'"),
        ({"request_keys": {"k"}, "request_list_keys": {"k"}}, "request_keys and in request_list_keys.*'k'"),
        ({"deferred_keys": {HIDDEN_KEY}}, "needs_full_hidden_states"),
        ({"request_keys": {HIDDEN_KEY}}, "needs_full_hidden_states"),
        ({"deferred_keys": {1}}, "deferred_keys"),
        ({"deferred": {"k"}}, "deferred"),
    ],
)
def test_contradicting_policy_is_refused(settings: dict[str, Any], named: str) -> None:
    """A key is declared in one way only, and the hidden states are no mm key."""
    frozen: dict[str, Any] = {name: frozenset(keys) for name, keys in settings.items()}
    with pytest.raises(OmniPrefixCacheConfigError, match=f"ModelCachePolicy: .*{named}"):
        ModelCachePolicy(**frozen)


def test_longest_timeout_is_one_that_a_lock_can_wait() -> None:
    """The largest timeout that is taken can be waited for."""
    config = PrefixCacheConfig(num_blocks=8, block_size=4, staging_claim_timeout_s=threading.TIMEOUT_MAX)
    event = threading.Event()
    threading.Timer(0.01, event.set).start()
    assert event.wait(config.staging_claim_timeout_s)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"num_blocks": None}, "num_blocks"),
        ({"num_blocks": 8.5}, "num_blocks"),
        ({"block_size": "4"}, "block_size"),
        ({"scheduler_config": {"max_num_batched_tokens": float("inf")}}, "staging_capacity_tokens"),
    ],
)
def test_size_that_the_engine_does_not_tell_is_named(sizes: dict[str, Any], named: str) -> None:
    """A size that is missing, a fraction or a word is refused by its field, never rounded."""
    with pytest.raises(OmniPrefixCacheConfigError, match=named):
        PrefixCacheConfig.from_vllm_config(**{**SIZES, **sizes})


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("deferred_prefix_cache_mm_keys", 5),
        ("deferred_prefix_cache_mm_keys", True),
        ("prefix_cache_token_keys", [1]),
        ("prefix_cache_request_keys", [["x"]]),
        ("prefix_cache_request_list_keys", {"x", None}),
        ("requires_full_prefix_cached_hidden_states", "no"),
    ],
)
def test_attribute_of_another_type_is_named(attribute: str, value: Any) -> None:
    """A model whose attribute is no collection of strings, or a word for a truth value, is refused by its name."""
    with pytest.raises(OmniPrefixCacheConfigError, match=rf"SimpleNamespace\.{attribute}"):
        ModelCachePolicy.from_model(SimpleNamespace(**{attribute: value}))
