"""What pynvml answers of the simulated GPU: cool, at its power cap, free for every process."""

from types import SimpleNamespace

from tests.rehearsal.device import MHZ, Device


def nvml_of(device: Device) -> SimpleNamespace:
    """A module's worth of functions."""
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: "gpu",
        nvmlDeviceGetClockInfo=lambda handle, kind: MHZ,
        nvmlDeviceGetPowerUsage=lambda handle: 350_000,
        nvmlDeviceGetTemperature=lambda handle, sensor: 55,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x4,
        # In millijoules, counted every 100 ms.
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: int(device.host_us // 1e5 * 35_000),
        nvmlDeviceGetComputeMode=lambda handle: 0,
        nvmlSystemGetDriverVersion=lambda: "simulated",
    )
