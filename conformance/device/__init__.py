"""Devices and runtimes that make asynchrony visible, and the check of a real device.

`SimulatedDevice` lands copies late; `WatchedRuntime` tells who waited for what. Neither sleeps.
"""

from conformance.device.simulated import DeviceTotals, Fault, Hold, SimulatedDevice, SimulatedDeviceError
from conformance.device.watch import Wait, WatchedRuntime

__all__ = [
    "DeviceTotals",
    "Fault",
    "Hold",
    "SimulatedDevice",
    "SimulatedDeviceError",
    "Wait",
    "WatchedRuntime",
]
