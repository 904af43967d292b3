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
named=$(echo "$*" | sed -n 's/.*--name \\([^ ]*\\).*/\\1/p')
run=$(echo "$*" | sed -n 's/.*\\(verify-gpu\\).*/\\1/p'); run="$OUT/${named:-${run:-gpu}}"
case "$*" in
  *" doctor "*) name=doctor; [ "$AILING" = doctor=silent ] && exit 1; echo '{"verdict": "fit"}';;
  *gpu_probe*) name=probe; echo "FACT {}";;
  *"-m pytest "*) name=test; echo "12 passed";;
  *" sweep "*) name=sweep; mkdir -p "$run"; cd "$run"; echo {} >run.json; echo {} >>records.jsonl;;
  *" report "*) name=report; cd "$run" && mkdir plots && touch plots/a.svg report.html report.md;;
  *" list "*) name=list; [ "$AILING" = list=1 ] || echo "$CATALOGUE";;
  *" check "*) name=check; echo '{}'; echo "ok sdpa" >&2;;
  *" --replay "*)
    [ -e "$(echo "$*" | sed 's/.*--replay \\([^ ]*\\).*/\\1/')" ] || exit 2
    case "$AILING $*" in gate=blind*) exit;; *gate-21*) exit 1;; *) exit;; esac;;
  *" gate "*) name=gate; mkdir -p "$run"
    [ "$AILING" = gate=killed ] || echo {} > "$run/gate.json";;
  *" advise "*) name=advise; mkdir -p "$run"; echo {} | tee "$run/run.json";;
  *" verify "*) name=verify; echo "1 holds";;
  *" claims "*) name=claims; echo "1 claim";;
esac
[ "${AILING%=*}" = "$name" ] || exit 0
case "${AILING#*=}" in
  killed) kill -9 $$;;
  hung) exec sleep 20;;
  *) exit "${AILING#*=}";;
esac
"""
# In place of it: this Python with this CPU, and a second for what takes as long as it is given.
REAL = f"""#!/bin/sh
case "$*" in -c*) exec '{sys.executable}' "$@";; esac
exec '{sys.executable}' $(echo "$*" | sed 's/device cuda/device cpu/; s/budget [0-9]*s/budget 1s/')
"""
ROW = {"name": "naive", "family": "exact", "devices": "cpu, cuda", "compiles": False}
CATALOGUE = json.dumps({"sections": [{"parts": [{"table": [ROW]}]}]})
RUN = ["records.jsonl", "report.html", "report.md", "run.json", "plots.tar.gz"]
GATES = [
    name for n in (20, 21) for name in (f"repeated-{n}.py", f"gate-{n}.json", f"gate-{n}/gate.json")
]
FILES = {
    "gpu": {
        "gpu.log", "doctor.json", "probe.txt", "check.txt", "check.json", *GATES, "advise.json",
        "advise/run.json", "decode/run.json", "decode/records.jsonl",
    },
    "gpu-sweep gpu-report": {"gpu.log", *(f"gpu/{name}" for name in RUN)},
    "gpu-verify": {"gpu.log", "verify.txt", "claims.txt", *(f"verify-gpu/{x}" for x in RUN)},
}  # fmt: skip


class Bench:
    """A folder for results, and a Python that measures nothing."""

    def __init__(self, folder: Path, python: str = STAND_IN) -> None:
        self.out, self._asked = folder / "out", folder / "asked"
        self._python = folder / "python"
        self._python.write_text(python)
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
        ended = subprocess.run(
            ["make", *target.split(), *(f"{name}={value}" for name, value in variables.items())],
            cwd=ROOT,
            env=os.environ
            | {"MAKEFLAGS": "", "ASKED": str(self._asked), "AILING": ailing, "CATALOGUE": CATALOGUE}
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
def test_all_parts_together_leave_these_files(bench, target):
    assert bench.make(target) == 0
    assert bench.left == FILES[target]
    assert bench.make(target) == 0, "and go on with what is there"


@pytest.mark.parametrize(("ailing", "lost"), [
    ("doctor=4", set()),
    ("probe=killed", set()),
    ("test=1", set()),
    ("check=hung", set()),  # what it had said is there
    ("gate=killed", {f"gate-{n}/gate.json" for n in (20, 21)}),
    ("gate=blind", set()),
    ("advise=3", set()),
    ("sweep=hung", set()),
])  # fmt: skip
def test_a_part_that_fails_is_killed_or_hangs_takes_nothing_from_the_others(bench, ailing, lost):
    assert bench.make("gpu", ailing) != 0
    assert FILES["gpu"] - bench.left == lost
    assert len(bench.asked) == 12


def test_what_was_cut_off_goes_on_where_it_stopped(bench):
    bench.make("gpu-sweep", "sweep=killed")
    assert bench.part("sweep") == [
        f"-m attnbench sweep --preset gpu --device cuda --timeout 100 --name gpu"
        f" --output {bench.out}"
    ]
    assert bench.make("gpu-sweep") == 0
    assert bench.part("sweep") == [f"-m attnbench sweep --resume gpu --output {bench.out}"]
    assert len((bench.out / "gpu/records.jsonl").read_text().splitlines()) == 2


def test_doctor_and_check_are_read_as_they_really_answer(tmp_path):
    bench = Bench(tmp_path, REAL)
    bench.make("gpu-doctor", LIMIT="300")
    verdict = json.loads((bench.out / "doctor.json").read_text())["conclusion"]["verdict"]
    assert verdict in bench.output
    assert bench.make("gpu-check", LIMIT="300") == 0
    summary = json.loads((bench.out / "check.json").read_text())["sections"][0]["parts"][0]["table"]
    names = {row["impl"] for row in summary}
    assert {"naive", "sdpa", "sdpa-cudnn", "gru"} <= names, "those that list says run on a GPU"
    assert not {"flex", "naive-compiled"} & names, "but for those that compile"
    lines = (bench.out / "check.txt").read_text().splitlines()
    assert sum(line.startswith("ok ") for line in lines) == sum(
        row["passed"]["value"] for row in summary
    )


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


def test_a_system_without_locks_gets_one_line_and_no_traceback():
    code = "import sys; sys.modules['fcntl'] = None; from attnbench.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    says = "Error: attnbench needs Linux (WSL 2 on Windows): this Python has no fcntl\n"
    assert (ended.returncode, ended.stderr) == (2, says)
