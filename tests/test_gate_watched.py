"""What a gate watches: the table of pyproject.toml, flags before it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnbench.base.units import parse_duration, parse_share
from attnbench.cli.options import AXES as ROWS
from attnbench.errors import UsageError
from attnbench.gate.run.watched import AXES, Watched, read_table, watched
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
    return made


def asked(root: Path, table: str = ALONE, **flags: Any) -> Watched:
    (root / "pyproject.toml").write_text(table)
    return watched(root, root, flags)


def test_without_a_word_on_sizes_small_ones_are_watched(root: Path) -> None:
    found = watched(root, root, {"files": ("a.py",), "heads": None})
    assert found == Watched(files=("a.py",), sweeps=(SMALL,))
    assert (found.budget_s, found.growth, found.base) == (300.0, 0.01, None)


@pytest.mark.parametrize(
    ("device", "threshold", "threads"), [("cpu", 0.1, 1), ("cuda", 0.05, None)]
)
def test_threshold_and_threads_follow_from_the_device(
    root: Path, device: str, threshold: float, threads: int | None
) -> None:
    found = asked(root)
    assert found.rules(device).threshold == threshold
    assert found.threads_on(device) == threads
    given = asked(root, threshold=0.2, threads=3)
    assert (given.rules(device).threshold, given.threads_on(device)) == (0.2, 3)


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
        files=("a.py", "kernels/b.py", "kernels/c.py"), sweeps=(axes,), base="release",
        threshold=0.05, budget_s=150.0, growth=0.02, threads=2, device="cpu",
    )  # fmt: skip


def test_flags_go_before_the_table(root: Path) -> None:
    table = ALONE + "threshold = '20%'\nseq-lens = 64\nheads = 2\nbase = 'x'\nbudget = 60\n"
    found = asked(
        root, table, files=("kernels/b.py",), threshold=0.1, seq_lens=(32,), base="y", budget_s=9.0
    )
    assert found == Watched(
        files=("kernels/b.py",), sweeps=(Axes(seq_lens=(32,), heads=(2,)),), threshold=0.1,
        base="y", budget_s=9.0,
    )  # fmt: skip


def test_the_table_and_the_command_line_have_the_same_axes() -> None:
    assert {name for _, name, _, _ in ROWS} | {"workload"} == set(AXES)


# Several sweeps.

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


# Files.


def test_flags_name_files_from_the_folder_or_from_the_root(root: Path) -> None:
    for text in ("b.py", "kernels/b.py", str(root / "kernels" / "b.py")):
        found = watched(root, root / "kernels", {"files": (text, text)})
        assert found.files == ("kernels/b.py",)


def test_without_any_file_the_flag_and_the_table_are_explained(root: Path) -> None:
    with pytest.raises(UsageError, match=r"--impl path/in/repo.py.*\[tool.attnbench.gate\] files"):
        watched(root, root, {"files": ()})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *[(text, "outside the repository .*--impl") for text in ("../out.py", "/etc/hostname")],
        *[(text, "no file .*--impl") for text in ("no.py", "kernels", "x" * 300)],
    ],
)
def test_a_file_that_is_elsewhere_or_not_there_is_refused(root: Path, text: str, says: str) -> None:
    (root.parent / "out.py").write_text("")
    with pytest.raises(UsageError, match=says):
        watched(root, root, {"files": (text,)})


# What is wrong in the table: its line, and what the message must say.

WRONG = {
    "a key nobody knows": ("seqlens = 1", ["unknown key 'seqlens'", "'seq-lens'?", "files"]),
    "a key with an underscore": ("seq_lens = 1", ["unknown key 'seq_lens'", "'seq-lens'?"]),
    "no size": ("seq-lens = 'x'", ["'seq-lens'", "whole numbers"]),
    "a size of nothing": ("heads = 0", ["'heads'", "at least 1"]),
    "half a size": ("heads = 1.5", ["'heads'", "1.5"]),
    "no list of sizes": ("heads = [[1]]", ["'heads'", "[[1]]"]),
    "true": ("heads = true", ["'heads'", "True"]),
    "an empty list": ("masks = []", ["'masks'", "empty element"]),
    "no share": ("threshold = 'ten'", ["'threshold'", "10% or 0.1"]),
    "a share beyond all": ("threshold = 10", ["--threshold 10 ", "from 0.1% to 100%"]),
    "negative growth": ("growth = -0.1", ["'growth'", "10% or 0.1"]),
    "no time": ("budget = 'long'", ["'budget'", "5m"]),
    "no time at all": ("budget = 0", ["--budget 0 s", "at least 1 s"]),
    "not a number": ("budget = nan", ["'budget'"]),
    "several threads": ("threads = [1, 2]", ["'threads'", "one whole number"]),
    "an unknown device": ("device = 'tpu'", ["'device'", "auto, cpu, cuda"]),
    "a base of nothing": ("base = ''", ["'base'"]),
    "sweeps that are no tables": ("sweeps = 3", ["'sweeps'", "[[tool.attnbench.gate.sweeps]]"]),
    "a setting in a sweep": (
        "[[tool.attnbench.gate.sweeps]]\nthreshold = 1",
        ["unknown key 'threshold'", "[[tool.attnbench.gate.sweeps]]", "seq-lens"],
    ),
    "a file that is not there": ("files = 'gone.py'", ["'files'", "no file gone.py"]),
    "a file outside": ("files = '../out.py'", ["'files'", "outside the repository"]),
    "a pattern of nothing": ("files = 'no/*.py'", ["'files'", "no Python file"]),
    "a pattern outside": ("files = '/*.py'", ["'files'", "'/*.py'"]),
    "an unknown workload": ("workload = 'decoder'", ["'decode'?"]),
}


@pytest.mark.parametrize(("line", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_table_is_one_line_that_names_key_and_file(
    root: Path, line: str, says: list[str]
) -> None:
    (root.parent / "out.py").write_text("")
    head = "[tool.attnbench.gate]\n" if line.startswith("files") else ALONE
    with pytest.raises(UsageError) as caught:
        asked(root, head + line)
    message = str(caught.value)
    assert "\n" not in message
    assert [text for text in says if text not in message] == [], message
    assert "pyproject.toml" in message or "--workload" in message


def test_a_damaged_pyproject_is_one_line_and_without_a_table_it_is_empty(root: Path) -> None:
    assert read_table(root) == {}
    file = root / "pyproject.toml"
    file.write_text("[project]\nname = 'x'\n")
    assert read_table(root) == {}
    for text in ("[tool", "tool = 1", "[tool]\nattnbench = 1"):
        file.write_text(text)
        with pytest.raises(UsageError, match=r"pyproject\.toml"):
            read_table(root)


# Amounts.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300", 300), ("90s", 90), ("5m", 300), ("2m30s", 150), ("1m 0 s", 60), ("1.5h", 5400),
     ("5 min", 300), (" 0.5 ", 0.5), *dict.fromkeys(
        ("", "m", "-5", "1.2.3s", "nan", "inf", "5d", "30s2m", "٣", "5m5m")).items()],
)  # fmt: skip
def test_a_time_is_read_in_seconds(text: str, seconds: float | None) -> None:
    if seconds is not None:
        assert parse_duration(text, "--budget") == seconds
        return
    with pytest.raises(UsageError, match=r"--budget takes a time such as 90s, 5m or 2m30s"):
        parse_duration(text, "--budget")


def test_a_share_is_read_from_percent_or_a_fraction() -> None:
    for text in ("10%", "10 %", "0.1", "1e-1", " 10% "):
        assert parse_share(text, "--threshold") == pytest.approx(0.1)
    for text in ("", "%", "-1", "nan", "inf", "ten", "1_0", "٣%"):
        with pytest.raises(UsageError, match=r"--threshold takes a share such as 10% or 0.1"):
            parse_share(text, "--threshold")
