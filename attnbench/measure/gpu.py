"""What the GPU says of itself: through NVML, and through two counters read on its own stream.

NVML gives clock, power, temperature, energy, and why the GPU slows down; it may be missing, denied,
or answer only some questions: each answer that does not come is None. Its clock is an average of
the past; a kernel of 20 us (`SmClock`) sees the clock as it is on the stream now.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

_GIVE_UP_AFTER = 3  # failures in a row
_SM_CLOCK, _CORE_SENSOR = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU

POWER_CAP, THERMAL, SLOWDOWN = "power cap", "thermal", "hardware slowdown"
# Bits of nvmlClocksEventReasons (nvmlClocksThrottleReasons of old), which are part of NVML's ABI.
_REASONS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: POWER_CAP,
    0x008: SLOWDOWN,
    0x010: "sync boost",
    0x020: THERMAL,  # by software
    0x040: THERMAL,  # by hardware
    0x080: SLOWDOWN,  # power brake, asserted from outside the board
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One reading; each value is None where NVML did not give it.

    `sm_mhz` and `power_w` are what NVML reports now, which it averages over as much as a second.
    `throttle` holds why the clock is held down, in plain words; empty where nothing does.
    """

    sm_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: frozenset[str] | None = None


def _throttle(bits: Any) -> frozenset[str]:
    found = {1 << bit for bit in range(64) if int(bits) >> bit & 1}
    return frozenset(_REASONS.get(bit, f"reason {bit:#x}") for bit in found)


def _within(low: float, high: float, scale: float = 1.0) -> Callable[[Any], float]:
    """Convert a number, and refuse what cannot be, such as NVML's 2**32 - 1 for "not known"."""

    def convert(value: Any) -> float:
        number = float(value) * scale
        if not low <= number <= high:
            raise ValueError(f"{number:.6g} is implausible")
        return number

    return convert


# What is asked, by field of a reading (and the energy counter): functions of NVML, the newer name
# first, with what follows the device; and how the answer is converted.
_QUERIES: dict[str, tuple[tuple[str, ...], tuple[int, ...], Callable[[Any], Any]]] = {
    "sm_mhz": (("nvmlDeviceGetClockInfo",), (_SM_CLOCK,), _within(0, 10_000)),
    "power_w": (("nvmlDeviceGetPowerUsage",), (), _within(0, 10_000, scale=1e-3)),
    "temperature_c": (
        ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"),
        (_CORE_SENSOR,),
        _within(-50, 200),
    ),
    "throttle": (
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        (),
        _throttle,
    ),
    "energy_mj": (("nvmlDeviceGetTotalEnergyConsumption",), (), int),
}


class GpuSensor:
    """NVML's view of one GPU; asking it never raises. What fails three times is asked no more."""

    def __init__(self, nvml: Any, device: Any, problem: str | None = None) -> None:
        self._nvml = nvml
        self._device = device
        self._problem = problem
        self._failures = dict.fromkeys(_QUERIES, 0)  # in a row
        self._missing: dict[str, str] = {}  # by query, why

    @classmethod
    def open(cls, index: int = 0) -> GpuSensor:
        """The sensor of torch's CUDA device `index`; `problem` says what is missing."""
        nvml: Any = None
        problem = "pynvml cannot be imported"
        try:  # absent or broken; no driver or permission; no CUDA or a device NVML does not know
            nvml = importlib.import_module("pynvml")
            problem = "it cannot be started"
            nvml.nvmlInit()
            problem = f"CUDA device {index} was not found"
            return cls(nvml, _device(nvml, index))
        except Exception as err:
            with contextlib.suppress(Exception):  # not started: nothing to shut down
                nvml.nvmlShutdown()
            return cls(None, None, f"NVML: {problem} ({_text(err)})")

    @property
    def problem(self) -> str | None:
        """In one line what could not be read at the last try, and why; None where all could."""
        if self._problem is not None:
            return self._problem
        missing = [f"{name} ({why})" for name, why in self._missing.items()]
        return f"NVML: no {', no '.join(missing)}" if missing else None

    def read(self) -> GpuReading | None:
        """A reading now, or None where there is no sensor."""
        if self._device is None:
            return None
        return GpuReading(**{name: self._ask(name) for name in _QUERIES if name != "energy_mj"})

    def energy_mj(self) -> int | None:
        """Millijoules the whole board has used since its driver was loaded, or None."""
        return cast(int | None, self._ask("energy_mj"))

    def _ask(self, name: str) -> Any:
        if self._device is None or self._failures[name] >= _GIVE_UP_AFTER:
            return None
        functions, arguments, convert = _QUERIES[name]
        reasons = []
        for function in functions:
            try:
                answer = convert(getattr(self._nvml, function)(self._device, *arguments))
            except Exception as err:  # NVMLError, or whatever else such a library raises
                reasons.append(_text(err))
                continue
            self._failures[name] = 0
            self._missing.pop(name, None)
            return answer
        self._failures[name] += 1
        self._missing[name] = reasons[0]
        return None

    def close(self) -> None:
        """Let NVML go; later readings are None."""
        if self._device is not None:
            self._device, self._problem = None, "NVML: closed"
            with contextlib.suppress(Exception):  # nothing is left to be read, so nothing is lost
                self._nvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> Any:
    """NVML's handle of torch's device: their numbers differ under CUDA_VISIBLE_DEVICES.

    By UUID, by PCI address, or as the only GPU there is. Raises LookupError if none does.
    """
    facts: Any = torch.cuda.get_device_properties(index)

    def by_uuid() -> Any:
        uuid = str(facts.uuid)
        prefixed = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return nvml.nvmlDeviceGetHandleByUUID(prefixed)

    def by_address() -> Any:
        return nvml.nvmlDeviceGetHandleByPciBusId(
            f"{facts.pci_domain_id:08x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        )

    def only_one() -> Any:
        if (count := nvml.nvmlDeviceGetCount()) != 1:
            raise LookupError(f"NVML sees {count} GPUs and cannot tell which it is")
        return nvml.nvmlDeviceGetHandleByIndex(0)

    reasons = []
    for look_up in (by_uuid, by_address, only_one):
        try:
            return look_up()
        except Exception as err:  # an older torch has no UUID, an older NVML no such look-up
            reasons.append(_text(err))
    raise LookupError("; ".join(dict.fromkeys(reasons)))


def _text(err: Exception) -> str:
    return " ".join(str(err).split())[:200] or type(err).__name__


def must_discard(reading: GpuReading | None) -> str | None:
    """Why a sample taken at this reading does not count, or None.

    Only heat and the hardware's own slowdown: a power cap is the normal state of a busy GPU, and
    `idle` is what the time between two batches looks like.
    """
    if reading is None or reading.throttle is None:
        return None
    found = [reason for reason in (THERMAL, SLOWDOWN) if reason in reading.throttle]
    return f"the GPU was slowed: {', '.join(found)}" if found else None


def power_state(readings: Iterable[GpuReading | None]) -> str | None:
    """`sustained` where the power cap held in at least half of the readings, else `burst`.

    None where no reading says why the clock was held down.
    """
    known = [r.throttle for r in readings if r is not None and r.throttle is not None]
    if not known:
        return None
    capped = sum(POWER_CAP in throttle for throttle in known)
    return "sustained" if 2 * capped >= len(known) else "burst"


class SmClock:
    """The clock of the GPU's multiprocessors, read by a tiny kernel.

    Once that has failed it is None for good, and `problem` says why. `launch` enqueues a kernel
    that writes (cycles, nanoseconds) of one spin to its argument, int64 [2]: by default that of
    `smkernel`, compiled at the first reading.
    """

    def __init__(
        self,
        launch: Callable[[torch.Tensor], None] | None = None,
        counters: torch.Tensor | None = None,
    ) -> None:
        self._launch = launch
        self._counters = counters
        self.problem: str | None = None

    def sample_mhz(self) -> float | None:
        """Enqueue the kernel on the current stream, wait for it, and return the clock in MHz."""
        if self.problem is not None:
            return None
        try:  # no triton, no device, no compiler: none may cost the cell it stands beside
            if self._launch is None:
                self._launch = importlib.import_module("attnbench.measure.smkernel").launch
            if self._counters is None:
                self._counters = torch.zeros(2, dtype=torch.int64, device="cuda")
            self._launch(self._counters)
            torch.cuda.synchronize()
            cycles, ns = self._counters.tolist()
            return _within(100.0, 5000.0)(cycles / ns * 1000)
        except Exception as err:
            text = f"{type(err).__name__}: {_text(err)}"
            self.problem = f"no SM clock from in-stream counters: {text}"
            return None


@functools.cache
def shared_sm_clock() -> SmClock | None:
    """The SM clock of this process, opened at the first use; None where it does not work."""
    clock = SmClock()
    return clock if clock.sample_mhz() is not None else None
