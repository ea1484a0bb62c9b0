"""vllm-omni 0.30.0's prefix cache as a module for the driver: `module:conformance.drivers.vllm_omni`.

Read from its wheel, which is downloaded where it can be; nothing of it is in this repository.
"""

from __future__ import annotations

from conformance.bench.other import NAME, VERSION, find_wheel, load
from conformance.drivers.module import EXPORTED

_WHEEL = find_wheel()
if _WHEEL is None:
    raise ImportError(f"the wheel of {NAME} {VERSION} cannot be downloaded here")

# Under the names of the contract, as if this module were it.
globals().update({_name: getattr(load(_WHEEL), _name) for _name in EXPORTED})
