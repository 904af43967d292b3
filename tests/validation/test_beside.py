"""Counting how often times beside neighbours are those of quiet runs; and the neighbours end."""

import json

import psutil
from click.testing import CliRunner

from tests.validation.__main__ import main
from tests.validation.beside import session
from tests.validation.beside.summary import summarise
from tests.validation.neighbours import neighbours


def row(count, naive_us, sdpa_us, ratio, interval=(0.9, 3.0), unsteady=None):
    ends = lambda us: [0.9 * us, 1.1 * us]  # noqa: E731
    return {
        "neighbours": count,
        "wall_s": 10.0,
        "cells": [
            [128, "naive", naive_us, ends(naive_us), unsteady, 0.5, 0.2],
            [128, "sdpa", sdpa_us, ends(sdpa_us), None, 0.5, 0.2],
        ],
        "pairs": [
            [128, "naive", "sdpa", ratio, list(interval)],
            [128, "sdpa", "sdpa-twin", 1.0, [0.98, 1.03]],
        ],
    }


def test_shares_are_counted_against_the_quiet_runs():
    quiet = [row(0, 200.0, 100.0, 2.0), row(0, 200.0, 100.0, 2.0), row(0, 202.0, 98.0, 2.1)]
    beside = [
        row(2, 204.0, 100.0, 2.0, (1.9, 2.1), unsteady="busy-machine"),
        row(2, 300.0, 111.0, 0.8, (0.7, 0.9)),
    ]
    alone, two = summarise(quiet + beside)["conditions"]
    assert (alone["runs"], alone["within_5"], alone["contained"]) == (3, 1.0, 1.0)
    assert (two["within_5"], two["within_25"], two["worst"]) == (0.5, 0.75, 0.5)
    assert (two["contained"], two["unsteady"]) == (0.75, 0.25)
    assert (two["ranked"], two["wrong"], two["ties"]) == (0.5, 0.5, 1.0)
    assert alone["ranked"] == 0.0, "an interval that holds 1 ranks nothing"


def test_what_is_missing_is_run_and_what_is_there_is_kept(tmp_path, monkeypatch):
    asked = []

    def run(request, count, seed):
        asked.append(count)
        return row(count, 200.0, 100.0, 2.0)

    monkeypatch.setattr(session, "_run", run)
    call = ["timer", "--runs", "2", "--output", str(tmp_path), "--name", "a"]
    result = CliRunner().invoke(main, call)
    assert result.exit_code == 0, result.output
    assert sorted(asked) == [0, 0, 1, 1, 2, 2]
    call[2] = "3"
    assert CliRunner().invoke(main, call).exit_code == 0
    assert sorted(asked[6:]) == [0, 1, 2]
    summary = json.loads((tmp_path / "a" / session.SUMMARY).read_text())
    assert [found["runs"] for found in summary["conditions"]] == [3, 3, 3]
    assert "## Alone and beside neighbours" in (tmp_path / "a" / session.PAGE).read_text()
    refused = CliRunner().invoke(main, [*call, "--seq-lens", "64"])
    assert refused.exit_code == 2
    assert "choose another --name" in refused.output


def test_neighbours_end_with_the_measurement():
    before = set(psutil.Process().children())
    with neighbours(2):
        mine = set(psutil.Process().children()) - before
        assert len(mine) == 2
    assert not any(process.is_running() for process in mine)
