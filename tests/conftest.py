"""What every test shares: which directories are collected where."""

from importlib.util import find_spec

# The real engine has an environment of its own; without vLLM its tests cannot even be imported.
collect_ignore = [] if find_spec("vllm") else ["vllm"]
