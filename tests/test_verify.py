"""`attnbench verify`: what it measures, what it prints, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.analysis.scaling.results import Scaling
from attnbench.errors import ExitCode
from attnbench.execution.verifying import PRESET_ON
from attnbench.planning.plan import expand
from attnbench.planning.presets import PRESETS
from attnbench.schema.finding import Cost, LawFinding, Verdict, exit_code
from attnbench.store.runs import load_run
from tests import synthetic

MADE = Path("results/made")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _finding(
    verdict: Verdict, quantity: Cost | None = "time", impl: str | None = "naive"
) -> LawFinding:
    return LawFinding(
        subject=f"{impl}, forward", question="time in n", law="n^2 d", verdict=verdict,
        reason=f"it {verdict}", figures={"exponent": 2.0},
        impl=impl, workload="attention", quantity=quantity, axis="n",
    )  # fmt: skip


@pytest.mark.parametrize(("verdicts", "of_another", "code"), [
    ((), (), ExitCode.INCONCLUSIVE),
    (("inconclusive",), (), ExitCode.INCONCLUSIVE),
    (("holds",), (), ExitCode.OK),
    (("holds", "inconclusive"), (), ExitCode.OK),
    (("holds", "refuted"), (), ExitCode.FINDING),
    (("refuted", "inconclusive"), (), ExitCode.FINDING),
    (("holds",), ("inconclusive",), ExitCode.INCONCLUSIVE),  # one does not cover the other
    (("holds",), ("inconclusive", "holds"), ExitCode.OK),
])  # fmt: skip
def test_the_exit_code_says_whether_anything_is_refuted_or_nothing_holds(
    verdicts, of_another, code
):
    others = [_finding(verdict, impl="dead") for verdict in of_another]
    assert exit_code([*map(_finding, verdicts), *others]) == code


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (("holds",), ExitCode.OK),
        (("holds", "inconclusive"), ExitCode.INCONCLUSIVE),
        (("holds", "inconclusive", "refuted"), ExitCode.FINDING),
    ],
)
def test_strict_ends_with_3_where_any_verdict_is_open(cli, answered, verdicts, code):
    answered(*map(_finding, verdicts))
    assert cli("verify", "made", "--strict").exit_code == code


@pytest.mark.parametrize("wrong", [{"verdict": "maybe"}, {"reason": ""}])
def test_a_finding_has_one_of_three_verdicts_and_a_reason(wrong):
    with pytest.raises(ValueError, match=r"verdict|reason"):
        replace(_finding("holds"), **wrong)


@pytest.fixture
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`answered(_finding("holds"), …)` makes a run whose findings are these."""

    def answer(*findings: LawFinding) -> None:
        synthetic.write_named(tmp_path / "results", "one").rename(tmp_path / "results" / "made")
        found = Scaling(problems=findings)
        monkeypatch.setattr("attnbench.analysis.scaling.scaling", lambda run: found)

    return answer


def test_a_refuted_law_comes_first_and_ends_with_1(cli, answered):
    answered(_finding("holds"), _finding("refuted"), _finding("inconclusive"))
    result = cli("verify", "made")
    assert result.exit_code == ExitCode.FINDING, result.stderr
    marks = [line[0] for line in result.stdout.splitlines() if "naive, forward, time" in line]
    assert marks == ["✗"]
    assert "✗ 1 of 3 refuted" in result.stdout
    every = cli("verify", "made", "--verbose").stdout.splitlines()
    marks = [line[0] for line in every if line[2:].startswith("naive, forward, time")]
    assert marks == ["✗", "✗", "✓", "?"]


def test_json_holds_every_finding_with_its_figures(cli, answered):
    answered(_finding("inconclusive"))
    result = cli("verify", "made", "--json")
    assert result.exit_code == ExitCode.INCONCLUSIVE
    ((*_, every),) = (section["parts"] for section in json.loads(result.stdout)["sections"])
    ((row,), *_) = (part["table"] for part in every["parts"] if "table" in part)
    assert row["verdict"].pop("figures") == {"exponent": {"value": 2.0, "unit": "number"}}
    assert row["verdict"].pop("reason") == "it inconclusive"
    assert row["verdict"] == {
        "verdict": "inconclusive", "sign": "open", "subject": "naive, forward, time in n"
    }  # fmt: skip
    assert [row[name] for name in ("impl", "workload", "quantity", "axis", "law")] == [
        "naive", "attention", "time", "n", "n² d"
    ]  # fmt: skip


@pytest.mark.usefixtures("imagined_worker")
def test_what_only_a_sweep_takes_is_refused_without_one(cli, assert_refused):
    assert_refused(cli("verify", "--threads", "2", "--impls", "naive"), "--threads", "--sweep")
    assert_refused(cli("verify", "latest", "--sweep"), "--sweep", "'latest'", "--name")
    assert_refused(cli("verify"), "results")
    assert_refused(cli("verify", "--sweep", "--impls", "naiv"), "'naive'?")
    assert list(Path().iterdir()) == []


@pytest.mark.usefixtures("imagined_worker")
def test_a_sweep_of_verify_is_measured_as_its_preset_says(cli):
    for name, impls in (("asked", ()), ("one", ("--impls", "naive-heads"))):
        result = cli("verify", "--sweep", *impls, "--name", name, "--quiet")
        decided = (ExitCode.OK, ExitCode.FINDING, ExitCode.INCONCLUSIVE)
        assert result.exit_code in decided, result.stderr
    info, preset = load_run(Path("results/asked")).info, PRESETS.get(PRESET_ON["cpu"])
    assert {row["case"]["threads"] for row in info["plan"]} == {1}
    assert info["settings"]["allocator"] == "keep"
    assert info["settings"]["max_time_s"] == preset.max_time_s
    workloads = {row["case"]["workload"] for row in info["plan"]}
    assert workloads == {"attention", "layer", "decode", "recurrent"}
    plan = load_run(Path("results/one")).info["plan"]  # in place of the preset's cores alone
    assert {(row["impl"], row["case"]["workload"]) for row in plan} == {
        ("naive-heads", "attention")
    }
    assert {row["case"]["pass"] for row in plan} == {"forward", "both"}


def test_the_gru_on_a_gpu_is_one_that_cudnn_takes_beside_layers_of_its_width_and_dtype():
    cases = [
        case
        for axes in PRESETS.get(PRESET_ON["cuda"]).sweeps
        if {"sdpa", "gru"} & {*(axes.impls or ())}
        for case in expand(axes, "cuda")
    ]
    keys: dict[str, set[tuple[object, ...]]] = {"layer": set(), "recurrent": set()}
    for case in cases:
        if case.workload in keys and case.seq_len in (512, 2048):
            keys[case.workload].add((case.model_width, case.dtype, case.pass_))
    assert {dtype for _, dtype, _ in keys["recurrent"]} == {"float16"}
    assert len(keys["recurrent"]) == 2
    assert keys["recurrent"] <= keys["layer"]
