"""How runs of the gate across environments are counted."""

from tests.validation.environments import cells_of, runs_of

PLANT = {"256": 1.11, "1024": 1.1}


def run(kind, exit_code, spent_s=60.0, **verdicts):
    cells = {}
    for name in ("naive n=256", "naive n=1024", "sdpa n=256", "sdpa n=1024"):
        verdict = verdicts.get(name.replace(" n=", "_"), "ok")
        ratio = 1.1 if verdict == "regressed" else 1.0
        cells[name] = {
            "verdict": verdict, "rounds": 8, "ratio": ratio, "low": ratio - 0.02,
            "high": None if verdict == "inconclusive" else ratio + 0.02,
        }  # fmt: skip
        if verdict == "inconclusive":
            cells[name]["low"] = None
    return {"kind": kind, "exit_code": exit_code, "spent_s": spent_s, "rounds": 8, "load": 1.0,
            "cells": cells}  # fmt: skip


def test_a_planted_run_that_stays_open_is_not_found_and_an_unslowed_cell_is_an_alarm():
    runs = [
        run("A/A", 0),
        run("A/A", 1, naive_256="regressed"),
        run("planted", 1, sdpa_256="regressed", sdpa_1024="regressed"),
        run("planted", 3, 301.0, sdpa_256="inconclusive"),
        run("planted", 1, sdpa_256="regressed", naive_1024="regressed"),
    ]
    same, planted = runs_of(runs).rows
    assert [text.split(":")[0] for text in same[1:5]] == ["1 of 2", "1 of 2", "0 of 2", "0 of 2"]
    assert same[5:7] == ("–", "1")
    assert [text.split(":")[0] for text in planted[1:5]] == ["2 of 3", "0 of 3", "1 of 3", "0 of 3"]
    assert planted[5:7] == ("3 of 6", "1")
    assert planted[-1] == "1"


def test_an_interval_that_is_unknown_is_not_counted_as_holding_the_truth():
    runs = [run("planted", 3, sdpa_256="inconclusive"), run("planted", 1, sdpa_256="regressed")]
    by_name = {row[0]: row for row in cells_of(runs, PLANT).rows}
    assert by_name["planted sdpa n=256"][2] == "1 of 2"
    assert by_name["planted sdpa n=256"][-1] == "1 of 1"
    assert by_name["planted naive n=256"][-1] == "2 of 2"
