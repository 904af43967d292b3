"""What a gate watches: the table of pyproject.toml, flags before it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnbench.cli.gate import read_table
from attnbench.errors import UsageError
from attnbench.gate.run.watched import Watched, watched
from attnbench.planning.plan import Axes

ALONE = "[tool.attnbench.gate]\nfiles = 'a.py'\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a few files, as the root of a repository."""
    made = tmp_path.resolve() / "repo"
    for name in ("a.py", "kernels/b.py", "kernels/c.py", "kernels/__init__.py", "kernels/x.md"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("")
    (tmp_path / "out.py").write_text("")
    return made


def asked(root: Path, table: str = ALONE, **flags: Any) -> Watched:
    (root / "pyproject.toml").write_text(table)
    return watched(root, root, read_table(root), flags)


def test_every_key_of_the_table_has_its_place(root):
    found = asked(
        root,
        """
        [tool.attnbench.gate]
        files = ["a.py", "kernels/*.py"]
        impls = "one,two"
        workload = "decode"
        seq-lens = "128..512"
        heads = 8
        batch-sizes = [1, 2]
        masks = ["full", "window:64"]
        passes = "forward"
        caches = "static"
        new-tokens = 4
        threshold = "5 %"
        budget = "2m30s"
        growth = "flops=2%,memory=300%"
        threads = 2
        device = "cpu"
        base = "release"
        """,
    )
    axes = Axes(
        workload="decode", seq_lens=(128, 256, 512), heads=(8,), batch_sizes=(1, 2),
        masks=("full", "window:64"), caches=("static",), new_tokens=(4,), passes=("forward",),
        impls=("one", "two"),
    )  # fmt: skip
    assert found == Watched(
        files=("a.py", "kernels/b.py", "kernels/c.py"), sweeps=(axes,), base="release", threads=2,
        device="cpu",
        promises={
            "threshold": 0.05, "budget_s": 150.0, "growth": {"flops": 0.02, "memory": 3.0},
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ((), r"--impl path/in/repo.py.*\[tool.attnbench.gate\]: files"),
        *[((text,), "outside the repository .*--impl") for text in ("../out.py", "/etc/hostname")],
        *[((text,), "no file .*--impl") for text in ("no.py", "kernels", "x" * 300)],
    ],
)
def test_a_file_that_is_elsewhere_or_not_there_is_refused(root, files, says):
    with pytest.raises(UsageError, match=says):
        watched(root, root, {}, {"files": files})


# What is wrong in the table, and what the message must say.
WRONG = {
    "seqlens = 1": ["unknown key 'seqlens'", "'seq-lens'?", "files"],
    "seq-lens = 'x'": ["--seq-lens", "whole numbers"],
    "heads = 0": ["--heads", "at least 1"],
    "threshold = 10": ["--threshold 10 ", "from 0.1% to 100%"],
    "budget = nan": ["--budget"],
    "threads = [1, 2]": ["--threads", "'1,2'"],
    "workload = 'decoder'": ["'decode'?"],
    "sweeps = 3": ["[tool.attnbench.gate]"],
    "[[tool.attnbench.gate.sweeps]]\nthreshold = 1": ["unknown key 'threshold'", "seq-lens"],
    "files = 'gone.py'": ["('files' in pyproject.toml", "no file gone.py"],
    "files = 'gone/*.py'": ["'files' in pyproject.toml", "no Python file", "gone/*.py"],
    "files = '../out.py'": ["outside the repository", "('files' in pyproject.toml"],
    "files = '/*.py'": ["'files'", "'/*.py'"],
    "[tool": ["pyproject.toml"],
    "[[tool.attnbench.gate]]": ["pyproject.toml"],
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_table_is_one_line_that_names_the_option(root, line):
    head = "[tool.attnbench.gate]\n" if line.startswith("files") else ALONE
    with pytest.raises(UsageError) as caught:
        asked(root, line if line.startswith(("[tool", "[[tool.attnbench.gate]]")) else head + line)
    message = str(caught.value)
    assert "\n" not in message
    assert [text for text in WRONG[line] if text not in message] == [], message
