"""`make gpu` with a stand-in for Python: what each part leaves, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Notes what it is asked for, leaves what the command would, and ends as AILING says: by its exit
# status, killed, or not at all.
STAND_IN = """#!/bin/sh
case "$*" in
  -c*) exec python3 "$@";;
  *--version) exit;;
esac
echo "$*" >> "$ASKED"
run=$(echo "$*" | sed -n 's/.*\\(verify-gpu\\).*/\\1/p'); run="$OUT/${run:-gpu}"
case "$*" in
  *" doctor "*) name=doctor; [ "$AILING" = doctor=silent ] && exit 1; echo '{"verdict": "fit"}';;
  *"-m pytest "*) name=test; echo "12 passed";;
  *" sweep "*) name=sweep; mkdir -p "$run"; cd "$run"; echo {} >run.json; echo {} >>records.jsonl;;
  *" report "*) name=report; cd "$run" && mkdir plots && touch plots/a.svg report.html report.md;;
  *" list "*) name=list; [ "$AILING" = list=1 ] || echo "$CATALOGUE";;
  *" check "*) name=check; echo "all right";;
  *" verify "*) name=verify; echo "1 holds";;
  *" claims "*) name=claims; echo "1 claim";;
esac
[ "${AILING%=*}" = $name ] || exit 0
case "${AILING#*=}" in
  killed) kill -9 $$;;
  hung) exec sleep 20;;
  *) exit "${AILING#*=}";;
esac
"""
RUN = ["records.jsonl", "report.html", "report.md", "run.json", "plots.tar.gz"]
CATALOGUE = ("naive", "gru", "sdpa")
CHECKS = [f"{d} --impls {name}" for d in ("bfloat16", "float16", "float32") for name in CATALOGUE]
FILES = {
    "gpu": {"gpu.log", "doctor.json", "check.txt", *(f"gpu/{name}" for name in RUN)},
    "gpu-verify": {"gpu.log", "verify.txt", "claims.txt", *(f"verify-gpu/{x}" for x in RUN)},
}


class Bench:
    """A folder for results, and a Python that measures nothing."""

    def __init__(self, folder: Path) -> None:
        self.out, self._asked = folder / "out", folder / "asked"
        self._python = folder / "python"
        self._python.write_text(STAND_IN)
        self._python.chmod(0o755)

    def make(
        self, target: str, ailing: str = "", first_on_path: Path | None = None, **given: str
    ) -> int:
        """The status of a target; `ailing` is a part and how it ends, as `sweep=killed`."""
        self._asked.write_text("")
        variables = {"OUT": self.out, "PYTHON": self._python, "LIMIT": 60} | given
        if "hung" in ailing:  # it alone has a second: how fast the others are is the machine's
            first_on_path = self._python.with_name("path")
            first_on_path.mkdir()
            (first_on_path / "timeout").write_text(
                f'#!/bin/sh\ncase "$*" in *" {ailing.partition("=")[0]} "*) left=1;; esac\n'
                f'left=${{left:-$4}}; shift 4; exec {shutil.which("timeout")} -k 10 $left "$@"\n'
            )
            (first_on_path / "timeout").chmod(0o755)
        rows = [{"name": name, "family": "exact"} for name in CATALOGUE]
        ended = subprocess.run(
            ["make", target, *(f"{name}={value}" for name, value in variables.items())],
            cwd=ROOT,
            env=os.environ
            | {"MAKEFLAGS": "", "ASKED": str(self._asked), "AILING": ailing}
            | {"CATALOGUE": json.dumps({"sections": [{"parts": [{"table": rows}]}]})}
            | ({"PATH": f"{first_on_path}:{os.environ['PATH']}"} if first_on_path else {}),
            capture_output=True,
            text=True,
            check=False,
        )
        self.output = ended.stdout + ended.stderr
        return ended.returncode

    @property
    def asked(self) -> list[str]:
        return self._asked.read_text().splitlines()

    @property
    def left(self) -> set[str]:
        files = (file for file in self.out.rglob("*") if file.is_file())
        return {str(file.relative_to(self.out)) for file in files}

    def part(self, name: str) -> list[str]:
        """What was asked of a command of attnbench, or of pytest."""
        return [line for line in self.asked if f" {name} " in line]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("target", FILES)
def test_all_parts_together_leave_eight_files(bench, target):
    assert bench.make(target) == 0
    assert bench.left == FILES[target]
    assert len(bench.left) == 8


@pytest.mark.parametrize(("ailing", "lost"), [
    ("doctor=4", set()),
    ("test=1", set()),
    ("sweep=killed", set()),  # what it had found is there, and in the report
    ("sweep=hung", set()),
    ("report=killed", {"gpu/plots.tar.gz"}),
    ("check=killed", set()),
])  # fmt: skip
def test_a_part_that_fails_is_killed_or_hangs_takes_nothing_from_the_others(bench, ailing, lost):
    assert bench.make("gpu", ailing) != 0
    assert FILES["gpu"] - bench.left == lost
    assert len(bench.asked) == 6 + len(CHECKS)


def test_what_was_cut_off_goes_on_where_it_stopped(bench):
    bench.make("gpu-sweep", "sweep=killed")
    assert bench.part("sweep") == [
        f"-m attnbench sweep --preset gpu --device cuda --timeout 100 --name gpu"
        f" --output {bench.out}"
    ]
    assert bench.make("gpu-sweep") == 0
    assert bench.part("sweep") == [f"-m attnbench sweep --resume gpu --output {bench.out}"]
    assert len((bench.out / "gpu/records.jsonl").read_text().splitlines()) == 2


def test_what_is_checked_is_not_checked_again_and_a_failure_still_counts(bench):
    assert bench.make("gpu-check", "check=1") != 0  # each was checked, and found wrong
    assert len(bench.part("check")) == len(CHECKS)
    assert bench.make("gpu-check") != 0
    assert bench.part("check") == []


def test_a_check_that_was_cut_off_is_made_again(bench):
    assert bench.make("gpu-check", "check=killed") != 0
    assert bench.make("gpu-check") == 0
    asked = [line.partition("--dtypes ")[2] for line in bench.part("check")]
    assert [line.removesuffix(" --verbose") for line in asked] == CHECKS


def test_all_checks_together_take_no_longer_than_a_part_may(bench, tmp_path):
    """Each look at the clock finds it 25 s later, of 60 that there are."""
    clock = 'echo . >> "$0.looks"; echo $((25 * $(wc -l < "$0.looks")))'
    limited = 'echo "$*" >> "$0.asked"; shift 4; exec "$@"'
    for name, body in {"date": clock, "timeout": limited}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert bench.make("gpu-check", first_on_path=tmp_path) != 0
    limits = [line.split()[3] for line in (tmp_path / "timeout.asked").read_text().splitlines()]
    assert limits == ["35", "10"], "the catalogue, and one check"
    assert "call make gpu-check again" in (bench.out / "gpu.log").read_text()


@pytest.mark.parametrize(
    ("target", "ailing", "word"),
    [("gpu-check", "list=1", " check "), ("gpu-test", "list=2", "pytest")],
)
def test_without_a_catalogue_or_a_gpu_nothing_is_tried_and_that_is_not_all_right(
    bench, target, ailing, word
):
    assert bench.make(target, ailing) != 0
    assert not any(word in line for line in bench.asked)


def test_a_doctor_that_was_cut_off_leaves_no_half_of_a_page(bench):
    assert bench.make("gpu-doctor", "doctor=silent") != 0
    assert bench.left == {"gpu.log"}


def test_a_part_tells_what_it_said_itself(bench):
    bench.make("gpu-test", "test=1")
    bench.make("gpu-doctor")
    assert "12 passed" not in bench.output
    assert '"verdict"' in bench.output


@pytest.mark.parametrize(("wrong", "line"), [
    ({"LIMIT": "soon"}, "LIMIT=soon: expected seconds, such as LIMIT=270"),
    ({"LIMIT": "0"}, "LIMIT=0: expected seconds"),
    ({"OUT": ""}, "OUT is empty; use a folder, such as OUT=results/gpu"),
    ({"OUT": "/dev/null"}, "OUT=/dev/null: cannot write to such a folder"),
    ({"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python does not exist"),
])  # fmt: skip
def test_what_no_part_can_run_with_is_one_line(bench, wrong, line):
    assert bench.make("gpu", **wrong) == 2
    (error,) = [text for text in bench.output.splitlines() if "Error:" in text]
    assert line in error
    assert (bench.asked, bench.left) == ([], set())


def test_a_python_without_the_dependencies_is_told_which(tmp_path):
    """-S leaves out where they are installed."""
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "attnbench", "--version"],
        cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = {re.split("[>=]", package)[0] for package in needed}
    wanted -= {"nvidia-ml-py", "pyarrow", "ruptures"}
    assert f"lacks {', '.join(sorted(wanted))};" in line
