"""The GPU's own sensors, through NVML: clock, power, temperature, energy, why it slows down.

And the energy of a call, from the counter or the power.

NVML may be missing, denied, or answer only some questions: each answer that does not come is None.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from attnbench.base.stats import median

_SM_CLOCK, _CORE_SENSOR = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
_BY_POWER, _BY_HEAT = 0, 1  # NVML_PERF_POLICY_POWER, _THERMAL

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
# nvmlComputeMode_t: how many processes the GPU takes. Exclusive to a thread is gone since CUDA 8.
_COMPUTE_MODES = {0: "default", 1: "exclusive process", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One reading; each value is None where NVML did not give it.

    `sm_mhz` and `power_w` are what NVML reports now, which it averages over as much as a second.
    `throttle` holds why the clock is held down, in plain words; empty where nothing does.
    `power_held_us` and `heat_held_us` add up how long power and heat have held it down so far.
    """

    sm_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: frozenset[str] | None = None
    power_held_us: float | None = None
    heat_held_us: float | None = None


def _throttle(bits: Any) -> frozenset[str]:
    found = {1 << bit for bit in range(64) if int(bits) >> bit & 1}
    return frozenset(_REASONS.get(bit, f"reason {bit:#x}") for bit in found)


def _held_us(status: Any) -> float:
    return float(status.violationTime) / 1000


def _within(low: float, high: float, scale: float = 1.0) -> Callable[[Any], float]:
    """Convert a number, and refuse what cannot be, such as NVML's 2**32 - 1 for "not known"."""

    def convert(value: Any) -> float:
        number = float(value) * scale
        if not low <= number <= high:
            raise ValueError(f"{number:.6g} is implausible")
        return number

    return convert


# By field of a reading (and others): a function of NVML, what follows the device, and
# how the answer is converted. Of two names of a function the older one, which all drivers keep.
_QUERIES: dict[str, tuple[str, tuple[int, ...], Callable[[Any], Any]]] = {
    "sm_mhz": ("nvmlDeviceGetClockInfo", (_SM_CLOCK,), _within(0, 10_000)),
    "power_w": ("nvmlDeviceGetPowerUsage", (), _within(0, 10_000, scale=1e-3)),
    "temperature_c": ("nvmlDeviceGetTemperature", (_CORE_SENSOR,), _within(-50, 200)),
    "throttle": ("nvmlDeviceGetCurrentClocksThrottleReasons", (), _throttle),
    "power_held_us": ("nvmlDeviceGetViolationStatus", (_BY_POWER,), _held_us),
    "heat_held_us": ("nvmlDeviceGetViolationStatus", (_BY_HEAT,), _held_us),
    "energy_mj": ("nvmlDeviceGetTotalEnergyConsumption", (), int),
    "compute_mode": ("nvmlDeviceGetComputeMode", (), _COMPUTE_MODES.__getitem__),
    "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", (), _within(0, 10_000, scale=1e-3)),
    "max_sm_mhz": ("nvmlDeviceGetMaxClockInfo", (_SM_CLOCK,), _within(0, 10_000)),
}
# Of a MIG instance its GPU is asked: its clocks and its heat are the instance's, but not these.
_NOT_OF_AN_INSTANCE = ("power_w", "energy_mj", "power_limit_w")


class GpuSensor:
    """NVML's view of one GPU; asking it never raises."""

    def __init__(
        self, nvml: Any, device: Any, problem: str | None = None, *, instance: bool = False
    ) -> None:
        self._nvml = nvml
        self._device = device
        self._problem = problem
        self.instance = instance  # of MIG
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
            # By UUID: NVML's numbers are not torch's under CUDA_VISIBLE_DEVICES.
            uuid = torch.cuda.get_device_properties(index).uuid
            try:
                return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
            except Exception:  # CUDA gives a MIG instance's own (cuDeviceGetUuid_v2)
                part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
                whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
                return cls(nvml, whole, instance=True)
        except Exception as err:
            with contextlib.suppress(Exception):  # not started: nothing to shut down
                nvml.nvmlShutdown()
            return cls(None, None, f"NVML: {problem} ({_text(err)})")

    @property
    def problem(self) -> str | None:
        """What could not be read at the last try, and why, in one line; or None."""
        if self._problem is not None:
            return self._problem
        missing = [f"{name} ({why})" for name, why in self._missing.items()]
        return f"NVML: no {', no '.join(missing)}" if missing else None

    def read(self) -> GpuReading | None:
        """A reading now, or None where there is no sensor."""
        if self._device is None:
            return None
        return GpuReading(**{field.name: self._ask(field.name) for field in fields(GpuReading)})

    def energy_mj(self) -> int | None:
        """Millijoules the whole board has used since its driver was loaded, or None."""
        return cast(int | None, self._ask("energy_mj"))

    def compute_mode(self) -> str | None:
        """`default`: it serves any processes; `exclusive process`; `prohibited`; or None."""
        return cast(str | None, self._ask("compute_mode"))

    def limits(self) -> dict[str, float | None]:
        """The enforced power limit in W and the highest clock of the SMs in MHz."""
        return {name: self._ask(name) for name in ("power_limit_w", "max_sm_mhz")}

    def driver(self) -> str | None:
        """The version of the driver, or None."""
        with contextlib.suppress(Exception):  # no NVML, or closed
            return str(self._nvml.nvmlSystemGetDriverVersion())
        return None

    def _ask(self, name: str) -> Any:
        if self._device is None:
            return None
        function, arguments, convert = _QUERIES[name]
        try:
            if self.instance and name in _NOT_OF_AN_INSTANCE:
                raise ValueError("known of a whole GPU alone, not of a MIG instance")
            answer = convert(getattr(self._nvml, function)(self._device, *arguments))
        except Exception as err:  # NVMLError, or whatever else such a library raises
            self._missing[name] = _text(err)
            return None
        self._missing.pop(name, None)
        return answer

    def close(self) -> None:
        """Let NVML go; later readings are None."""
        if self._device is not None:
            self._device, self._problem = None, "NVML: closed"
            with contextlib.suppress(Exception):  # nothing is left to be read, so nothing is lost
                self._nvml.nvmlShutdown()


def _text(err: Exception) -> str:
    return " ".join(str(err).split())[:200] or type(err).__name__


def must_discard(reading: GpuReading | None) -> str | None:
    """Why a sample taken at this reading does not count, or None.

    Only temperature and the hardware's own slowdown: a power cap is the normal state of a busy GPU,
    and `idle` is what the time between two batches looks like.
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


# The loop lasts until both MIN_S and MIN_TICKS of the counter are reached, but at most MAX_S.
MIN_S, MIN_TICKS, MAX_S = 2.0, 20, 10.0
_IDLE_S = 1.5  # of rest before the idle power is read: NVML averages over about a second
_BATCH_S = 0.01  # between two readings of the counter, so that its ticks are seen one by one


class Energy(NamedTuple):
    """Energy of one call, gross: what the whole board used in a loop, over its calls.

    `idle_power_w` is the power just before. Where `energy_j` is None, `reason` says why.
    """

    energy_j: float | None
    idle_power_w: float | None
    reason: str | None = None


def measure_energy(
    call: Callable[[], Any],
    sensor: GpuSensor,
    *,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    synchronize: Callable[[], None] = torch.cuda.synchronize,
) -> Energy:
    """Loop over `call` with warm caches and read the sensor's energy counter between batches.

    The loop begins and ends on a tick of the counter: energy, time and calls then cover the same
    stretch. Whatever `call` raises passes. `now` and `sleep` are in seconds.
    """
    synchronize()
    sleep(_IDLE_S)
    reading = sensor.read()
    idle_w = None if reading is None else reading.power_w

    def make(count: int) -> None:
        for _ in range(count):
            call()
        synchronize()

    make(1)  # warm-up
    marks = [now()]
    for _ in range(3):
        make(1)
        marks.append(now())
    call_s = max(median(after - before for before, after in pairwise(marks)), 1e-6)
    if call_s * MIN_TICKS > MAX_S:  # the counter is read once a call at best
        return Energy(None, idle_w, f"a call of {call_s:.3g} s is too long for {MAX_S:g} s")
    begin_s, batch = now(), max(1, int(_BATCH_S / call_s))
    last = sensor.energy_mj()
    first: tuple[float, int] | None = None  # time and counter at the first tick
    made, ticks, seconds = 0, 0, 0.0  # of the loop between the first tick and the last one seen
    while last is not None:
        make(batch)
        made += batch
        value, at_s = sensor.energy_mj(), now()
        if value is None:
            break
        if value < last:
            return Energy(None, idle_w, f"the energy counter fell from {last} to {value} mJ")
        if value > last:
            last = value
            if first is None:
                first, made = (at_s, value), 0
            else:
                seconds, ticks = at_s - first[0], ticks + 1
                if ticks >= MIN_TICKS and seconds >= MIN_S:
                    return Energy((value - first[1]) / 1000 / made, idle_w)
        if at_s - begin_s >= MAX_S:
            reason = (
                f"the energy counter ticked {ticks} times in {seconds:.3g} s of a "
                f"loop of {MAX_S:g} s; needed are {MIN_TICKS} and {MIN_S:g} s"
            )
            return Energy(None, idle_w, reason)
    return Energy(None, idle_w, "the energy counter cannot be read")
