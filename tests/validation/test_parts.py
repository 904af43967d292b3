"""Each part in its shortest real form, as its user starts it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from attnbench.api import IMPLEMENTATIONS
from attnbench.api.loader import load_built_in
from attnbench.gate.run import measuring
from tests.conftest import Cli, yielding
from tests.gate_runs import CELLS, a_run
from tests.synthetic import write_run
from tests.test_compare import cells, run
from tests.validation import costs
from tests.validation.__main__ import main


@pytest.fixture
def cli(tmp_path) -> Cli:
    """`cli("laws", "--draws", 8)` runs `python -m tests.validation` in this process."""

    def call(part: str, *args: object) -> Any:
        kept = () if part in ("costs", "steps", "shares") else ("--output", tmp_path, "--name", "a")
        return CliRunner().invoke(main, [part, *map(str, (*args, *kept))])

    return call


def imagined(slower: dict[int, float], request: Any) -> Any:
    """What `run_gate` would return of cells with a noise of 1 %."""
    chosen = [cell for cell in CELLS if cell.case.seq_len in request.sweeps[0].values["seq_lens"]]
    injected = dict(request.injected) | slower
    run = a_run(injected, rules=request.rules, seed=request.settings.seed, cells=chosen)
    return yielding(run)


def test_gate_goes_on_and_counts_false_alarms_and_detections(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "run_gate", partial(imagined, {}))
    small = ("gate", "--seq-lens", "128,1024", "--inject", "10", "--each", 2)
    ended = cli(*small, "--aa", 2)
    assert ended.exit_code == 0, ended.output
    rows = (tmp_path / "a" / "runs.jsonl").read_text().splitlines()
    assert len(rows) == 1 + 2 + 2
    aa, planted = json.loads((tmp_path / "a" / "summary.json").read_text())["kinds"]
    assert (aa["runs"], aa["false_alarms"], planted["runs"], planted["found"]) == (2, 0, 2, 2)
    assert "2 of 2: 100 %" in ended.stdout
    # A cell that is slower in runs of identical sides is a false alarm, and the goal is missed.
    monkeypatch.setattr(measuring, "run_gate", partial(imagined, {1: 0.2}))
    ended = cli(*small, "--aa", 3)
    assert ended.exit_code == 1
    assert "1 of 3" in ended.stdout
    assert "MISSED" in ended.stdout


def test_laws_judge_imagined_kernels_and_those_that_are_measured(cli, tmp_path):
    ended = cli("laws", "--draws", 2, "--runs", 0)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (
        sum(total["asked"] for total in summary["imagined"]["totals"]) == 2 * 571
    )  # 309 of long ranges and 262 as sweeps leave them
    wrong = {total["kind"]: 0 for total in summary["imagined"]["totals"]}
    for total in summary["imagined"]["totals"]:
        wrong[total["kind"]] += total["wrong"]
    # Of a short sweep n² + 350 n is refuted as n² in one of seven: its end grows as n^1.80.
    assert wrong.pop("card") <= 1
    assert set(wrong.values()) == {0}
    assert "four octaves above the floor" in ended.stdout


def test_forecasts_hold_a_sweep_against_what_it_said(cli, tmp_path, monkeypatch):
    from tests.validation import forecasts

    options = "--seq-lens 16 --heads 2 --impls naive --min-time 0.001 --max-time 0.01"
    monkeypatch.setattr(forecasts, "BEFORE", ())
    monkeypatch.setattr(forecasts, "drawn", lambda seed: options)
    ended = cli("forecasts", "--sweeps", 1)
    row = json.loads((tmp_path / "a" / "runs.jsonl").read_text().splitlines()[1])
    assert row["exit"] == 0
    assert all(low < seconds < high for seconds, low, high in (row["used"], row["empty"]))
    assert all(len(row["errors"][stage]) == 2 for stage in ("call", "reference", "samples"))
    assert "of 1 within 2" in ended.stdout


def test_kernels_take_what_their_name_says():
    """By a clock that is moved on with every look at it."""
    from tests.validation.laws import kernels
    from tests.validation.laws.live import NAMES

    now = [0.0]

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    try:
        for power in (1, 2, 3):
            took = []
            for n in (128, 256):
                q_BHLD, begin = torch.zeros(1, 1, n, 8), now[0]
                kernels._kernel(power, clock)(q_BHLD, q_BHLD, q_BHLD, causal=False, scale=1.0)
                took.append(now[0] - begin - kernels.OVERHEAD_S)
            assert took[1] / took[0] == pytest.approx(2**power, rel=0.05)
    finally:
        for name in (*NAMES, *kernels.LIARS):
            IMPLEMENTATIONS.remove(name)


def test_a_sweep_ends_well_on_a_clock_that_stands_still(cli):
    ended = cli("sweeps", "--runs", 0, "--faulty", 1)
    assert ended.exit_code == 0, ended.output
    assert "cpu:standstill" in ended.stdout
    refused = cli("sweeps", "--seed", 1)
    assert refused.exit_code == 2
    assert "choose another --name" in refused.output


def write_series(folder, planted=1.35):
    """Six runs of each code; in `mine-0.3` half of the groups have a cell that is slower."""
    for n in range(6):
        created = f"2026-11-20T{n:02}:00:00+00:00"
        run(folder, f"quick-{n}", created, seed=50 + n, noise=0.005, load_1m=0.5)
        for code, factor in (("mine-0", 1.0), ("mine-0.3", planted)):
            own = {("naive-heads", 512): factor, ("naive-heads", 2048): factor}
            records = [
                replace(r, cell=replace(r.cell, impl="mine")) if r.cell.impl == "naive-heads" else r
                for r in cells(seed=100 * len(code) + n, noise=0.005, own=own, load_1m=0.5)
                if r.cell.impl != "naive-heads" or r.cell.case.seq_len in (512, 2048)
            ]
            write_run(folder, f"{code}-{n}", records, {"created": created})


def test_compare_counts_again_from_what_it_kept(cli, tmp_path):
    write_series(tmp_path / "runs")
    cli("compare", "--runs", tmp_path / "runs")
    text = (tmp_path / "a" / "summary.json").read_text()
    known = json.loads(text)
    assert known["runs"] == {"mine-0": 6, "mine-0.3": 6, "quick": 6}
    disjoint = known["pairs"]["quick: disjoint pairs"]
    assert (disjoint["pairs"], disjoint["named"]) == (3, disjoint["planted"])
    whole = known["pairs"]["mine-0: all pairs"]
    assert (whole["impls_called"], whole["named_1.5"]) == (0, whole["planted_whole"])
    real = known["pairs"]["mine-0 against mine-0.3, really slower"]
    assert real["planted"] == real["named"] == 12
    cli("compare")
    assert (tmp_path / "a" / "summary.json").read_text() == text


def test_costs_of_drawn_cells_are_counted_and_a_number_finds_its_cell_again(cli):
    load_built_in()
    found = [costs.drawn(number, 3) for number in range(20)]
    assert found == [costs.drawn(number, 3) for number in range(20)]
    ended = cli("costs", "--cells", 8, "--sweeps", 0)
    assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize(("odd", "said"), [
    ({}, None),
    ({"flops_counted": 9}, "9 FLOPs, by its formula 8"),
    ({"flops_counted": 9, "flops_counted_source": "formula"}, None),
    ({"memory_workspace_bytes": 129}, "129 bytes, predicted 64"),
    ({"memory_workspace_bytes": 65, "memory_predicted_bytes": None}, None),
    ({"memory_workspace_bytes": 10**6, "memory_predicted_bytes": None}, "at most 64"),
])  # fmt: skip
def test_costs_that_contradict_the_sizes_are_said(odd, said):
    metrics = {
        "flops_counted": 8, "flops_executed": 8, "flops_counted_source": "dispatched",
        "memory_workspace_bytes": 64, "memory_predicted_bytes": 64, "memory_bound_bytes": 64,
    } | odd  # fmt: skip
    found = costs.off(metrics)
    assert (found is None) if said is None else (said in str(found))


def test_a_share_is_held_against_a_model_of_transformers(cli, monkeypatch):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    models = {"small": ("Llama", "decode", 32, 2, sizes | {"vocab_size": 1000})}
    monkeypatch.setattr("tests.validation.shares.MODELS", models)
    ended = cli("shares", "--rounds", 1)
    assert ended.exit_code in (0, 1), "whether it is within 15 % hangs on the machine"
    assert "small, bfloat16" in ended.output


def test_a_step_is_timed_beside_its_calls(cli, monkeypatch):
    monkeypatch.setattr("tests.validation.steps.WIDTHS", {512: 64})
    monkeypatch.setattr("tests.validation.steps.CONTEXT", 16)
    ended = cli("steps", "--layers", 1, "--rounds", 1)
    assert ended.exit_code in (0, 1), "whether it is within 15 % hangs on the machine"
    assert "sdpa-grouped, width 512" in ended.output
