"""`attnbench history`: what it prints, writes and refuses."""

import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from attnbench.analysis.history import entries
from attnbench.base.git import commit_of
from attnbench.base.jsontext import encode
from attnbench.cli.commands import main
from tests.test_history import made, noise, quiet, stepped, stored


def history(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["history", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def kept(tmp_path):
    logs = quiet(40, cells=6)
    logs["impl-0"] = stepped(logs["impl-0"], 20, 0.2)
    logs["impl-1"] = stepped(logs["impl-1"], 30, -0.1)
    logs["impl-2"] = stepped(noise(40, 9), 38, 0.3)
    runs = made(logs, environments={i: {"torch": "2.14.0"} for i in range(30, 40)})
    runs = [msgspec.structs.replace(run, commit=f"{i:08x}") for i, run in enumerate(runs)]
    text = "".join(encode(run).decode() + "\n" for run in runs)
    (tmp_path / entries.FILE).write_text(text)
    return tmp_path


def test_the_terminal_names_what_changed_most_first_in_80_columns(kept):
    lines = history(kept).splitlines()
    assert max(len(line) for line in lines if str(kept) not in line) <= 80  # paths are whole
    said = "\n".join(lines)
    order = ["impl-0", "✗ regression", "2026-01-21 0000001", "Suspicious", "impl-2", "impl-1"]
    assert [said.index(text) for text in order] == sorted(said.index(text) for text in order)
    assert "torch: 2.13.0 → 2.14.0" in said
    assert re.search(r"impl-2 +few runs +2026-02-08 \S+ +\+3.\.. % +38\|2", said)
    assert "environment 1 " in said
    assert "A dot is a run" not in said
    assert f"page:   attnbench history {kept} --write" in said
    assert "1 regression, 2 suspicious, 3 no change" in said


def test_a_run_is_added_and_not_twice(tmp_path):
    run, folder = stored(tmp_path), tmp_path / "kept"
    assert "added to" in history(folder, "--add", run)
    assert "is already in" in history(folder, "--add", "first", "--output", tmp_path)
    assert len((folder / entries.FILE).read_text().splitlines()) == 1
    assert not (folder / "history.html").exists()
    said = " ".join(history(folder).split())
    assert "2 insufficient data: a cell needs 12 runs on one machine" in said
    assert not (folder / "history.html").exists()
    assert "history.html" in history(folder, "--write")
    assert (folder / "history.md").is_file()
    assert "A dot is a run" in (folder / "history.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((), "no run in"), (("--add", "nowhere"), "no run 'nowhere'"), (("--least", "x"), "--least")],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(tmp_path, arguments, says):
    folder = tmp_path / "none"
    output = history(folder, *arguments, code=2)
    assert says in " ".join(output.split())
    assert not folder.exists()


def git(folder, *arguments):
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_commit_of_a_folder_is_recorded_and_whether_its_files_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    unknown = {"commit": None, "dirty": None}
    assert commit_of(tmp_path) == unknown
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) == unknown  # no commit yet
    file = tmp_path / "kernel.py"
    file.write_text("1")
    git(tmp_path, "add", "kernel.py")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "v1")
    clean = commit_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", clean["commit"])
    assert clean["dirty"] is False
    file.write_text("2")
    assert commit_of(tmp_path) == clean | {"dirty": True}
    monkeypatch.setenv("PATH", str(Path(tmp_path) / "no-git-here"))
    assert commit_of(tmp_path) == unknown
