"""What `attnbench gate` refuses: one line with the flag, before anything is measured or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import repositories
from tests.conftest import Cli, Refused
from tests.repositories import commit, kernel, worktrees


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits on `main`, in which the command runs and may not measure."""

    def measured(*_: Any) -> Any:
        raise AssertionError("it was measured")

    made = repositories.new(tmp_path.resolve() / "repo")
    (made / "pyproject.toml").write_text("[tool.attnbench.gate]\nfiles = 'a.py'\n")
    commit(made, a="old = 1")
    commit(made, a=kernel())
    monkeypatch.chdir(made)
    monkeypatch.setattr("attnbench.gate.run.measuring.run_gate", measured)
    monkeypatch.setattr("attnbench.gate.run.watched.device_of", lambda asked: "cpu")
    return made


WRONG: dict[str, tuple[str, list[str]]] = {
    "a ref that does not exist": ("--base gone", ["no commit 'gone'", "--base", "git branch -a"]),
    "a misspelt ref": ("--base mian", ["did you mean 'main'"]),
    "a ref of nothing": ("--base=", ["no commit ''", "--base"]),
    "a file that is not there": ("--impl gone.py", ["gone.py", "--impl"]),
    "a file outside": ("--impl /etc/hostname", ["outside the repository", "--impl"]),
    "no share": ("--threshold ten", ["--threshold", "10%"]),
    "a share of nothing": ("--threshold 0", ["--threshold", "from 0.1% to 100%"]),
    "a share beyond all": ("--threshold 10", ["--threshold", "from 0.1% to 100%"]),
    "negative growth": ("--growth=-1%", ["--growth"]),
    "no time": ("--budget soon", ["--budget", "5m"]),
    "too little time": ("--budget 0.1s", ["--budget", "at least 1 s"]),
    "no threads": ("--threads 0", ["--threads"]),
    "an unknown device": ("--device tpu", ["--device", "cuda"]),
    "no patience": ("--timeout 0", ["--timeout"]),
    "an unknown workload": ("--workload decoder", ["--workload", "'decode'?"]),
    "no size": ("--seq-lens x", ["--seq-lens"]),
    "a name that climbs": ("--name ..", ["--name"]),
    "a result beside a file": ("--output a.py", ["a.py", "--output"]),
    "a replay of nothing": ("--replay gone.json", ["gone.json"]),
    "a replay of no text": ("--replay=", ["gate"]),
    "a replay of another commit": ("--replay r --base x", ["--replay", "stored", "remove --base"]),
    "a replay with another promise": ("--replay r --threshold 5%", ["remove --threshold"]),
}


@pytest.mark.parametrize(("args", "says"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    cli: Cli, assert_refused: Refused, root: Path, args: str, says: list[str]
) -> None:
    result = cli("gate", "--quiet", *args.split())
    assert_refused(result, *says)
    assert not (root / "results").exists()
    assert worktrees(root) == 0


def test_a_name_that_is_taken_is_noticed_first(
    cli: Cli, assert_refused: Refused, root: Path
) -> None:
    (root / "results" / "r").mkdir(parents=True)
    assert_refused(cli("gate", "--name", "r", "--quiet"), "'r' exists in results", "--name")
