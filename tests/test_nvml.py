"""NVML absent, denied, half-working and raising: each has a defined outcome; nothing raises."""

import sys
from types import SimpleNamespace

import pytest
import torch

from attnbench.measure.sensor import GpuReading, GpuSensor, must_discard, power_state
from attnbench.worker import catalogue

UUID = "1b2c3d4e-0000-1111-2222-333344445555"
ANSWERS = {
    "nvmlDeviceGetHandleByUUID": "gpu",
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetPowerUsage": 400_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
    "nvmlDeviceGetTotalEnergyConsumption": 123_456,
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetViolationStatus": SimpleNamespace(referenceTime=9, violationTime=2_500_000),
    "nvmlSystemGetDriverVersion": "570.86.10",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "the whole gpu",
}
WHOLE = GpuReading(
    sm_mhz=1755.0,
    power_w=400.0,
    temperature_c=61.0,
    throttle=frozenset({"power cap"}),
    power_held_us=2500.0,
    heat_held_us=2500.0,
)


class NVMLError(Exception):
    pass


class FakeNvml:
    """A driver with one GPU; `faults` has what a function raises, or returns, instead."""

    def __init__(self, **faults):
        self.faults = faults
        self.asked: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args):
            self.asked.append(" ".join((name, *(str(x) for x in args))))
            fault = self.faults.get(name, ANSWERS.get(name))
            if isinstance(fault, Exception):
                raise fault
            return fault

        return function


@pytest.fixture
def sensor_with(monkeypatch):
    facts = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)

    def opened(library):
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return GpuSensor.open(0)

    return opened


@pytest.mark.parametrize(
    ("library", "says"),
    [
        (None, "pynvml cannot be imported"),
        (FakeNvml(nvmlInit=OSError("cannot open\nshared object")), "cannot open shared object"),
        (FakeNvml(nvmlDeviceGetHandleByUUID=NVMLError("Not Found")), "was not found (Not Found)"),
    ],
)
def test_a_library_that_cannot_start_is_a_sensor_of_nothing(sensor_with, library, says):
    sensor = sensor_with(library)
    assert (sensor.read(), sensor.energy_mj()) == (None, None)
    assert says in str(sensor.problem)
    assert "\n" not in str(sensor.problem)
    assert library is None or library.asked[-1] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("answer", "mode"),
    [(0, "default"), (1, "exclusive process"), (2, "prohibited"), (3, "exclusive process"),
     (4, None), (NVMLError("Not Supported"), None)],
)  # fmt: skip
def test_the_catalogue_of_a_gpu_has_its_mode_and_limits(sensor_with, monkeypatch, answer, mode):
    library = FakeNvml(nvmlDeviceGetComputeMode=answer)
    assert sensor_with(library).compute_mode() == mode
    monkeypatch.setattr(catalogue, "environment", lambda device: {"device": device})
    expected = {"device": "cuda", "compute_mode": mode, "driver": "570.86.10"}
    expected |= {"power_limit_w": 700.0, "max_sm_mhz": 1980.0}
    assert catalogue._environment("cuda") == expected
    assert catalogue._environment("cpu") == {"device": "cpu"}
    assert library.asked[-1] == "nvmlShutdown"


def test_of_a_mig_instance_the_whole_gpu_is_asked_but_not_for_its_power(sensor_with):
    class Partitioned(FakeNvml):
        def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
            self.asked.append(uuid)
            if uuid != f"MIG-{UUID}":
                raise NVMLError("Not Found")
            return "instance"

    library = Partitioned()
    sensor = sensor_with(library)
    assert vars(sensor.read()) == vars(WHOLE) | {"power_w": None}
    assert sensor.energy_mj() is None
    assert "MIG" in str(sensor.problem)
    assert library.asked[1:4] == [
        f"GPU-{UUID}", f"MIG-{UUID}", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle instance",
    ]  # fmt: skip
    assert all("the whole gpu" in asked for asked in library.asked[4:])


@pytest.mark.parametrize(
    ("field", "function", "fault", "says"),
    [
        ("sm_mhz", "nvmlDeviceGetClockInfo", NVMLError("Not Supported"), "Not Supported"),
        ("temperature_c", "nvmlDeviceGetTemperature", ValueError("odd"), "odd"),
        ("throttle", "nvmlDeviceGetCurrentClocksThrottleReasons", "not a number", ""),
        ("power_w", "nvmlDeviceGetPowerUsage", 2**32 - 1, "implausible"),
    ],
)
def test_a_half_working_library_gives_what_it_can(sensor_with, field, function, fault, says):
    sensor = sensor_with(FakeNvml(**{function: fault}))
    reading = sensor.read()
    assert vars(reading) == vars(WHOLE) | {field: None}
    assert str(sensor.problem).startswith(f"NVML: no {field} (")
    assert says in str(sensor.problem)


@pytest.mark.parametrize(("bits", "words", "discarded"), [
    (0x0, set(), False),
    (0x112, {"application clocks", "sync boost", "display clocks"}, False),
    (0x5, {"idle", "power cap"}, False),
    (0x4C, {"power cap", "thermal", "hardware slowdown"}, True),
    (0x20, {"thermal"}, True),
    (0x80, {"hardware slowdown"}, True),
    (0x8000, {"reason 0x8000"}, False),
])  # fmt: skip
def test_only_heat_and_the_hardwares_own_slowdown_discard_a_sample(
    sensor_with, bits, words, discarded
):
    reading = sensor_with(FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=bits)).read()
    assert reading.throttle == words
    reason = must_discard(reading)
    assert (reason is not None) == discarded
    assert all(word in str(reason) for word in {"thermal", "hardware slowdown"} & words)
    assert must_discard(None) is must_discard(GpuReading(power_w=400.0)) is None


@pytest.mark.parametrize(
    ("throttles", "state"),
    [
        ([None], None),
        ([[], [], ["power cap"]], "burst"),
        ([None, [], ["power cap", "idle"]], "sustained"),
    ],
)
def test_sustained_is_a_power_cap_in_half_of_what_was_read(throttles, state):
    seen = [GpuReading(throttle=t if t is None else frozenset(t)) for t in throttles]
    assert power_state([None, *seen]) == state
