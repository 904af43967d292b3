"""NVML absent, denied, half-working and raising: each has a defined outcome; nothing raises."""

import sys
from types import SimpleNamespace

import pytest
import torch

from attnbench.measure.gpu import GpuReading, GpuSensor, must_discard, power_state

UUID = "1b2c3d4e-0000-1111-2222-333344445555"


class NVMLError(Exception):
    pass


class FakeNvml:
    """A driver with one GPU at 1755 MHz, 400 W, 61 degrees under its power cap.

    `faults` maps the name of a function to what it raises, or returns instead.
    """

    def __init__(self, **faults):
        self.faults = faults
        self.asked: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.faults.get(name) is AttributeError:
            raise AttributeError(f"module 'pynvml' has no attribute '{name}'")

        def function(*args):
            self.asked.append(" ".join((name, *(str(x) for x in args))))
            fault = self.faults.get(name, ANSWERS.get(name))
            if isinstance(fault, Exception):
                raise fault
            return fault

        return function


ANSWERS = {
    "nvmlDeviceGetHandleByUUID": "gpu",
    "nvmlDeviceGetHandleByPciBusId": "gpu by address",
    "nvmlDeviceGetHandleByIndex": "gpu by index",
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetPowerUsage": 400_000,
    "nvmlDeviceGetTemperatureV": 61,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetTotalEnergyConsumption": 123_456,
}
WHOLE = GpuReading(
    sm_mhz=1755.0, power_w=400.0, temperature_c=61.0, throttle=frozenset({"power cap"})
)


@pytest.fixture
def device(monkeypatch):
    facts = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    return facts


def sensor_with(monkeypatch, library):
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return GpuSensor.open(0)


def test_a_working_sensor_reads_everything_and_has_no_problem(monkeypatch, device):
    library = FakeNvml()
    sensor = sensor_with(monkeypatch, library)
    assert sensor.read() == WHOLE
    assert sensor.energy_mj() == 123_456
    assert sensor.problem is None
    assert library.asked[1] == f"nvmlDeviceGetHandleByUUID GPU-{UUID}"
    sensor.close()
    assert library.asked[-1] == "nvmlShutdown"
    assert (sensor.read(), sensor.energy_mj()) == (None, None)
    sensor.close()
    assert library.asked.count("nvmlShutdown") == 1


REFUSED = [
    (None, "pynvml cannot be imported"),
    (FakeNvml(nvmlInit=NVMLError("Driver Not Loaded")), "Driver Not Loaded"),
    (FakeNvml(nvmlInit=OSError("cannot open\nshared object")), "cannot open shared object"),
    (SyntaxError("written for another Python"), "written for another Python"),
]


@pytest.mark.parametrize(("library", "says"), REFUSED)
def test_a_library_that_cannot_start_is_a_sensor_of_nothing(monkeypatch, device, library, says):
    def broken(name):
        raise library

    if isinstance(library, Exception):
        monkeypatch.setattr("attnbench.measure.gpu.importlib.import_module", broken)
    sensor = sensor_with(monkeypatch, library)
    assert (sensor.read(), sensor.energy_mj()) == (None, None)
    assert says in str(sensor.problem)
    assert "\n" not in str(sensor.problem)
    sensor.close()


def test_without_a_cuda_device_nvml_is_let_go_again(monkeypatch):
    def lost(index):
        raise RuntimeError("no CUDA-capable device is detected")

    library = FakeNvml()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lost)
    sensor = sensor_with(monkeypatch, library)
    assert "no CUDA-capable device" in str(sensor.problem)
    assert library.asked[-1] == "nvmlShutdown"


FIELDS = {
    "sm_mhz": "nvmlDeviceGetClockInfo",
    "power_w": "nvmlDeviceGetPowerUsage",
    "temperature_c": "nvmlDeviceGetTemperature",
    "throttle": "nvmlDeviceGetCurrentClocks",
}
OLDER = {
    "nvmlDeviceGetTemperature": ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"),
    "nvmlDeviceGetCurrentClocks": (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ),
}


@pytest.mark.parametrize(
    ("field", "fault"),
    [
        ("sm_mhz", NVMLError("Not Supported")),
        ("temperature_c", ValueError("odd")),
        ("throttle", NVMLError("Not Supported")),
        ("throttle", None),
    ],
)
def test_a_half_working_library_gives_what_it_can(monkeypatch, device, field, fault):
    names = OLDER.get(FIELDS[field], (FIELDS[field],))
    library = FakeNvml(**dict.fromkeys(names, fault if fault else "not a number"))
    sensor = sensor_with(monkeypatch, library)
    reading = sensor.read()
    assert reading is not None
    expected = {name: getattr(WHOLE, name) for name in FIELDS} | {field: None}
    assert {name: getattr(reading, name) for name in FIELDS} == expected
    assert str(sensor.problem).startswith(f"NVML: no {field} (")
    assert fault is None or str(fault) in str(sensor.problem)


def test_a_question_that_failed_three_times_in_a_row_is_not_asked_again(monkeypatch, device):
    library = FakeNvml(nvmlDeviceGetPowerUsage=NVMLError("Not Supported"))
    sensor = sensor_with(monkeypatch, library)
    for _ in range(10):
        assert sensor.read() is not None
    asked = [name.split()[0] for name in library.asked]
    assert asked.count("nvmlDeviceGetPowerUsage") == 3
    assert asked.count("nvmlDeviceGetClockInfo") == 10
    assert "Not Supported" in str(sensor.problem)


def test_a_question_that_failed_twice_and_answers_then_is_no_problem(monkeypatch, device):
    library = FakeNvml(nvmlDeviceGetPowerUsage=NVMLError("Timeout"))
    sensor = sensor_with(monkeypatch, library)
    for _ in range(4):
        library.faults["nvmlDeviceGetPowerUsage"] = NVMLError("Timeout")
        sensor.read(), sensor.read()
        assert "Timeout" in str(sensor.problem)
        library.faults.clear()
        assert sensor.read() == WHOLE
        assert sensor.problem is None


def test_a_driver_older_than_the_library_is_asked_by_the_older_names(monkeypatch, device):
    old = {
        "nvmlDeviceGetTemperatureV": NVMLError("Function Not Found"),
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetCurrentClocksEventReasons": NVMLError("Function Not Found"),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
    }
    assert sensor_with(monkeypatch, FakeNvml(**old)).read() == WHOLE


def test_a_value_that_cannot_be_is_none(monkeypatch, device):
    sensor = sensor_with(monkeypatch, FakeNvml(nvmlDeviceGetPowerUsage=2**32 - 1))
    reading = sensor.read()
    assert reading is not None
    assert reading.power_w is None
    assert "implausible" in str(sensor.problem)


def test_the_gpu_is_found_by_uuid_then_by_address_then_as_the_only_one(monkeypatch, device):
    lost = NVMLError("Not Found")

    def handle(**faults):
        library = FakeNvml(**faults)
        sensor_with(monkeypatch, library).read()
        return library.asked[-1].split(" ", 1)[1], library

    assert handle()[0] == "gpu"
    by_address, library = handle(nvmlDeviceGetHandleByUUID=lost)
    assert by_address == "gpu by address"
    assert "nvmlDeviceGetHandleByPciBusId 00000000:1b:00.0" in library.asked
    both = {"nvmlDeviceGetHandleByUUID": lost, "nvmlDeviceGetHandleByPciBusId": lost}
    assert handle(**both)[0] == "gpu by index"
    sensor = sensor_with(monkeypatch, FakeNvml(**both, nvmlDeviceGetCount=2))
    assert sensor.read() is None
    assert "NVML sees 2 GPUs" in str(sensor.problem)
    del device.uuid  # as of an older torch
    assert handle()[0] == "gpu by address"


@pytest.mark.parametrize(
    ("bits", "words", "discarded"),
    [
        (0x0, set(), False),
        (0x1, {"idle"}, False),
        (0x8, {"hardware slowdown"}, True),
        (0x20, {"thermal"}, True),
        (0x40, {"thermal"}, True),
        (0x80, {"hardware slowdown"}, True),
        (0x112, {"application clocks", "sync boost", "display clocks"}, False),
        (0x5, {"idle", "power cap"}, False),
        (0x24, {"power cap", "thermal"}, True),
        (0x4C, {"power cap", "thermal", "hardware slowdown"}, True),
        (0x8000, {"reason 0x8000"}, False),
    ],
)
def test_only_heat_and_the_hardwares_own_slowdown_discard_a_sample(
    monkeypatch, device, bits, words, discarded
):
    library = FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=bits)
    reading = sensor_with(monkeypatch, library).read()
    assert reading is not None
    assert reading.throttle == words
    reason = must_discard(reading)
    assert (reason is not None) == discarded
    assert must_discard(None) is must_discard(GpuReading(power_w=400.0)) is None
    for word in {"thermal", "hardware slowdown"} & words:
        assert word in str(reason)


def readings(*throttles):
    return [None if t is None else GpuReading(throttle=frozenset(t)) for t in throttles]


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        ([], None),
        (readings(None, None), None),
        ([GpuReading()], None),
        (readings([], [], ["power cap"]), "burst"),
        (readings([], ["power cap"]), "sustained"),
        (readings(None, [], ["power cap", "idle"]), "sustained"),
        (readings(["thermal"], ["idle"]), "burst"),
    ],
)
def test_sustained_is_a_power_cap_in_half_of_what_was_read(seen, state):
    assert power_state(seen) == state
