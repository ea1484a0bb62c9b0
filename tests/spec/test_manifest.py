"""`spec/manifest.toml` and the modules: nothing is unregistered, unnamed or unbroken."""

import re

import pytest

from conformance.tla.check import tasks
from conformance.tla.config import Config, Definitions
from conformance.tla.manifest import SPEC, Model, config_of, digest, fault_config, load_manifest
from omni_prefix_ref import Machine

MANIFEST = load_manifest()
MODULES = {path.stem: path.read_text() for path in sorted(SPEC.glob("*.tla"))}
DEFINED = {name: Definitions.of(text) for name, text in MODULES.items()}
MACHINES = {"rows": ("Rules", "PrefixCache"), "handover": ("Handover",), "failures": ("Failures",)}
EXHAUSTIVE = [model for model in MANIFEST.model if model.mode == "exhaustive"]


def machine_of(model: str) -> str:
    """Which of the three machines a model is of: its name begins with it."""
    return model.split("_", maxsplit=1)[0]


def checks_of(machine: str) -> set[str]:
    """All invariants and properties that a machine defines, goals aside."""
    names = {name for module in MACHINES[machine] for name in DEFINED[module].operators}
    return {name for name in names if re.search(r"(Inv|Prop)$", name) and not name.startswith("Debug")}


def test_no_configuration_is_an_orphan() -> None:
    """Each file is registered, each registered file exists, and each name once."""
    assert {model.config for model in MANIFEST.model} == {path.name for path in SPEC.glob("*.cfg")}
    names = [*(model.name for model in MANIFEST.model), *(fault.name for fault in MANIFEST.fault)]
    assert len(names) == len(set(names))
    assert {model.module for model in MANIFEST.model} <= set(MODULES)


@pytest.mark.parametrize("model", EXHAUSTIVE, ids=lambda m: m.name)
def test_a_configuration_is_the_one_that_was_measured(model: Model) -> None:
    """A smaller constant, another constant or a check taken out changes the digest; figures without it are stale."""
    assert model.digest == digest(config_of(model)), (
        f"{model.config} was changed after it was measured: omni-prefix model-check --record {model.name}"
    )
    assert model.distinct > 1
    assert model.total >= model.distinct
    assert model.depth > 1


def test_configurations_are_in_the_house_style() -> None:
    """So that a fault is a change of one line."""
    for path in SPEC.glob("*.cfg"):
        assert Config.load(path).render() == path.read_text(), path.name


def test_every_constant_is_set() -> None:
    """A configuration sets what its modules declare and nothing that they do not."""
    inherited = {"MCRows": ["VllmEnv", "Slots", "Writes", "PrefixCache"], "MCHandover": ["Handover"]}
    inherited |= {"SIMRows": inherited["MCRows"], "TraceRows": [*inherited["MCRows"], "TraceRows"]}
    inherited |= {"MCFailures": ["Failures"]}
    for model in MANIFEST.model:
        declared = {name for module in inherited[model.module] for name in DEFINED[module].constants}
        assert set(config_of(model).constants) - {"Allocations"} == declared, model.config


@pytest.mark.parametrize("machine", MACHINES)
def test_every_check_is_listed_and_bites(machine: str) -> None:
    """Each is listed in an exhaustive model, and is the one check that some seeded fault breaks."""
    defined = checks_of(machine)
    assert defined
    listed = {check for model in EXHAUSTIVE if machine_of(model.name) == machine for check in config_of(model).checks}
    broken = {fault.violates for fault in MANIFEST.fault if machine_of(fault.model) == machine}
    assert defined == listed, "defined, but in no model, or the other way round"
    assert defined <= broken, f"no fault breaks {sorted(defined - broken)}"


@pytest.mark.parametrize("machine", MACHINES)
def test_every_goal_is_sought(machine: str) -> None:
    """Each reachability goal that is defined is in the manifest, with the length at which it was reached."""
    names = {name for module in MACHINES[machine] for name in DEFINED[module].operators if name.startswith("Debug")}
    sought = {goal.violates for goal in MANIFEST.goal if machine_of(goal.model) == machine}
    assert names == sought
    assert all(goal.length > 1 for goal in MANIFEST.goal)


def test_every_switch_is_a_fault_and_every_fault_a_switch() -> None:
    """The names in ``On("...")`` are those that the manifest seeds."""
    switches = {name for text in MODULES.values() for name in re.findall(r'On\("(\w+)"\)', text)}
    seeded = {name for fault in MANIFEST.fault for name in (fault.faults or (() if fault.set else (fault.name,)))}
    assert switches == seeded
    assert all(fault.length > 1 for fault in MANIFEST.fault)


def test_a_fault_lists_one_check_and_changes_one_constant() -> None:
    """Else a counterexample would not say what it is a counterexample to."""
    for fault in MANIFEST.fault:
        base = config_of(MANIFEST.of(fault.model))
        seeded = fault_config(fault, base)
        assert seeded.checks == (fault.violates,)
        assert len([name for name in base.constants if base.constants[name] != seeded.constants[name]]) == 1


def test_every_action_of_next_is_taken_somewhere() -> None:
    """An action that every model lists as idle would be dead."""
    for machine in MACHINES:
        idle = [set(model.idle) for model in EXHAUSTIVE if machine_of(model.name) == machine]
        dead = set.intersection(*idle) - {"RefuseTake", "RequeueTask", "ForgetFailure"}
        assert dead == set(), machine


def test_lanes_nest() -> None:
    """The nightly lane runs all of the everyday lane."""
    everyday = {task.name for task in tasks(MANIFEST, lane="ci")}
    nightly = {task.name for task in tasks(MANIFEST, lane="deep")}
    assert everyday < nightly


# ------------------------------------------------------------------------- names, both ways

ENVIRONMENT = {"ScheduleRequest", "PreemptRequest", "FreeRequest", "EndSchedule", "WithdrawRequest", "LoadBlock"}
# Methods of the reference model that are no action of PrefixCache, and where they are instead.
ELSEWHERE = {
    "start": "Init",
    "check_usable": "Failures!EnterCache",
    "abandon_reads": "a step that is never saved",
    "defers": "Handover!ReserveBudget",
    "cancel_step": "Handover!CancelStep",
    "publish_failure": "Failures!PublishFailure",
    "fail_task": "Failures!FailTask",
    "outputs": "RowsAreRightInv and SpanOwedUntilEmittedInv say what it gives",
    "release_step": "Handover!ReleaseStep",
    "discard_step": "TakeStep",
    "shut_down": "after it no call is answered",
}


def snake(name: str) -> str:
    """``ClaimSlots`` is ``claim_slots``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def disjuncts() -> set[str]:
    """The actions that ``Next`` of PrefixCache is made of."""
    body = re.search(r"^Next ==\n(.*?)\n\n", MODULES["PrefixCache"], re.MULTILINE | re.DOTALL)
    assert body is not None
    found = set(re.findall(r"\\/ (\w+)", body[1]))
    assert found
    return found


def test_actions_and_methods_have_the_same_names() -> None:
    """Every action of Next is a method of the reference model or the environment's, and the other way round."""
    actions = disjuncts()
    methods = {name for name in vars(Machine) if not name.startswith("_") and name not in Machine.__dataclass_fields__}
    assert {snake(action) for action in actions - ENVIRONMENT} <= methods
    assert methods - {snake(action) for action in actions} == set(ELSEWHERE)


def test_the_readme_has_every_action_and_rule() -> None:
    """The tables of README.md name every action and every check."""
    readme = (SPEC / "README.md").read_text()
    for name in disjuncts() | checks_of("rows") | checks_of("handover") | checks_of("failures"):
        if name not in {"TypeOKInv", "FailureIsLoudAndStickyProp"}:
            assert f"`{name}`" in readme or f"!{name}`" in readme, name
    for fault in MANIFEST.fault:
        assert fault.what
