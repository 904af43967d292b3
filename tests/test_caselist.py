"""Case lists: each row is one case and how often it is called, whatever it is written in."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import attnbench
from attnbench.analysis.notes import remedy
from attnbench.cli.commands import main
from attnbench.errors import AttnbenchError
from attnbench.planning.models import asked_sweeps
from attnbench.planning.plan import expand, groups_of
from attnbench.report.documents.sweep import document
from attnbench.schema.record import Cell
from attnbench.store.folder import SWEEP, RunFolder
from attnbench.store.runs import load_run
from attnbench.theory import costs
from attnbench.theory.traits import case_label

ROWS: list[dict[str, Any]] = [
    {"B": 2, "H": 8, "G": 2, "L": 1, "S": 1000, "D": 64, "mask": "causal", "count": 32},
    {"workload": "decode", "n": 64, "cache": "int8", "scale": 0.5},
]
LABELS = [
    "32 attention forward n=1 S=1000 B=2 H=8 G=2 D=64 float32 causal",
    "1 decode forward n=64 B=1 H=4 D=64 float32 causal scale=0.5 int8",
]


def read(**given) -> list[str]:
    sweeps, _ = asked_sweeps((), given.pop("axes", {}), **given)
    return [f"{x.count} {case_label(case)}" for x in sweeps for case in expand(x, "cpu")]


def test_text_csv_and_json_say_the_same(tmp_path):
    texts = [",".join(f"{key}={value}" for key, value in row.items()) for row in ROWS]
    assert read(case=texts) == LABELS
    keys = list(dict.fromkeys(key for row in ROWS for key in row))
    lines: list[list[Any]] = [keys, *([row.get(key, "") for key in keys] for row in ROWS)]
    table, objects = tmp_path / "cases.csv", tmp_path / "cases.json"
    table.write_text("\ufeff" + "\n".join(",".join(map(str, line)) for line in lines))
    objects.write_text(json.dumps([ROWS[0] | {"scale": None}, ROWS[1]]))
    assert read(cases=table) == read(cases=objects) == LABELS
    assert read(case=texts[:1], cases=objects) == [LABELS[0], *LABELS]


def test_flags_hold_in_place_of_what_cases_say():
    found = read(case=["L=64,dtype=float16", "n=32"], axes={"dtypes": ("bfloat16",)})
    assert found == [f"1 attention forward n={n} B=1 H=4 D=64 bfloat16" for n in (64, 32)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.csv", "B,L\n2,3,4\n", "unknown key 'more than keys'"),
        ("x.csv", "B,L\n2,3\n2,x\n", r"x.csv \(--cases\), case 2: L takes whole numbers"),
        ("x.csv", "B,L\n", "holds no cases"),
        ("x.csv", "B,M\n2,3\n", r"unknown key 'M' \(.*case 1\)"),
        ("x.json", "{}", "an object, not a list of cases"),
        ("x.json", "[1]", "not a table or a list of objects"),
        ("x.json", '[{"L": true}]', "L takes whole numbers"),
        ("x.json", '[{"L": 1.5}]', "L takes whole numbers"),
        ("x.csv", "B,L,B\n2,3,4\n", "case 1: B is given twice"),
        ("x.json", '[{"L": 8, "L": 9}]', "case 1: L is given twice"),
        ("x.csv", "L,mask\n3,\n4,windw:3\n", "case 2: unknown mask 'windw'"),
        ("x.csv", "B;L;count\n2;3;4\n", r"x.csv \(--cases\) .* separator must be a comma"),
        ("x.csv", "H,lengths\n2,5+0\n", r"case 1: lengths takes whole numbers joined by \+, 1 or"),
        ("x.csv", "lengths\n5+x\n", "case 1: lengths takes whole numbers"),
        (
            "x.json",
            '[{"lengths": "5+6", "L": 6}]',
            "lengths takes .* in place of B, L, n, S",
        ),
        ("x.csv", "lengths,mask\n5+6,window:3\n", "lengths takes .* mask full or causal"),
        ("x.csv", "lengths,workload\n5+6,decode\n", "lengths takes .* workload attention"),
        ("x.json", '[{"count": 0}]', "case 1: count takes whole numbers"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_case(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(AttnbenchError, match=says):
        read(cases=tmp_path / name)


@pytest.mark.parametrize("mask", ["", "causal"])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_ragged_batch_is_the_same_work_padded_and_packed(mask, pass_):
    text = f"lengths=9+2+5,H=4,G=2,D=8,pass={pass_},count=3"
    sweeps, _ = asked_sweeps((), {}, case=[f"{text},mask={mask}" if mask else text, "L=64"])
    (padded, packed), alone = ([next(expand(x, "cpu")) for x in sweeps[i::2]] for i in (0, 1))
    assert (padded.batch, padded.seq_len, packed.batch, packed.seq_len) == (3, 9, 1, 16)
    cells = [Cell(case=case, impl="sdpa") for case in (padded, *alone, packed)]
    assert [[case for case, _ in group] for group in groups_of(cells)] == [
        [padded, packed],
        alone[:1],
    ]
    assert alone[0] == alone[1]
    pairs = sum(n * (n + 1) // 2 if mask else n * n for n in (9, 2, 5))
    work = 2 * 4 * pairs * {"forward": 2, "backward": 5}[pass_] * 8
    assert costs.attention_flops_useful(padded) == costs.attention_flops_useful(packed) == work


def test_axes_that_lengths_decide_hold_in_place_of_no_lengths():
    assert len(read(case=["lengths=5+6"], axes={"heads": (2, 8)})) == 4
    with pytest.raises(AttnbenchError, match="--batch-sizes does not go with a case that has le"):
        read(case=["lengths=5+6"], axes={"batch_sizes": (2,)})


@pytest.mark.usefixtures("imagined_worker")
def test_padded_and_packed_are_two_ways_to_make_a_call_and_are_held_against_each_other(
    cli, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    cases = ["lengths=64+8,count=2", "L=32,count=3"]
    frame = attnbench.sweep(case=cases, impls=("naive", "sdpa"))
    run = load_run(RunFolder.find("latest", Path("results"), SWEEP).path)
    time_us = {(n, impl): us for n, impl, us in frame[["seq_len", "impl", "time_us"]].values}
    found: dict[str, Any] = {section.title: section.parts for section in document(run).sections}
    spent = {(row[0], row[1].number): row[3].number for row in found["What a step spends"][0].rows}
    for way, n in (("padded", 64), ("packed", 72)):
        total = 2 * time_us[n, "sdpa"] + 3 * time_us[32, "sdpa"]
        assert spent[f"5 × call {way}", "sdpa"] == pytest.approx(total)
    rows = {row[1].number: row for row in found["Padded or packed"][0].rows}
    assert rows.keys() == {"naive", "sdpa"}
    title, _, padded, packed, ratio = rows["sdpa"]
    assert title == "64+8"
    shown = cli("sweep", "--impls", "sdpa", *(f"--case={case}" for case in cases), "--dry-run")
    steps = " ".join(shown.stdout.split())
    for way, n in (("padded", 64), ("packed", 72)):
        assert re.search(rf"call {way}: 2 × attention forward n={n} [^,]*, 3 × [^,]* n=32 ", steps)
    assert (padded.number, packed.number) == (time_us[64, "sdpa"], time_us[72, "sdpa"])
    assert ratio.low <= ratio.number <= ratio.high


@pytest.mark.usefixtures("imagined_worker")
def test_a_step_is_the_sum_of_its_calls_by_their_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cases = ["L=64,count=3", "L=128", "L=128,count=4"]
    frame = attnbench.sweep(case=cases, batch_sizes=(1, 2), impls=("naive", "sdpa"))
    run = load_run(RunFolder.find("latest", Path("results"), SWEEP).path)

    def shown(run):
        section: Any = next(s for s in document(run).sections if "spends" in s.title)
        return {(row[0], row[1].number): row[2:] for row in section.parts[0].rows}

    words = shlex.split(remedy(run, frame).partition("attnbench sweep ")[2])
    typed = main.commands["sweep"].make_context("sweep", words).params
    assert (typed["case"], typed["batch_sizes"]) == (tuple(cases), (1, 2))
    assert "--seq-lens" not in words
    found = shown(run)
    assert {(title, row[0].number) for (title, _), row in found.items()} == {
        (f"{count} × call B={batch}{text}", count)
        for batch in (1, 2)
        for text, count in ((f", B={batch} n=64", 3), (f", B={batch} n=128", 5), ("", 8))
    }
    assert list(frame["count"].unique()) == [3, 5]
    own = frame[(frame["impl"] == "sdpa") & (frame["batch"] == 2)].set_index("seq_len")
    _, time, speed = found["8 × call B=2", "sdpa"]
    weights = own["time_us"] * pd.Series({64: 3, 128: 5})
    assert time.number == pytest.approx(weights.sum())
    assert time.low <= time.number <= time.high
    assert speed.number == pytest.approx((own["speedup"] * weights).sum() / weights.sum())
    last = next(r for r in run.records if r.cell.case.batch == 2 and r.cell.impl == "sdpa")
    failed = replace(last, status="oom", reason="out of memory", samples=())
    records = [failed if record is last else record for record in run.records]
    found = shown(replace(run, records=records))
    assert found["8 × call B=2", "sdpa"][1].number is None
    assert found["8 × call B=2", "naive"][1].number is not None
