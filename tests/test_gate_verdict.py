"""From a run's raw data to its exit code: what outranks what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from attnbench.errors import ExitCode, UsageError
from attnbench.gate.decide.data import Checked, Failure, Round, RoundFacts, Rules
from attnbench.gate.decide.verdict import decide
from tests.gate_runs import CELLS, a_run, changed

WRONG = {"candidate": Checked(status="incorrect", reason="o is off by 0.3")}
ABSENT = {"base": Checked(status="absent", reason="it has no such implementation")}
GROWN = changed(memory_workspace_bytes=4_194_304)


def verdicts(run):
    return [row.verdict for row in decide(run).rows]


def contains(row, ratio):
    """Whether the interval of the row holds the ratio."""
    assert row.low is not None
    return row.low <= ratio <= row.high


def test_identical_sides_end_with_0_and_say_what_was_excluded():
    outcome = decide(a_run())
    assert outcome.exit_code == ExitCode.OK
    assert outcome.words == "no regression of 10 % or more: 8 ok"
    assert outcome.controls.found
    for row in outcome.rows:
        assert contains(row, row.ratio)


def test_a_slower_cell_ends_with_1_and_is_the_only_one_named():
    outcome = decide(a_run({3: 0.1}))
    assert outcome.exit_code == ExitCode.FINDING
    assert [row.verdict for row in outcome.rows] == ["ok"] * 3 + ["regressed"] + ["ok"] * 4
    row = outcome.rows[3]
    assert (row.stage, row.rounds, row.wins) == ("confirm", 8, 8)
    assert contains(row, 1.1)


def test_figures_of_a_suspect_come_from_its_confirmation_alone():
    run = a_run({3: 0.1})
    twisted = tuple(
        found
        if found.stage == "confirm"
        else structs.replace(found, samples={c: dict(of) for c, of in found.samples.items()})
        for found in run.rounds
    )
    for found in twisted:
        if found.stage == "screen":
            arms = dict(found.samples[3])
            found.samples[3] = arms  # type: ignore[index]
            arms["candidate"] = tuple(tuple(5 * ns for ns in turn) for turn in arms["candidate"])
    assert decide(replace(run, rounds=twisted)).rows[3] == decide(run).rows[3]


def test_a_wrong_result_fails_and_its_time_is_not_compared():
    outcome = decide(a_run(other_checks={0: WRONG}))
    assert outcome.exit_code == ExitCode.FINDING
    assert outcome.words == "1 incorrect"
    assert outcome.rows[0].ratio is None


def test_memory_that_grew_fails_without_any_statistics():
    outcome = decide(a_run(other_checks={6: GROWN}))
    assert outcome.exit_code == ExitCode.FINDING
    assert outcome.rows[6].verdict == "regressed"
    assert outcome.rows[6].reason.startswith("workspace grew from 2.0 MiB to 4.0 MiB (+100 %)")
    assert outcome.rows[6].ratio == pytest.approx(1, abs=0.03), "its time was compared all the same"


def test_a_cell_that_is_slower_and_larger_says_both():
    reason = decide(a_run({6: 0.2}, other_checks={6: GROWN})).rows[6].reason
    assert "slower beyond the margin" in reason
    assert "workspace grew" in reason


def grown(run, bytes_, least=0):
    """The run, with processes that grow: the candidate's by this much more in cell 2."""
    facts = {"2": {"base": 100_000, "null": 0, "candidate": 100_000 + bytes_}}
    rounds = [structs.replace(found, facts={"grown": facts}) for found in run.rounds[least:]]
    return replace(run, rounds=tuple(rounds))


def test_a_process_that_grows_in_every_round_fails_whoever_allocates():
    outcome = decide(grown(a_run(), 8 << 20))
    assert outcome.exit_code == ExitCode.FINDING
    assert outcome.rows[2].verdict == "regressed"
    assert outcome.rows[2].reason.startswith("its process grows by 8.0 MiB and more in 8 batches")


def test_a_little_growth_or_too_few_rounds_say_nothing():
    assert decide(grown(a_run(), 1 << 20)).exit_code == ExitCode.OK
    assert decide(grown(a_run(), 8 << 20, least=1)).rows[2].verdict != "regressed"


def test_a_green_line_says_what_is_gone_and_how_disturbed_the_machine_was():
    gone = {1: {"candidate": Checked(status="absent")}}
    assert "; removed: naive" in decide(a_run(other_checks=gone)).words
    run = a_run()
    facts = RoundFacts(not_vetoed="other processes kept 1 CPUs busy")
    disturbed = structs.replace(run.rounds[0], facts=facts)
    words = decide(replace(run, rounds=(disturbed, *run.rounds[1:]))).words
    assert words.endswith("; the machine was disturbed in 1 of the 8 rounds that count")


def test_what_the_base_lacks_is_listed_and_the_rest_decides():
    outcome = decide(a_run(other_checks={1: ABSENT}))
    assert outcome.exit_code == ExitCode.OK
    assert outcome.rows[1].verdict == "not comparable"
    assert outcome.words.endswith("7 ok, 1 not comparable")


def test_nothing_comparable_ends_with_2():
    outcome = decide(a_run(cells=CELLS[:2], other_checks={0: ABSENT, 1: ABSENT}))
    assert (outcome.exit_code, outcome.words) == (ExitCode.USAGE, "nothing is comparable")


def test_a_blind_run_cannot_pass():
    outcome = decide(a_run(planted=0.0))
    assert outcome.exit_code == ExitCode.INCONCLUSIVE
    assert outcome.words.startswith("blind: the positive control of 10 % was seen in only")


def test_a_blind_run_still_names_what_it_has_shown():
    assert decide(a_run({2: 0.2}, planted=0.0)).exit_code == ExitCode.FINDING


def test_an_untrusted_run_outranks_times_but_not_what_repeats_exactly():
    assert decide(a_run({2: 0.3}, null_bias=0.06)).exit_code == ExitCode.ENVIRONMENT
    both = a_run({2: 0.3}, null_bias=0.06, other_checks={0: GROWN})
    assert decide(both).exit_code == ExitCode.FINDING


def test_a_run_cut_short_passes_nothing():
    run = a_run(most_rounds=5)
    outcome = decide(run)
    assert outcome.exit_code == ExitCode.INCONCLUSIVE
    assert set(verdicts(run)) == {"inconclusive"}
    assert outcome.rows[0].reason == "the time budget ended after 5 of 8 screening rounds"


def test_a_suspect_left_open_by_the_budget_is_inconclusive():
    outcome = decide(a_run({1: 0.1}, most_rounds=11))
    assert outcome.exit_code == ExitCode.INCONCLUSIVE
    assert outcome.rows[1].reason == "the time budget ended after 3 confirmation rounds"
    assert outcome.rows[1].ratio is not None, "what was seen so far is shown"


def test_deciding_twice_gives_the_same(tmp_path):
    run = a_run({3: 0.1, 5: 0.05}, noise=0.03)
    assert decide(run) == decide(run)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("threshold", 0.0, "--threshold"),
        ("threshold", 1.5, "--threshold"),
        ("threshold", float("nan"), "--threshold"),
        ("growth", -0.1, "--growth"),
        ("budget_s", 0.0, "--budget"),
        ("budget_s", float("inf"), "--budget"),
    ],
)
def test_rules_that_cannot_be_right_name_their_flag(field, value, flag):
    with pytest.raises(UsageError, match=flag):
        Rules(**{field: value})


def test_growth_seen_in_a_round_without_turns_decides_nothing():
    """As in runs stored before a broken-off round dropped what it had seen grow."""
    run = a_run()
    broken = Round(
        stage="screen",
        samples={},
        failures={0: Failure(variant="candidate", code="timeout", reason="no answer")},
        facts={"grown": {"0": {"base": 0, "candidate": 1 << 30, "null": 0}}},
    )
    assert decide(replace(run, rounds=(broken, *run.rounds))).exit_code == ExitCode.OK
