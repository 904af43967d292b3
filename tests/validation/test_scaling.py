"""The validation of verdicts: kernels of known law, the usual rule, totals, goals, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from attnbench.analysis.scaling.exponents import fit_many
from attnbench.analysis.scaling.results import ExponentFit, Series
from attnbench.base.stats import median
from attnbench.schema.finding import LawFinding, Verdict
from tests.validation.scaling import session
from tests.validation.scaling.kernels import KERNELS, LAWS, RANGES, Range, right
from tests.validation.scaling.noise import one_process, several_processes
from tests.validation.scaling.summary import summarise, totals
from tests.validation.scaling.tables import tables
from tests.validation.scaling.trial import Answers, Picks, ask, drawn
from tests.validation.scaling.usual import usual

LONG = Range(first=128, last=8192)
SHORT = Range(first=512, last=2048)


def answer(verdict: Verdict | None, octaves: float = 6.0, **counts: int) -> Answers:
    none: dict[Verdict, int] = {"holds": 0, "refuted": 0, "inconclusive": 0}
    return Answers(
        over="128..8192", span=6.0, octaves=octaves, kernel="n^2", law="n^2", own=True,
        right=verdict, counts=none | counts,  # type: ignore[arg-type]
    )  # fmt: skip


def always(verdict: Verdict, many: Sequence[Series]) -> list[ExponentFit]:
    finding = LawFinding(
        subject="k", question="time in n", law="x", verdict=verdict, reason="mutant"
    )
    return [replace(fit, finding=finding) for fit in fit_many(many, draws=20)]


# Kernels and ranges.


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("over", RANGES)
def test_a_kernel_grows_as_its_law_says_once_the_floor_is_taken_off(name: str, over: Range) -> None:
    kernel = KERNELS[name]
    first, *_, last = over.sizes
    work = [kernel.time_us(n, over) - kernel.floor_us(over) for n in (first, last)]
    expected = (last / first) ** kernel.slope(over) * kernel.step
    assert work[1] / work[0] == pytest.approx(expected)
    assert (first, last) == (over.first, over.last)


def test_the_hard_floor_equals_the_work_at_2048_of_128_to_8192() -> None:
    kernel = KERNELS["floor + n^2"]
    assert kernel.time_us(2048, LONG) == pytest.approx(2 * kernel.floor_us(LONG))
    slope = np.log(kernel.time_us(8192, LONG) / kernel.time_us(128, LONG)) / np.log(64)
    assert slope == pytest.approx(0.68, abs=0.01)  # endpoints; the regression over all gives 0.63
    x, y = np.log(LONG.sizes), np.log([kernel.time_us(n, LONG) for n in LONG.sizes])
    assert np.polyfit(x, y, 1)[0] == pytest.approx(0.63, abs=0.01)
    assert (y[-1] - y[-2]) / np.log(2) == pytest.approx(1.77, abs=0.01)
    assert kernel.octaves(LONG) == 1.0


def test_only_the_named_switch_changes_the_kernels_name() -> None:
    named, silent = KERNELS["n^2, kernel switch"], KERNELS["n^2, silent switch"]
    assert [named.name(n) for n in (512, 1024)] == ["first", "second"]
    assert [silent.name(n) for n in (512, 1024)] == ["first", "first"]
    for kernel in (named, silent):
        plain = KERNELS["n^2"]
        work = [k.time_us(1024, LONG) - k.floor_us(LONG) for k in (kernel, plain)]
        assert work[0] == pytest.approx(2 * work[1])


@pytest.mark.parametrize(
    ("kernel", "law", "expected"),
    [
        ("n^2", "n^2", "holds"),
        ("n^2", "n^1.8", "refuted"),
        ("n^1.8", "n^1.8", "holds"),
        ("n^1.8", "O(n^2)", "holds"),
        ("n^2.3", "O(n^2)", "refuted"),
        ("n^2, silent switch", "n^2", "holds"),
        ("n log n", "n log n", None),
        ("n log n", "n", None),
        ("n", "n log n", None),
        ("n log n", "n^2", "refuted"),
        ("n^2 log n", "n^2", None),
        ("n^2 log n", "O(n^2)", None),
        ("n^2 log n", "n^3", "refuted"),
        ("n log n", "O(n^2)", "holds"),
    ],
)
def test_what_is_right_is_known_beforehand(kernel: str, law: str, expected: Verdict | None) -> None:
    assert right(KERNELS[kernel], law, LONG) == expected


# Noise.


def test_noise_is_late_more_often_than_early_and_moves_whole_cells() -> None:
    rng = np.random.default_rng(1)
    deviations = np.log([one_process([100.0] * 200, rng)[0] for _ in range(200)]) - np.log(100)
    assert abs(np.median(deviations)) < 0.01
    low, high = np.quantile(deviations, (0.02, 0.98))
    assert high > 2 * -low
    medians = [median(cell) for cell in one_process([100.0] * 2000, rng)]
    assert 0.012 < np.std(np.log(medians)) < 0.03


def test_several_processes_give_one_median_each() -> None:
    found = several_processes([10.0, 1000.0], np.random.default_rng(0))
    assert [len(cell) for cell in found] == [3, 3]
    assert found[1][0] / found[0][0] == pytest.approx(100, rel=0.2)


def test_the_same_seed_draws_the_same_series() -> None:
    kernel = KERNELS["n^2"]
    assert drawn(kernel, LONG, 3, 7) == drawn(kernel, LONG, 3, 7)
    assert drawn(kernel, LONG, 3, 7) != drawn(kernel, LONG, 3, 8)
    assert drawn(kernel, LONG, 2, 7) == drawn(kernel, LONG, 3, 7)[:2]


# The usual rule.


@pytest.mark.parametrize("name", ["n^1.8", "n^2.3", "n^2 log n", "n^2"])
def test_the_usual_rule_calls_it_n_squared(name: str) -> None:
    times = [KERNELS[name].time_us(n, LONG) for n in LONG.sizes]
    assert usual(LONG.sizes, times) == "n^2"


def test_the_usual_rule_finds_what_is_on_its_list() -> None:
    for name, picked in {"n": "n", "n^3": "n^3", "n log n": "n lg n"}.items():
        times = [KERNELS[name].time_us(n, LONG) for n in LONG.sizes]
        assert usual(LONG.sizes, times) == picked
    assert usual((1, 2, 4), (5.0, 5.0, 5.0)) == "1"


# Verdicts, totals and goals.


def test_verdicts_over_six_octaves_are_right() -> None:
    answers, picks = ask("n^2", LONG, 20, seed=0)
    assert [a.law for a in answers] == list(LAWS)
    assert sum(a.wrong for a in answers) == 0
    assert all(a.draws == 20 for a in answers)
    by_law = {a.law: a.counts for a in answers}
    assert by_law["n^2"]["holds"] >= 17
    assert by_law["n^3"]["refuted"] == by_law["n"]["refuted"] == 20
    assert picks.counts == {"n^2": 20}


def test_a_floor_that_drowns_the_work_is_inconclusive_and_not_wrong() -> None:
    answers, _ = ask("floor + n^2", LONG, 6, seed=0)
    assert {a.counts["inconclusive"] for a in answers} == {6}
    assert all(a.octaves == 1.0 for a in answers)


def test_two_octaves_hold_nothing() -> None:
    answers, _ = ask("n^2", SHORT, 10, seed=0)
    assert sum(a.counts["holds"] for a in answers) == 0


def test_totals_count_wrong_and_inconclusive_by_what_is_right() -> None:
    found = totals([
        answer("holds", holds=7, refuted=1, inconclusive=2),
        answer("refuted", refuted=8, holds=2),
        answer("refuted", octaves=2.0, inconclusive=10),
        answer(None, holds=5, refuted=5),
    ])  # fmt: skip
    told = {(t.laws, t.ranges.split()[0]): (t.asked, t.wrong, t.inconclusive) for t in found}
    assert told == {
        ("right laws", "four"): (10, 1, 2),
        ("wrong laws", "four"): (10, 2, 0),
        ("wrong laws", "fewer"): (10, 0, 10),
        ("all laws", "four"): (30, 3, 12),
    }


@pytest.mark.parametrize(
    ("counts", "octaves", "met"),
    [
        ({"holds": 180, "inconclusive": 20}, 6.0, True),
        ({"holds": 179, "inconclusive": 21}, 6.0, False),
        ({"holds": 198, "refuted": 2}, 6.0, True),
        ({"holds": 197, "refuted": 3}, 6.0, False),
        ({"holds": 197, "refuted": 3}, 2.0, False),
    ],
)
def test_the_goals_are_one_percent_wrong_and_ten_inconclusive(
    counts: dict[str, int], octaves: float, met: bool
) -> None:
    assert totals([answer("holds", octaves, **counts)])[0].met is met
    assert totals([answer("holds", 2.0, inconclusive=1)])[0].met


@pytest.mark.parametrize("verdict", ["holds", "refuted", "inconclusive"])
def test_a_judge_that_always_says_the_same_misses_a_goal(verdict: Verdict) -> None:
    answers, picks = [], []
    for name in ("n", "n^2"):
        found, picked = ask(name, LONG, 2, 0, judge=lambda many: always(verdict, many))
        answers += found
        picks.append(picked)
    assert summarise(answers, picks)["met"] is False


def test_the_matrix_marks_own_laws_open_ones_and_wrong_verdicts() -> None:
    answers, picks = ask("n^2", LONG, 2, 0, judge=lambda many: always("holds", many))
    ours, theirs, total = tables(summarise(answers, [picks]))
    row = dict(zip(ours.header, ours.rows[0], strict=True))
    assert row["kernel"] == "n^2"
    assert row["n^2"] == row["O(n^2)"] == "[100 / 0 / 0]"
    assert row["n^2 log n"] == "~ 100 / 0 / 0"
    assert row["n^3"] == "! 100 / 0 / 0"
    assert dict(zip(theirs.header, theirs.rows[0], strict=True))["n^2"] == "100"
    assert "MISSED" in {cell for line in total.rows for cell in line}


# The command.


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RANGES", (LONG,))
    monkeypatch.setattr(session, "KERNELS", dict.fromkeys(("n", "n^2")))


@pytest.mark.usefixtures("brief")
def test_the_command_prints_both_matrices_and_leaves_two_files(cli, tmp_path) -> None:
    result = cli("scaling", "--draws", 8, "--output", tmp_path, "--name", "a")
    assert result.exit_code == 0, result.output
    for text in ("Verdicts, n = 128..8192", "The usual rule, n = 128..8192", "Totals", "met"):
        assert text in result.stdout
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [
        "scaling.md",
        "summary.json",
    ]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["met"] is True
    assert (summary["draws"], summary["seed"]) == (8, 0)
    assert len(summary["answers"]) == 2 * len(LAWS)
    assert "[100 / 0 / 0]" in (tmp_path / "a" / "scaling.md").read_text().replace("\\", "")


@pytest.mark.usefixtures("brief")
def test_json_goes_to_standard_output_and_a_missed_goal_is_exit_1(
    cli, tmp_path, monkeypatch
) -> None:
    def asked(kernel: str, over: Range, draws: int, seed: int) -> tuple[list[Answers], Picks]:
        return ask(kernel, over, draws, seed, judge=lambda many: always("holds", many))

    monkeypatch.setattr(session, "ask", asked)
    result = cli("scaling", "--draws", 1, "--json", "--output", tmp_path, "--name", "b")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["met"] is False


def test_a_taken_name_is_refused_before_anything_is_drawn(
    cli, tmp_path, assert_refused, monkeypatch
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(session, "ask", lambda *args: pytest.fail("drawn"))
    result = cli("scaling", "--output", tmp_path, "--name", "a")
    assert_refused(result, "exists already", "--name")


def test_its_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from tests.validation.__main__ import main\n"
        "try: main(['scaling', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'scipy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
