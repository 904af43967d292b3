"""gate.json: what is written is what is read, and what cannot be is refused in one line."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from attnbench.errors import StoreError
from attnbench.gate.decide.stored import NAME, find_gate, load_gate, write_gate
from attnbench.gate.decide.verdict import decide
from tests import gate_runs

KINDS = gate_runs.the_kinds()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    run = KINDS["broken"]
    return write_gate(tmp_path / "g", run, decide(run))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_survives_its_file_and_is_decided_alike(kind, tmp_path):
    run = KINDS[kind]
    file = write_gate(tmp_path, run, decide(run))
    again = load_gate(file)
    assert again == run
    assert decide(again) == decide(run)


def test_a_round_a_cell_and_a_verdict_stand_on_a_line_of_their_own(written):
    lines = written.read_text().splitlines()
    run = KINDS["broken"]
    assert sum(line.startswith('{"stage":') for line in lines) == len(run.rounds)
    assert sum(line.startswith('{"case":') for line in lines) == len(run.cells)
    assert sum(line.startswith('{"cell":') for line in lines) == len(run.cells)


def test_verdicts_are_written_for_readers_and_never_trusted(written):
    row = json.loads(written.read_text())
    assert row["decided"]["exit_code"] == 1
    row["decided"] = {"exit_code": 0, "words": "all is well"}
    written.write_text(json.dumps(row))
    assert decide(load_gate(written)).exit_code == 1


def test_a_run_is_found_by_file_folder_name_and_as_the_latest(tmp_path):
    old, new = KINDS["clean"], replace(KINDS["clean"], created="2026-12-01T00:00:00+00:00")
    files = {name: write_gate(tmp_path / name, run, decide(run))
             for name, run in (("b-new", new), ("c-old", old))}  # fmt: skip
    assert find_gate(str(files["c-old"]), Path("elsewhere")) == files["c-old"]
    assert find_gate(str(files["c-old"].parent), Path("elsewhere")) == files["c-old"]
    assert find_gate("c-old", tmp_path) == files["c-old"]
    assert find_gate("latest", tmp_path) == files["b-new"]
    assert load_gate(Path("b-new"), tmp_path).created.startswith("2026-12")
    with pytest.raises(StoreError, match="did you mean 'b-new'"):
        find_gate("b-neww", tmp_path)


def test_a_file_of_any_name_can_be_written_and_read(tmp_path):
    run = KINDS["nothing"]
    assert write_gate(tmp_path / "a" / "mine.json", run, decide(run)).name == "mine.json"
    assert load_gate(tmp_path / "a" / "mine.json") == run


@pytest.mark.parametrize("name", ["nowhere", "x" * 5000, "a\0b", "empty"])
def test_what_is_no_run_is_one_line(name, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError) as refused:
        load_gate(Path(name), tmp_path)
    assert "\n" not in str(refused.value)
    assert "gate" in str(refused.value)


def test_what_is_not_finite_is_written_as_unknown_and_other_things_as_text(tmp_path):
    run = replace(KINDS["nothing"], environment={"load": float("nan"), "at": Path("x")})
    again = load_gate(write_gate(tmp_path, run, decide(run)))
    assert again.environment == {"load": None, "at": "x"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no JSON"),
        (b'{"kind": "attnbench gate", "sch', "cut off"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "not written by attnbench gate"),
        (b'{"benchmarks": []}', "not written by attnbench gate"),
        (b'{"kind": "attnbench gate", "schema": 2}', "has schema 2; this version reads 1"),
        (b'{"kind": "attnbench gate", "schema": true}', "has schema True"),
        (b'{"kind": "attnbench gate", "schema": 1}', "it has no cells"),
        (b'{"kind": "attnbench gate", "schema": 1, "x": NaN}', "NaN is no number"),
    ],
)
def test_a_file_that_is_cut_foreign_or_newer_names_itself_and_why(content, says, tmp_path):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(StoreError) as refused:
        load_gate(tmp_path)
    assert str(tmp_path / NAME) in str(refused.value)
    assert says in str(refused.value)


def _first_turns(row):
    return row["rounds"][0]["turns"]["3"]


DAMAGE = {
    "a time below 0": (lambda row: _first_turns(row)["base"][0].__setitem__(0, -5), "took [-5] ns"),
    "a time of 0": (lambda row: _first_turns(row)["base"][0].__setitem__(0, 0), "took [0] ns"),
    "true as a time": (lambda row: _first_turns(row)["base"][0].__setitem__(0, True), "[True]"),
    "a text as a time": (lambda row: _first_turns(row)["base"][0].__setitem__(0, "7"), "['7']"),
    "a broken time": (lambda row: _first_turns(row)["base"][0].__setitem__(0, 1.5), "[1.5]"),
    "a time beyond all": (lambda row: _first_turns(row)["base"][0].__setitem__(0, 10**30), "ns"),
    "no blocks": (lambda row: _first_turns(row).__setitem__("base", [[]]), "no blocks"),
    "no turns": (lambda row: _first_turns(row).__setitem__("base", []), "no turns"),
    "an arm of ours": (lambda row: _first_turns(row).__setitem__("b", [[1]]), "unknown arm 'b'"),
    "a ninth cell": (lambda row: row["rounds"][0]["turns"].update({"8": {}}), "no cell '8'"),
    "a cell below 0": (lambda row: row["rounds"][0]["turns"].update({"-1": {}}), "no cell '-1'"),
    "a cell twice": (lambda row: row["rounds"][0]["turns"].update({"03": {}}), "no cell '03'"),
    "a stage": (lambda row: row["rounds"][1].update(stage="end"), "round 2: unknown stage"),
    "a veto": (lambda row: row["rounds"][1].update(veto=True), "veto"),
    "spent": (lambda row: row["rounds"][1].update(spent_s=-1), "spent_s"),
    "no failures": (lambda row: row["rounds"][1].pop("failures"), "it lacks 'failures'"),
    "a round": (lambda row: row["rounds"].append(None), "round"),
    "rounds": (lambda row: row.update(rounds={}), "rounds is dict, not list"),
    "a cell": (lambda row: row["cells"][0]["case"].update(seq_len=-1), "cell 0"),
    "an implementation": (lambda row: row["cells"][0].update(impl=3), "implementation"),
    "a threshold": (lambda row: row["rules"].update(threshold=-1), "threshold"),
    "a level": (lambda row: row["rules"].update(alpha=2), "alpha"),
    "looks": (lambda row: row["rules"].update(looks=[8, 4]), "looks"),
    "no looks": (lambda row: row["rules"].update(looks=[]), "looks"),
    "a rule": (lambda row: row["rules"].update(luck=1), "luck"),
    "a side": (lambda row: row["base"].update(name="candidate"), "base: its name"),
    "dirt": (lambda row: row["base"].update(dirty=1), "dirty"),
    "no checks": (lambda row: row["checks"].pop("0"), "cell 0 has none"),
    "a status": (lambda row: row["checks"]["0"]["base"].update(status="fine"), "status"),
    "bytes": (
        lambda row: row["checks"]["2"]["base"]["metrics"].update(memory_workspace_bytes=-1),
        "memory_workspace_bytes",
    ),
    "a seed": (lambda row: row["options"].update(seed="x"), "seed"),
    "a budget": (lambda row: row["spent"].update(checks_s=-3), "checks_s"),
    "two slowed cells": (
        lambda row: [arms.update(planted=[[9]]) for arms in row["rounds"][0]["turns"].values()],
        "cells are slowed",
    ),
    "a slowed cell alone": (
        lambda row: row["rounds"].append(
            {**row["rounds"][0], "turns": {"3": {"planted": [[9]]}}}
        ),
        "without its base",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE)
def test_numbers_and_names_that_cannot_be_are_refused_by_their_place(damage, says, written):
    row = json.loads(written.read_text())
    damage(row)
    written.write_text(json.dumps(row))
    with pytest.raises(StoreError) as refused:
        load_gate(written)
    assert f"{written} is damaged: " in str(refused.value)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_full_disk_leaves_no_half_file_and_the_old_one_as_it_was(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = written.read_text()
    monkeypatch.setattr(os, "fsync", fsync)
    run = KINDS["clean"]
    with pytest.raises(StoreError, match=f"cannot write {written} .No space left"):
        write_gate(written.parent, run, decide(run))
    assert [path.name for path in written.parent.iterdir()] == [NAME]
    assert written.read_text() == before


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    run = KINDS["nothing"]
    with pytest.raises(StoreError, match="cannot write"):
        write_gate(tmp_path / "file" / "g", run, decide(run))
