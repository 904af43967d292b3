"""The energy loop on a fake counter and a fake clock: no time passes."""

import pytest

from attnbench.measure.sensor import GpuReading, measure_energy


class FakeBoard:
    """A board that draws 300 W in calls and 80 W at rest; its counter moves every `tick_s`."""

    def __init__(self, *, call_s=0.001, tick_s=0.1):
        self.call_s = call_s
        self.tick_s = tick_s
        self.now_s = 0.0
        self.queued = 0
        self.calls = 0
        self.rested_s = 0.0

    def call(self):
        self.calls += 1
        self.queued += 1

    def synchronize(self):
        self.now_s += self.queued * self.call_s
        self.queued = 0

    def sleep(self, seconds):
        assert not self.queued, "idle power of a busy device"
        self.now_s += seconds
        self.rested_s += seconds

    def read(self):
        return GpuReading(power_w=300.0 if self.calls else 80.0)

    def energy_mj(self):
        assert not self.queued, "read while calls are under way"
        ticks = int(self.now_s / self.tick_s + 1e-6)
        return round(1e6 + ticks * self.tick_s * 300_000)

    def measure(self, call=None):
        return measure_energy(
            call or self.call,
            self,  # type: ignore[arg-type]
            now=lambda: self.now_s,
            sleep=self.sleep,
            synchronize=self.synchronize,
        )


@pytest.mark.parametrize(("call_s", "tick_s"), [(0.001, 0.1), (1e-5, 0.02), (0.2, 0.1)])
def test_energy_is_power_times_the_time_of_a_call_gross_of_idle(call_s, tick_s):
    board = FakeBoard(call_s=call_s, tick_s=tick_s)
    energy = board.measure()
    assert board.rested_s >= 1.0
    assert energy.energy_j == pytest.approx(300 * call_s, rel=0.01)
    assert energy.idle_power_w == 80.0
    assert energy.reason is None


@pytest.mark.parametrize(("tick_s", "seconds"), [(0.02, 2.0), (0.3, 6.0)])
def test_both_two_seconds_and_twenty_ticks_are_needed(tick_s, seconds):
    board = FakeBoard(tick_s=tick_s)
    assert board.measure().energy_j is not None
    assert board.now_s == pytest.approx(1.5 + tick_s + seconds, abs=0.05)


@pytest.mark.parametrize(("tick_s", "ticks"), [(1.0, 8), (1e9, 0)])
def test_a_counter_that_ticks_too_slowly_gives_null_and_a_reason(tick_s, ticks):
    board = FakeBoard(tick_s=tick_s)
    energy = board.measure()
    assert energy.energy_j is None
    assert any(f"ticked {n} times" in str(energy.reason) for n in (ticks - 1, ticks, ticks + 1))
    assert "of a loop of 10 s; needed are 20 and 2 s" in str(energy.reason)
    assert board.now_s == pytest.approx(11.5, abs=0.1)  # 1.5 s idle, then the cap


@pytest.mark.parametrize(
    ("after_s", "value", "reason"),
    [(0.0, None, "cannot be read"), (2.5, None, "cannot be read"), (2.5, 0, "fell from")],
)
def test_a_counter_that_falls_or_cannot_be_read_gives_null(after_s, value, reason):
    board = FakeBoard()
    count = board.energy_mj
    board.energy_mj = lambda: value if board.now_s > after_s else count()  # type: ignore[method-assign]
    energy = board.measure()
    assert energy.energy_j is None
    assert reason in str(energy.reason)


def test_a_call_too_long_to_be_polled_is_not_looped_over():
    board = FakeBoard(call_s=3.0)
    energy = board.measure()
    assert energy.energy_j is None
    assert "a call of 3 s is too long" in str(energy.reason)
    assert board.calls == 4
