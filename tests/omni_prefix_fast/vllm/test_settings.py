"""Settings of the integration: what is accepted, and that everything else is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_prefix_fast.config import ModelCachePolicy
from omni_prefix_fast.errors import OmniPrefixCacheConfigError
from omni_prefix_fast.vllm.settings import (
    SETTINGS_KEY,
    CallbackSinkSettings,
    DirectorySinkSettings,
    OmniPrefixSettings,
    load_callable,
)


def given(**settings: Any) -> OmniPrefixSettings:
    """Settings as an engine carries them."""
    return OmniPrefixSettings.from_vllm_config(SimpleNamespace(additional_config={SETTINGS_KEY: settings}))


@pytest.mark.parametrize("additional", (None, {}, {"another_plugin": {"x": 1}}, {SETTINGS_KEY: {}}))
def test_without_settings_the_defaults_hold(additional: Any) -> None:
    """An engine that says nothing, or something to other plug-ins, gets an inline handover and no sinks."""
    settings = OmniPrefixSettings.from_additional_config(additional)
    assert settings == OmniPrefixSettings()
    assert (settings.enabled, settings.materialize_lag, settings.sinks) == (True, 0, ())


def test_an_engine_without_the_attribute_is_fine() -> None:
    """An older engine has no `additional_config`."""
    assert OmniPrefixSettings.from_vllm_config(object()) == OmniPrefixSettings()


def test_what_comes_from_json_is_taken() -> None:
    """Lists and strings, as a command line gives them, become the right types."""
    settings = given(
        materialize_lag=2,
        materialize_on="thread",
        handover_timeout_s=5,
        sinks=[{"kind": "directory", "path": "rows"}, {"kind": "callback", "target": "json:dumps"}],
        cache={"staging_depth": 5, "gpu_staging_bytes": 0},
        policy={"deferred_keys": ["codes"], "needs_full_hidden_states": False},
    )
    assert settings.sinks == (
        DirectorySinkSettings(kind="directory", path=Path("rows")),
        CallbackSinkSettings(kind="callback", target="json:dumps"),
    )
    assert settings.cache.overrides() == {"staging_depth": 5, "gpu_staging_bytes": 0}
    assert settings.policy.deferred_keys == frozenset({"codes"})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"materialise_lag": 1}, "omni_prefix.materialise_lag.*unknown key"),
    "unknown key of the cache": ({"cache": {"depth": 4}}, "omni_prefix.cache.depth.*unknown key"),
    "unknown key of a sink": ({"sinks": [{"kind": "directory", "path": "x", "dir": "y"}]}, "sinks.*dir"),
    "unknown kind of sink": ({"sinks": [{"kind": "tape"}]}, "omni_prefix.sinks.0"),
    "a sink without its path": ({"sinks": [{"kind": "directory"}]}, "omni_prefix.sinks.0.directory.path"),
    "a record without its file": ({"record": {}}, "omni_prefix.record.path"),
    "negative lag": ({"materialize_lag": -1}, "omni_prefix.materialize_lag"),
    "a lag that no staging page is left for": ({"materialize_lag": 4}, "staging_depth - 1 = 3"),
    "a lag against a smaller depth": ({"materialize_lag": 2, "cache": {"staging_depth": 2}}, "staging_depth - 1 = 1"),
    "another thread": ({"materialize_on": "process"}, "omni_prefix.materialize_on"),
    "no time": ({"handover_timeout_s": 0}, "omni_prefix.handover_timeout_s"),
    "not a switch": ({"enabled": "perhaps"}, "omni_prefix.enabled"),
    "a word for a switch": ({"eager": "yes"}, "omni_prefix.eager"),
    "a number for a switch": ({"policy": {"needs_full_hidden_states": 1}}, "policy.needs_full_hidden_states"),
    "a text for a count": ({"materialize_lag": "1"}, "omni_prefix.materialize_lag"),
    "a switch for a count": ({"cache": {"staging_depth": True}}, "omni_prefix.cache.staging_depth"),
    "a text for a time": ({"handover_timeout_s": "5"}, "omni_prefix.handover_timeout_s"),
    "no deadline": ({"handover_timeout_s": float("inf")}, "omni_prefix.handover_timeout_s"),
    "a text for a sink's switch": ({"sinks": [{"kind": "directory", "path": "x", "fsync": "no"}]}, "directory.fsync"),
}


@pytest.mark.parametrize(("settings", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name(settings: dict[str, Any], said: str) -> None:
    """An unknown key or a wrong value is an error that names it, with its place."""
    with pytest.raises(OmniPrefixCacheConfigError, match=said):
        given(**settings)


def test_settings_that_are_no_dictionary_are_refused() -> None:
    """A list or a string under the project's name is a mistake in writing, not an empty setting."""
    with pytest.raises(OmniPrefixCacheConfigError, match="must be a dictionary, not list"):
        OmniPrefixSettings.from_additional_config({SETTINGS_KEY: ["enabled"]})


def test_policy_settings_take_precedence_over_the_model() -> None:
    """What is set replaces the model's own declaration, what is not set leaves it."""
    model = SimpleNamespace(deferred_prefix_cache_mm_keys=("codes",), requires_full_prefix_cached_hidden_states=False)
    declared = ModelCachePolicy.from_model(model)
    assert given().policy.apply(declared) == declared
    changed = given(policy={"token_keys": ["a"], "needs_full_hidden_states": True}).policy.apply(declared)
    assert (changed.token_keys, changed.needs_full_hidden_states) == (frozenset({"a"}), True)
    assert changed.deferred_keys == frozenset({"codes"})


def test_policy_settings_that_contradict_the_model_are_refused() -> None:
    """A key the model declares per token cannot be declared per request in the settings."""
    declared = ModelCachePolicy(token_keys=frozenset({"codes"}))
    with pytest.raises(OmniPrefixCacheConfigError, match="codes"):
        given(policy={"request_keys": ["codes"]}).policy.apply(declared)


def test_callables_are_loaded_by_name() -> None:
    """`package.module:name`, dotted names included."""
    assert load_callable("pathlib:Path.cwd", "mm_outputs")() == Path.cwd()


@pytest.mark.parametrize(
    ("target", "said"),
    (
        ("json.dumps", "write it as"),
        (":dumps", "write it as"),
        ("json:", "write it as"),
        ("no_such_module:f", "cannot be imported"),
        ("json:no_such_name", "cannot be imported"),
        ("json:__name__", "no callable"),
    ),
)
def test_names_that_lead_nowhere_are_refused(target: str, said: str) -> None:
    """The error names the setting, the target and what is wrong with it."""
    with pytest.raises(OmniPrefixCacheConfigError, match=f"mm_outputs.*{said}"):
        load_callable(target, "mm_outputs")
