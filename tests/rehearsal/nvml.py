"""NVML of the simulated GPU: what pynvml would answer."""

from __future__ import annotations

from typing import Any

GPU: Any = None  # the simulated device

NVML_COMPUTEMODE_DEFAULT = 0
_POWER_CAP, _THERMAL, _BRAKE = 0x4, 0x40, 0x80


class NVMLError(Exception):
    """As pynvml's."""


def nvmlInit() -> None:
    """Nothing is to be started."""


def nvmlShutdown() -> None:
    """Nor to be ended."""


def nvmlDeviceGetHandleByUUID(uuid: Any) -> Any:
    """The only device."""
    return "gpu"


def nvmlDeviceGetClockInfo(handle: Any, type: Any) -> int:
    """MHz, fewer while it is hot."""
    return int(GPU.profile.mhz / GPU.slowness)


def nvmlDeviceGetPowerUsage(handle: Any) -> int:
    """Milliwatts."""
    return 350_000


def nvmlDeviceGetTemperature(handle: Any, sensor: Any) -> int:
    """Degrees."""
    return 88 if GPU.slowness > 1 else 55


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: Any) -> int:
    """Bits."""
    if "brake" in GPU.faults:
        return _BRAKE
    return _THERMAL if GPU.slowness > 1 else _POWER_CAP


def nvmlDeviceGetTotalEnergyConsumption(handle: Any) -> int:
    """Millijoules, counted every 100 ms."""
    return int(GPU.host_us // 1e5 * 35_000)


def nvmlDeviceGetComputeMode(handle: Any) -> int:
    """Every process may come."""
    return NVML_COMPUTEMODE_DEFAULT


def nvmlSystemGetDriverVersion() -> str:
    """Says in every run and report what it is."""
    return "simulated"
