"""The figures of the gate's validation: bounds, counts, resampled runs, other tools' rules."""

from __future__ import annotations

import numpy as np
import pytest

from attnbench.errors import ExitCode
from attnbench.gate.decide.verdict import decide
from tests.gate_runs import a_run
from tests.validation.gate import peers
from tests.validation.gate.goals import goals
from tests.validation.gate.live import request
from tests.validation.gate.pool import Live
from tests.validation.gate.resample import Stock, resample, stock
from tests.validation.gate.schedule import CELLS, Kind, Todo, kinds_of
from tests.validation.gate.summary import judged, summarise
from tests.validation.gate.tables import tables
from tests.validation.gate.tally import clopper_pearson, tally
from tests.validation.gate.versus import APART, SAME, versus

AA, TEN, FIVE = kinds_of((10.0, 5.0))
WANTED = {AA: 3, TEN: 1, FIVE: 1}


def a_live(kind: Kind, number: int, *, noise: float = 0.01, bias: float = 0.0) -> Live:
    asked = request(Todo(kind=kind, number=number))
    slower = dict.fromkeys(range(CELLS), bias) | dict(asked.injected)
    run = a_run(slower, rules=asked.rules, seed=asked.settings.seed, noise=noise)
    code = int(decide(run).exit_code)
    return Live(kind=kind, number=number, created="2026-11-21T01:02:03+00:00", exit_code=code,
                run=run)  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> list[Live]:
    """Enough for controls of 5 % in every cell, and two slowed candidates."""
    counts = {AA: 6, TEN: 2, FIVE: 6}
    return [a_live(kind, number) for kind, n in counts.items() for number in range(n)]


@pytest.fixture(scope="module")
def kept(runs: list[Live]) -> Stock:
    found = stock(runs)
    assert found is not None
    return found


# Bounds.


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [
        (0, 40, 0.0, 0.08810),  # 1 − 0.025^(1/40)
        (12, 12, 0.73535, 1.0),
        (5, 10, 0.18709, 0.81291),  # the textbook's table
        (0, 0, 0.0, 1.0),
        (7, 20, 0.15391, 0.59219),
    ],
)
def test_bounds_are_those_of_clopper_and_pearson(hits, of, low, high) -> None:
    assert clopper_pearson(hits, of) == pytest.approx((low, high), abs=1e-5)


def test_more_hits_than_tries_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 hits of 2"):
        clopper_pearson(3, 2)


# Counts.


def test_a_slowed_cell_that_is_named_is_found_and_no_false_alarm(runs: list[Live]) -> None:
    found = tally([judged(live) for live in runs if live.kind == TEN])
    assert found["found"]["hits"] == found["runs"] == 2
    assert found["false_alarms"]["hits"] == 0
    assert found["slowed"]["covered"] | {"low": 0} == found["slowed"]["covered"] | {"low": 0}
    assert abs(found["slowed"]["bias"]) < 0.01
    assert found["seconds_suspects"]["of"] == 2


def test_a_cell_called_slower_that_is_not_is_a_false_alarm_whatever_else_was_found() -> None:
    live = a_live(TEN, 2, bias=0.3)
    found = judged(live)
    assert found.named
    assert set(found.wrongly) == set(range(CELLS)) - {2}
    assert tally([found])["false_alarms"]["hits"] == 1
    assert judged(a_live(AA, 0, bias=0.3)).wrongly == tuple(range(CELLS))


def test_blind_and_inconclusive_are_told_apart_though_both_exit_3() -> None:
    asked = request(Todo(kind=AA, number=0))
    blind = a_run(rules=asked.rules, planted=0.0, most_rounds=100)
    hazy = a_run({0: 0.06}, rules=asked.rules, noise=0.08, seed=3)
    endings = []
    for run in (blind, hazy):
        code = int(decide(run).exit_code)
        assert code == ExitCode.INCONCLUSIVE
        live = Live(kind=AA, number=0, created="", exit_code=code, run=run)
        endings.append(judged(live).ending)
    assert endings == ["blind", "inconclusive"]


def test_goals_are_open_where_too_little_was_run_and_missed_by_one_false_alarm(
    runs: list[Live],
) -> None:
    summary = summarise(runs, WANTED, 0, print)
    met = {(row["goal"], row["runs"]): row["met"] for row in goals(summary)}
    assert met["no false alarm, live", "A/A"] is None
    assert met["found every time, live", "+10 %"] is None
    wrong = [*runs, a_live(AA, 6, bias=0.3)]
    met = {(r["goal"], r["runs"]): r["met"] for r in goals(summarise(wrong, WANTED, 0, print))}
    assert met["no false alarm, live", "A/A"] is False


# Resampled runs.


def test_resampled_runs_of_clean_rounds_pass_and_find_what_is_planted(kept: Stock) -> None:
    alike = tally(resample(AA, kept, 100))
    assert (alike["false_alarms"]["hits"], alike["unfit"]["hits"]) == (0, 0)
    assert alike["alike"]["covered"]["share"] >= 0.93
    for kind in (TEN, FIVE):
        slowed = tally(resample(kind, kept, 40))
        assert slowed["found"]["share"] >= 0.95
        assert slowed["false_alarms"]["hits"] == 0


def test_a_resampled_run_takes_the_time_of_its_rounds_and_ends_with_the_budget(
    kept: Stock,
) -> None:
    (run,) = resample(AA, kept, 1)
    assert run.seconds == pytest.approx(kept.start_s + 1.5 * run.rounds)
    from dataclasses import replace

    slow = replace(kept, seconds={"screen": 100.0, "confirm": 100.0})
    (late,) = resample(AA, slow, 1)
    assert late.ending == "inconclusive"
    assert late.rounds == 2


def test_rounds_with_an_advantage_for_one_side_show_in_resampled_runs() -> None:
    found = stock([a_live(AA, number, bias=0.08) for number in range(6)])
    assert found is not None
    assert tally(resample(AA, found, 30))["false_alarms"]["share"] > 0.9


def test_a_slowdown_of_which_there_are_no_controls_is_not_resampled(kept: Stock) -> None:
    assert kept.enough(AA)
    assert kept.enough(FIVE)
    assert not kept.enough(kinds_of((3.0,))[1])
    assert not kept.enough(kinds_of((20.0,))[1])  # its controls were slowed by 10 %


def test_the_slowed_are_drawn_with_a_null_arm_of_another_process(runs: list[Live]) -> None:
    found = stock(runs)
    assert found is not None
    for (_, share), pairs in found.slowed.items():
        for pair in pairs:
            assert np.exp(pair["candidate"]) == pytest.approx(1 + share, rel=0.1)
            assert np.exp(pair["null"]) == pytest.approx(1, rel=0.1)


def test_resampling_is_the_same_each_time(kept: Stock) -> None:
    one, two = (tally(resample(FIVE, kept, 5)) for _ in range(2))
    assert one == two


# Other tools' rules.

STEADY = np.array([100.0, 101.0, 100.5, 99.5, 100.2, 99.8, 100.1, 100.4, 99.9, 100.3])


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.label)
def test_every_rule_passes_what_is_the_same_and_fails_what_is_half_as_fast(peer) -> None:
    assert not peer.slower(STEADY, STEADY)
    assert peer.slower(STEADY, 2 * STEADY)
    assert not peer.slower(2 * STEADY, STEADY)


def test_thresholds_are_those_of_the_flags() -> None:
    for statistic, percent in ((np.mean, 5), (np.median, 10), (np.min, 5)):
        rule = peers.pytest_benchmark(statistic, percent)
        assert not rule(STEADY, STEADY * (1 + percent / 100 - 0.001))
        assert rule(STEADY, STEADY * (1 + percent / 100 + 0.001))
    assert not peers.asv(STEADY, STEADY * 1.099)
    assert peers.asv(STEADY, STEADY * 1.101)
    assert not peers.criterion(STEADY, STEADY * 1.008)
    assert peers.criterion(STEADY, STEADY * 1.03)


def test_tests_of_significance_call_any_difference_a_regression() -> None:
    for rule in (peers.google_benchmark, peers.pyperf):
        assert rule(STEADY, STEADY * 1.006)


def test_few_times_are_judged_by_asv_through_intervals_and_no_scatter_breaks_nothing() -> None:
    four = STEADY[:4]
    assert peers.asv(four, four * 2)
    assert not peers.asv(four, np.array([100.0, 150.0, 90.0, 140.0]))
    assert peers.criterion(np.full(4, 1.0), np.full(4, 2.0))


def test_the_rules_see_two_sides_of_a_round_and_two_of_different_runs(runs: list[Live]) -> None:
    rows = {(row["tool"], row["pairing"]): row for row in versus(runs)}
    assert len(rows) == 2 * len(peers.PEERS)
    for way in (SAME, APART):
        row = rows["pytest-benchmark min:5%", way]
        alike = sum(len(live.run.rounds) for live in runs if live.kind == AA)
        assert row["false_alarms"]["of"] == alike
        assert set(row["found"]) == {"10", "5"}
    close, far = (rows["pytest-benchmark min:5%", way]["false_alarms"] for way in (SAME, APART))
    assert far["share"] > close["share"]  # the imagined machine is 5 % faster or slower by rounds


def test_the_tables_hold_every_part_of_a_whole_report(runs: list[Live]) -> None:
    summary = summarise(runs, WANTED, 10, lambda _: None)
    summary |= {"cases": [], "goals": goals(summary)}
    found = {table.title: table for table in tables(summary)}
    assert list(found) == [
        "Goals", "Live gate runs", "Time of live runs", "Live runs by cell",
        "Resampled gate runs", "Other tools' rules on the same times",
    ]  # fmt: skip
    assert "Resampled, not live" in found["Resampled gate runs"].note
    assert all(len(row) == len(table.header) for table in found.values() for row in table.rows)
    assert summary["changed"] == 0
