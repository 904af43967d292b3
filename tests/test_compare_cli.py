"""`attnbench compare` as it is called: outputs, exit codes, and what it refuses."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from attnbench.cli.commands import main
from attnbench.gate.decide.stored import NAME as GATE
from tests.test_compare import run


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for n in range(6):
        run(tmp_path, f"old{n}", f"2026-11-20T{n:02}:00:00+00:00", seed=100 + n)
    run(tmp_path, "before", seed=1, memory_workspace_bytes=1 << 20, kernel="a; b")
    own = {("sdpa", 512): 1.4, ("sdpa", 1024): 1.35}
    run(
        tmp_path, "after", "2026-11-22", seed=2, own=own, memory_workspace_bytes=2 << 20,
        kernel="a; c", environment={"torch": "2.11.0"}, info={"commit": "abc1234", "dirty": False},
    )  # fmt: skip
    return lambda *words: CliRunner().invoke(main, ["compare", *words, "--output", str(tmp_path)])


def test_it_fails_for_a_slower_cell_only_where_it_is_asked_to(invoke):
    assert invoke("before", "after", "--fail-slower").exit_code == 1
    assert invoke("after", "before", "--fail-slower").exit_code == 0  # faster is no failure
    assert invoke("before", "old1", "--fail-slower").exit_code == 0


def test_json_has_every_cell_and_so_have_page_and_markdown(invoke, tmp_path):
    found = json.loads(invoke("before", "after", "old1", "--json").output)
    assert (found["kind"], found["schema"], found["exit_code"]) == ("attnbench compare", 1, 0)
    after, old1 = found["sections"]
    assert (after["section"][:6], old1["section"][:5]) == ("after:", "old1:")
    [rows] = [of["parts"][0]["table"] for of in after["parts"] if "All cells" in str(of)[:30]]
    slower = [row for row in rows if row["verdict"]["verdict"] == "slower"]
    assert [row["impl"] for row in slower] == ["sdpa", "sdpa"]
    for row in slower:
        change = row["change"]
        assert change["unit"] == "ratio"
        assert 1 < change["low"] < change["value"] < change["high"] < 2
    assert "6 earlier runs" in str(after)
    assert "at abc1234" in str(after)
    assert invoke("before", "after", "old1", "--name", "kept").exit_code == 0
    folder = tmp_path / "kept"
    markdown, page = (folder / "compare.md").read_text(), (folder / "compare.html").read_text()
    for text in (markdown, page):
        assert "attnbench profile sdpa --seq-lens 512" in text
        assert "All cells (20)" in text
        assert "--python torch-2.13.0+cpu/bin/python --python torch-2.11.0/bin/python --i" in text
    assert "http" not in page
    again = invoke("before", "after", "--name", "kept")
    assert again.exit_code == 2
    assert "exists" in again.output
    assert (folder / "compare.html").read_text() == page


def test_bad_input_is_one_line_with_exit_code_2_and_nothing_is_written(invoke, tmp_path):
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / GATE).write_text("{}")
    run(tmp_path, "old-schema", info={"schema": 1})
    before = sorted(tmp_path.rglob("*"))
    for words, expected in (
        ((), "two or more"),
        (("before",), "two or more"),
        (("before", "nix"), "no run 'nix'"),
        (("before", "g"), "attnbench gate --replay"),
        (("before", "old-schema"), "schema 1"),
        (("before", str(tmp_path / "none.json")), "cannot be read"),
    ):
        found = invoke(*words, "--name", "new")
        assert found.exit_code == 2, words
        assert expected in " ".join(found.output.split())
        assert "Traceback" not in found.output
    assert sorted(tmp_path.rglob("*")) == before
