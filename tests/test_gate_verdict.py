"""From a run's raw data to its exit code: what outranks what."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from msgspec import structs

from attnbench.errors import ExitCode
from attnbench.gate.decide.data import Checked, Failure, Round, RoundFacts, Rules
from attnbench.gate.decide.verdict import decide
from tests.gate_runs import CELLS, a_run, changed

WRONG = {"candidate": Checked(status="incorrect", reason="o is off by 0.3")}
ABSENT = {"base": Checked(status="absent", reason="it has no such implementation")}
GROWN = changed(memory_workspace_bytes=4_194_304)


def contains(row, ratio):
    """Whether the interval of the row holds the ratio."""
    assert row.low is not None
    return row.low <= ratio <= row.high


def test_figures_of_a_suspect_come_from_its_confirmation_alone():
    run = a_run({3: 0.1})

    def twisted(found):
        arms = dict(found.samples[3])
        arms["candidate"] = tuple(tuple(5 * ns for ns in sample) for sample in arms["candidate"])
        return structs.replace(found, samples={**found.samples, 3: arms})

    rounds = [twisted(found) if found.stage == "screen" else found for found in run.rounds]
    assert decide(replace(run, rounds=tuple(rounds))).rows[3] == decide(run).rows[3]


def test_more_memory_for_less_time_is_a_trade_and_allowed_if_growth_says_so():
    run = a_run({6: -0.2}, other_checks={6: GROWN})
    outcome = decide(run)
    row = outcome.rows[6]
    assert (row.verdict, outcome.exit_code) == ("larger", ExitCode.FINDING)
    assert re.fullmatch(r"(19|20|21)[.\d]* % faster", row.trade)
    assert row.reason.endswith(f"; {row.trade}")
    allowed = decide(replace(run, rules=Rules(growth={"flops": 0.01, "memory": 1.0})))
    assert (allowed.rows[6].verdict, allowed.exit_code) == ("improved", ExitCode.OK)
    assert decide(a_run({6: 0.2}, other_checks={6: GROWN})).rows[6].verdict == "regressed"


def test_a_run_that_was_stored_when_growth_was_one_number_keeps_its_verdict():
    rules = Rules(growth=0.01)
    assert decide(a_run(rules=rules, other_checks={6: GROWN})).words == "1 regressed"
    assert decide(a_run(rules=rules)).exit_code == ExitCode.OK


def grown(run, bytes_, least=0):
    """The run, with processes that grow: the candidate's by this much more in cell 2."""
    facts = {"2": {"base": 100_000, "null": 0, "candidate": 100_000 + bytes_}}
    rounds = [structs.replace(found, facts={"grown": facts}) for found in run.rounds[least:]]
    return replace(run, rounds=tuple(rounds))


def test_a_process_that_grows_in_every_round_fails_whoever_allocates():
    outcome = decide(grown(a_run(), 8 << 20))
    assert outcome.exit_code == ExitCode.FINDING
    assert outcome.rows[2].verdict == "larger"
    assert outcome.rows[2].reason.startswith("its process grows by 8.0 MiB and more in 8 batches")
    # a little growth or too few rounds say nothing
    assert decide(grown(a_run(), 1 << 20)).exit_code == ExitCode.OK
    assert decide(grown(a_run(), 8 << 20, least=1)).rows[2].verdict != "larger"
    # nor does what was seen in a round that broke off, as older runs have it
    why = Failure(variant="candidate", code="timeout", reason="no answer")
    facts: RoundFacts = {"grown": {"0": {"base": 0, "candidate": 1 << 30, "null": 0}}}
    broken = Round(stage="screen", samples={}, failures={0: why}, facts=facts)
    run = a_run()
    assert decide(replace(run, rounds=(broken, *run.rounds))).exit_code == ExitCode.OK


def test_a_green_line_says_what_is_gone_and_how_disturbed_the_machine_was():
    gone = {1: {"candidate": Checked(status="absent")}}
    assert "; removed: naive" in decide(a_run(other_checks=gone)).words
    failing = decide(replace(a_run(other_checks=gone), rules=Rules(fail_removed=True)))
    assert (failing.exit_code, failing.words) == (ExitCode.FINDING, "removed: naive")
    run = a_run()
    facts = RoundFacts(counted_despite="other processes kept 1 CPUs busy")
    disturbed = structs.replace(run.rounds[0], facts=facts)
    words = decide(replace(run, rounds=(disturbed, *run.rounds[1:]))).words
    assert words.endswith("; the machine was disturbed in 1 of the 8 rounds that count")


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ({}, ExitCode.OK, "no regression of 10 % or more: 8 ok"),
        ({"other_checks": {0: WRONG}}, ExitCode.FINDING, "1 incorrect"),
        ({"other_checks": {1: ABSENT}}, ExitCode.OK, "no regression of 10 % or more: 7 ok, 1 not"),
        ({"cells": CELLS[:2], "other_checks": {0: ABSENT, 1: ABSENT}}, ExitCode.USAGE,
         "nothing is comparable"),
        ({"planted": 0.0}, ExitCode.INCONCLUSIVE,
         "the positive control of 10 % was not found: beyond the margin in 0 of 48"),
        # between two looks the latest counts
        ({"planted": 0.0, "most_rounds": 14}, ExitCode.INCONCLUSIVE,
         "the positive control of 10 % was not found: beyond the margin in 0 of 12 rounds,"
         " where it takes 12"),
        # such a run still names what it has shown
        ({"slower": {2: 0.2}, "planted": 0.0}, ExitCode.FINDING, "1 regressed"),
        # an untrusted run outranks times, but not what repeats exactly
        ({"slower": {2: 0.3}, "null_bias": 0.06}, ExitCode.ENVIRONMENT, "the run cannot be"),
        ({"slower": {2: 0.3}, "null_bias": 0.06, "other_checks": {0: GROWN}}, ExitCode.FINDING, ""),
    ],
)  # fmt: skip
def test_what_outranks_what(how, code, words):
    outcome = decide(a_run(**how))
    assert outcome.exit_code == code
    assert outcome.words.startswith(words)
    assert all(contains(row, row.ratio) for row in outcome.rows if row.ratio is not None)
    for number, checks in how.get("other_checks", {}).items():
        verdict = {"incorrect": "incorrect", "absent": "not comparable"}
        status = next(iter(checks.values())).status
        assert outcome.rows[number].verdict == verdict.get(status, "larger")
        assert (outcome.rows[number].ratio is None) == (status != "ok")
