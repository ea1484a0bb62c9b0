"""What every test shares: which directories are collected where, and that no test changes another's logging."""

import logging
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

# The real engine has an environment of its own; without vLLM its tests cannot even be imported.
collect_ignore = [] if find_spec("vllm") else ["vllm"]
if find_spec("vllm") and not find_spec("tla"):  # nor has that environment what the model checker's tests import
    collect_ignore += ["spec", "conformance/tla", "conformance/links"]


@pytest.fixture(autouse=True)
def _log_level_of_the_package() -> Iterator[None]:
    """A command that quietens the package's log does so for its own process; here many share one."""
    logger = logging.getLogger("omni_prefix_fast")
    level = logger.level
    yield
    logger.setLevel(level)
