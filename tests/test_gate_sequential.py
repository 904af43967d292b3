"""What is measured next, and what is decided from rounds whose times are known."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from attnbench.gate.decide.data import Failure, Round, Rules
from attnbench.gate.decide.sequential import (
    BASE_FAILURES,
    CANDIDATE_FAILURES,
    RoundPlan,
    SequentialDecision,
)
from tests import gate_runs

RULES = Rules()


def a_round(plan, slower=None, *, noise=0.0, chance=None, null=0.0, discarded=None, blind=False):
    """A round as ordered: the candidate is slower by `slower[cell]`, each time by some noise."""
    found = gate_runs.a_round(
        plan, slower or {}, chance or random.Random(0), noise=noise, null_bias=null,
        threshold=0.0 if blind else RULES.threshold,
    )  # fmt: skip
    return structs.replace(found, discarded=discarded)


def planned(decision: SequentialDecision) -> RoundPlan:
    plan = decision.next_round()
    assert plan is not None
    return plan


def screened(cells, how, **more):
    """The decision after a whole screen, whose rounds are made as `how(number)` says."""
    decision = SequentialDecision(range(cells), RULES)
    for number in range(RULES.screen_rounds):
        decision.add(a_round(planned(decision), **how(number), **more))
    return decision


def play(slower=None, *, cells=4, seed=1, **how):
    """A whole run with these true slowdowns; the decision after its last round."""
    decision, chance = SequentialDecision(range(cells), RULES, seed), random.Random(seed)
    while (plan := decision.next_round()) is not None:
        decision.add(a_round(plan, slower, chance=chance, **how))
    return decision


def test_a_slowdown_of_the_threshold_is_confirmed_on_fresh_rounds():
    decision = play({2: RULES.threshold}, noise=0.01)
    assert decision.suspects == (2,)
    found, (stage, logs) = decision.decided[2], decision.observations(2)
    assert (found.verdict, stage) == ("regressed", "confirm")
    assert len(logs) == found.wins == RULES.looks[0]
    assert "8 of 8 fresh rounds" in found.reason
    screen = screened(2, lambda number: {"slower": {0: 0.5}})  # which alone never says so
    assert 0 not in screen.decided
    assert (planned(screen).stage, planned(screen).cells) == ("confirm", (0,))


@pytest.mark.parametrize(
    ("slower", "noise", "verdict"),
    [
        (0.9 * RULES.margin, 0.0, "ok"),  # within the margin it is never reported
        (0.07, 0.002, "regressed"),  # between margin and threshold it is, where it is sure
        (-0.2, 0.01, "improved"),
    ],
)
def test_what_lies_beyond_the_margin_is_reported_where_it_is_sure(slower, noise, verdict):
    decision = play({0: slower}, noise=noise)
    assert decision.decided[0].verdict == verdict
    assert decision.suspects == (() if verdict == "ok" else (0,))


def test_an_improvement_among_other_suspects_waits_for_a_look_that_can_show_it():
    """With two suspects eight rounds are too few to reject, though a slowdown is excluded."""
    decision = play({1: -0.2, 2: 0.12}, noise=0.01)
    assert decision.decided[1].verdict == "improved"
    assert len(decision.observations(1)[1]) == RULES.looks[1]


def test_a_call_that_is_slow_now_and_then_does_not_pass_by_its_fastest_blocks():
    """Every second block of the candidate takes twice as long: the fastest ones hide it."""
    decision = SequentialDecision([0], RULES)
    while (more := decision.next_round()) is not None:
        found = a_round(more)
        arms = dict(found.samples[0])
        if "candidate" in arms:
            even, uneven = ((9, 9), (9, 9)), ((9, 18), (18, 9))
            arms |= {"base": even, "candidate": uneven, "null": even}
        decision.add(structs.replace(found, samples={0: arms}))
    assert decision.decided[0].verdict == "inconclusive"
    assert decision.decided[0].reason.startswith("slow now and then")
    assert "slower by 50 %" in decision.decided[0].reason


@pytest.mark.parametrize("slower", [0.0, 0.9 * RULES.margin])
def test_a_suspect_that_was_unlucky_is_cleared_by_fresh_rounds(slower):
    calm = random.Random(3)
    decision = screened(2, lambda n: {"slower": {0: 0.3} if n < 5 else {}}, chance=calm)
    assert decision.suspects == (0,)
    while (more := decision.next_round()) is not None:
        decision.add(a_round(more, {0: slower}, chance=calm))
    assert decision.decided[0].verdict == "ok"


def test_false_alarms_stay_at_the_level_where_every_cell_lies_on_the_margin():
    """The worst that the promise covers: each round of each cell is beyond with probability 1/2.

    Base against itself shows nothing, so that no margin widens. Without sharing the level out over
    the suspects, about 1 - 0.99^8 = 8 % of runs would raise an alarm.
    """
    alarms = 0
    for seed in range(80):
        decision, chance = SequentialDecision(range(8), RULES, seed), random.Random(seed)
        while (more := decision.next_round()) is not None:
            coins = {cell: RULES.margin + chance.choice((-0.005, 0.005)) for cell in more.cells}
            decision.add(a_round(more, coins))
        alarms += any(d.verdict == "regressed" for d in decision.decided.values())
    assert alarms <= 4  # 0.8 expected at most; 5 or more happen in 0.1 % of the cases


def test_a_slowdown_of_the_threshold_hardly_ever_passes_whatever_the_noise():
    verdicts = [
        play({1: RULES.threshold}, noise=0.1, seed=seed).decided[1].verdict for seed in range(30)
    ]
    assert verdicts.count("ok") <= 2


def test_the_planted_slowdown_visits_every_cell_and_goes_on_alone_until_it_is_found():
    decision = screened(2, lambda number: {"blind": number == 0})
    plan = planned(decision)
    assert plan == RoundPlan(stage="confirm", cells=(), slowed=plan.slowed)
    visited = [plan.slowed]
    while (more := decision.next_round()) is not None:
        visited.append(more.slowed)
        decision.add(a_round(more))
    assert decision.controls.summary().found
    assert set(visited) == {0, 1}


def test_a_null_arm_that_differs_widens_the_margin_and_cannot_narrow_it():
    # Base against itself shows 5 %: a slowdown of 4.5 % lies beyond the usual margin, not there.
    assert play({0: 0.045}, noise=0.001).decided[0].verdict == "regressed"
    widened = play({0: 0.045}, noise=0.001, null=0.05)
    assert widened.decided[0].verdict != "regressed"
    # and it is an advantage in all cells, below the threshold
    assert "advantage" in (widened.controls.summary().untrusted or "")
    assert play({0: 0.02}, noise=0.001, null=-0.05).decided[0].verdict != "regressed"
    never = play({0: 0.3}, cells=1, noise=0.001, null=0.12)
    assert never.decided[0].verdict == "inconclusive"
    assert never.decided[0].reason.startswith("its A/A control differs by 12")


def test_discarded_rounds_count_for_nothing():
    decision = SequentialDecision(range(2), RULES)
    for _ in range(30):
        plan = planned(decision)
        decision.add(a_round(plan, {0: 0.5}, discarded="other processes kept 2 CPUs busy"))
    assert decision.suspects is None
    assert decision.controls.summary().rounds == 0


@pytest.mark.parametrize(
    ("arm", "times", "verdict"),
    [
        ("candidate", CANDIDATE_FAILURES, "incorrect"),
        ("base", BASE_FAILURES, "not comparable"),
        ("null", BASE_FAILURES, "not comparable"),
    ],
)
def test_a_cell_that_always_fails_in_an_arm_is_given_up_and_the_rest_goes_on(arm, times, verdict):
    """The rounds that broke off are measured again."""
    decision = SequentialDecision(range(2), RULES)
    for _ in range(times):
        assert 1 not in decision.decided
        why = Failure(variant=arm, code="crashed", reason="killed by signal 11 (SIGSEGV)")
        decision.add(Round(stage=planned(decision).stage, samples={}, failures={1: why}))
    assert decision.decided[1].verdict == verdict
    assert "SIGSEGV" in decision.decided[1].reason
    while (more := decision.next_round()) is not None:
        assert 1 not in (*more.cells, more.slowed)
        decision.add(a_round(more))
    assert decision.decided[0].verdict == "ok"
    assert len(decision.observations(0)[1]) == RULES.screen_rounds
