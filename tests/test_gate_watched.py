"""What a gate watches: the table of pyproject.toml, flags before it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnbench.base.units import parse_duration, parse_share
from attnbench.cli.gate import read_table
from attnbench.errors import UsageError
from attnbench.gate.run.watched import Watched, watched
from attnbench.planning.plan import Axes

SMALL = Axes(seq_lens=(128, 256, 512, 1024))
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


def test_without_a_word_on_sizes_small_ones_are_watched_and_the_device_decides(root: Path) -> None:
    found = watched(root, root, read_table(root), {"files": ("a.py",), "heads": None})
    assert found == Watched(files=("a.py",), sweeps=(SMALL,))
    assert (found.rules("cpu").threshold, found.rules("cuda").threshold) == (0.1, 0.05)
    assert asked(root, threshold=0.2).rules("cuda").threshold == 0.2


def test_files_of_flags_are_not_bound_to_the_names_in_the_table(root: Path) -> None:
    table = """
        [tool.attnbench.gate]
        files = ["a.py"]
        impls = "one"
        sweeps = [{ seq-lens = "64", impls = "two" }]
        """
    (axes,) = asked(root, table, files=("kernels/b.py",)).sweeps
    assert (axes.impls, axes.seq_lens) == (None, (64,))
    assert asked(root, table, files=("kernels/b.py",), impls=("b",)).sweeps[0].impls == ("b",)
    assert asked(root, table).sweeps[0].impls == ("two",)


def test_every_key_of_the_table_has_its_place(root: Path) -> None:
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
        growth = 0.02
        threads = 2
        device = "cpu"
        base = "release"
        """,
    )
    axes = Axes(
        workload="decode", seq_lens=(128, 256, 512), heads=(8,), batch_sizes=(1, 2),
        masks=("full", "window:64"), caches=("static",), new_tokens=(4,), impls=("one", "two"),
    )  # fmt: skip
    assert found == Watched(
        files=("a.py", "kernels/b.py", "kernels/c.py"), sweeps=(axes,), base="release", threads=2,
        device="cpu", promises={"threshold": 0.05, "budget_s": 150.0, "growth": 0.02},
    )  # fmt: skip


def test_flags_go_before_the_table(root: Path) -> None:
    table = ALONE + "threshold = '20%'\nseq-lens = 64\nheads = 2\nbase = 'x'\nbudget = 60\n"
    found = asked(
        root, table, files=("kernels/b.py",), threshold=0.1, seq_lens=(32,), base="y", budget_s=9.0
    )
    assert found == Watched(
        files=("kernels/b.py",), sweeps=(Axes(seq_lens=(32,), heads=(2,)),), base="y",
        promises={"threshold": 0.1, "budget_s": 9.0},
    )  # fmt: skip


SEVERAL = (
    ALONE
    + """
heads = 2
caches = "static"
[[tool.attnbench.gate.sweeps]]
seq-lens = 64
[[tool.attnbench.gate.sweeps]]
workload = "decode"
heads = 4
"""
)


def test_sweeps_take_what_is_shared_their_own_before_it_and_flags_before_both(root: Path) -> None:
    assert asked(root, SEVERAL).sweeps == (
        Axes(seq_lens=(64,), heads=(2,)),
        Axes(workload="decode", seq_lens=SMALL.seq_lens, heads=(4,), caches=("static",)),
    )
    found = asked(root, SEVERAL, heads=(8,), new_tokens=(2,)).sweeps
    assert [(axes.heads, axes.new_tokens) for axes in found] == [((8,), None), ((8,), (2,))]
    # a workload that is asked for leaves its sweeps alone
    assert [axes.heads for axes in asked(root, SEVERAL, workload="decode").sweeps] == [(4,)]
    other = asked(root, SEVERAL, workload="layer", heads=(1,)).sweeps
    assert [(axes.workload, axes.heads) for axes in other] == [("layer", (1,))]


def test_the_table_names_any_file_and_patterns_pass_over_hidden_ones(root: Path) -> None:
    names = ["kernels/_mine.py", "kernels/b[1].py"]
    for name in names:
        (root / name).write_text("")
    table = f"[tool.attnbench.gate]\nfiles = {[*names, str(root / 'a.py'), 'kernels/[bc].*']}\n"
    assert asked(root, table).files == (*names, "a.py", "kernels/b.py", "kernels/c.py")


def test_flags_name_files_from_the_folder_or_from_the_root(root: Path) -> None:
    for text in ("b.py", "kernels/b.py", str(root / "kernels" / "b.py")):
        found = watched(root, root / "kernels", {}, {"files": (text, text)})
        assert found.files == ("kernels/b.py",)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ((), r"--impl path/in/repo.py.*\[tool.attnbench.gate\]: files"),
        *[((text,), "outside the repository .*--impl") for text in ("../out.py", "/etc/hostname")],
        *[((text,), "no file .*--impl") for text in ("no.py", "kernels", "x" * 300)],
    ],
)
def test_a_file_that_is_elsewhere_or_not_there_is_refused(
    root: Path, files: tuple[str, ...], says: str
) -> None:
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
def test_a_wrong_table_is_one_line_that_names_the_option(root: Path, line: str) -> None:
    head = "[tool.attnbench.gate]\n" if line.startswith("files") else ALONE
    with pytest.raises(UsageError) as caught:
        asked(root, line if line.startswith(("[tool", "[[tool.attnbench.gate]]")) else head + line)
    message = str(caught.value)
    assert "\n" not in message
    assert [text for text in WRONG[line] if text not in message] == [], message


def test_a_time_and_a_share_are_read_in_seconds_and_as_a_fraction() -> None:
    for text, seconds in {
        "300": 300, "90s": 90, "2m30s": 150, "1m 0 s": 60, "1.5h": 5400, "5 min": 300, " 0.5 ": 0.5,
    }.items():  # fmt: skip
        assert parse_duration(text, "--budget") == seconds
    for text in ("10%", "10 %", "0.1", "1e-1", " 10% "):
        assert parse_share(text, "--threshold") == pytest.approx(0.1)
    for read, name, says, texts in (
        (
            parse_duration,
            "--budget",
            "90s, 5m or 2m30s",
            ["", "0", "0m", "-5", "1.2.3s", "inf", "30s2m", "٣"],
        ),
        (parse_share, "--threshold", "10% or 0.1", ["", "%", "-1", "nan", "ten", "1_0", "٣%"]),
    ):
        for text in texts:
            with pytest.raises(UsageError, match=f"{name} takes a .* such as {says}"):
                read(text, name)
