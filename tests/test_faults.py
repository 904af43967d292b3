"""What goes wrong around a sweep: broken implementations, kills, interrupts, a full disk."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from attnbench.base.jsontext import checksum
from attnbench.errors import StoreError
from attnbench.execution.runner import LocalRunner
from attnbench.schema.record import Record
from attnbench.store.folder import SWEEP, RunFolder
from attnbench.store.runs import INFO, PLAN, RECORDS, load_run, new_run
from tests import hostile, synthetic
from tests.conftest import COMMAND, TINY, environment, exported, lives, run_attnbench, wait_until
from tests.hostile import HARMLESS

Rows = dict[tuple[str, int], dict[str, Any]]

FATES = {  # of implementations in tests/hostile.py: the status, and what the reason says
    "writes-to-its-input": ("incorrect", "it wrote to its input k"),
    "segfaults": ("crashed", "SIGSEGV"),
    "raises": ("error", "ValueError: \ufffd[31mred"),
    "asks-for-too-much": ("oom", "check: asked for 4.0 PiB"),
    "prints-events": ("ok", ""),
    "writes-everywhere": ("error", "its worker's results are unreadable"),
    "slows-the-clock": ("incorrect", "time.perf_counter_ns"),
    "sets-the-default-device": ("ok", ""),
    "leaves-inference-mode-on": ("error", "inference mode"),
}


@pytest.fixture(scope="module")
def hostile_rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """A sweep of all of them, each in two processes."""
    folder = tmp_path_factory.mktemp("hostile")
    names = ("--impl", hostile.__file__, "--impls", ",".join(("naive", *FATES)))
    sizes = ("--seq-lens", f"{HARMLESS},24", "--processes", 2, "--threads", "1")
    ran = run_attnbench("sweep", *names, *sizes, *TINY, "--name", "r", cwd=folder)
    assert ran.returncode == 1  # as there are incorrect rows
    assert "writes-to-its-input (1 cell, n=24): incorrect: " in ran.stdout
    assert "hostile.py changed the default dtype; restored" in ran.stderr
    assert "Traceback" not in ran.stderr
    return {(row["impl"], row["seq_len"]): row for row in exported(folder / "results" / "r")}


@pytest.mark.parametrize(("name", "status", "says"), [(n, *fate) for n, fate in FATES.items()])
def test_a_fault_costs_its_own_cell_with_a_status_and_a_reason(hostile_rows, name, status, says):
    row = hostile_rows[name, 24]
    assert row["status"] == status
    assert says in (row["reason"] or "")
    assert "\n" not in (row["reason"] or "")
    assert (row["time_us"] is not None) == (status == "ok")
    assert row["processes"] == 2 or status != "ok"


def test_the_others_in_the_same_case_and_the_cases_after_it_are_measured(hostile_rows):
    assert len(hostile_rows) == 2 * (len(FATES) + 1)
    others = {key: row["status"] for key, row in hostile_rows.items() if key[1] == HARMLESS}
    assert set(others.values()) == {"ok"}
    assert hostile_rows["naive", 24]["status"] == "ok"
    assert "the default device" in hostile_rows["sets-the-default-device", 24]["notes"]


# The sweeping process is killed or interrupted in the middle.

PLANNED = 5


def _heed_signals() -> None:
    """A shell that starts the tests in the background, or nohup, has them ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Sweep:
    """A sweep in a process of its own, caught in the middle."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results" / "r"
        sizes = ",".join(str(i + 1) for i in range(PLANNED))
        budget = ("--min-time", "0.3", "--max-time", "0.3")
        self.process = subprocess.Popen(
            [*COMMAND, "sweep", "--impls", "naive", "--heads", sizes, *budget, "--name", "r"],
            cwd=folder,
            env=environment(TMPDIR=str(folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_heed_signals,
        )
        try:
            wait_until(lambda: self.complete_lines() != b"" or self.process.poll() is not None)
        except AssertionError:
            self.process.kill()  # it must not outlive the tests
            raise
        assert self.process.poll() is None, "it ended before it was caught"
        self._workers = psutil.Process(self.process.pid).children(recursive=True)
        assert self._workers

    def complete_lines(self) -> bytes:
        """What is stored so far, up to the last whole record."""
        records = self.path / RECORDS
        text = records.read_bytes() if records.exists() else b""
        return text[: text.rfind(b"\n") + 1]

    def worker_has_ended(self) -> bool:
        return not any(lives(process.pid) for process in self._workers)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    sweep = Sweep(tmp_path_factory.mktemp("killed"))
    sweep.process.kill()
    sweep.process.communicate(timeout=60)
    return sweep


@pytest.fixture
def killed_copy(killed: Sweep, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed.path, tmp_path / "r"))


def test_a_killed_run_loads_and_leaves_no_worker(killed, killed_copy):
    (killed_copy / ".run.json.12345").write_text('{"schema"')  # as a killed write leaves it
    rows = exported(killed_copy)
    assert 0 < len(rows) < PLANNED
    assert {row["status"] for row in rows} == {"ok"}
    wait_until(killed.worker_has_ended)


@pytest.mark.usefixtures("imagined_worker")
def test_resume_measures_what_is_missing_and_repairs_a_half_written_line(cli, killed, killed_copy):
    before = killed.complete_lines()
    (killed_copy / RECORDS).write_bytes(before + before[: len(before) // 3].rstrip(b"\n"))
    result = cli("sweep", "--resume", killed_copy, "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    after = (killed_copy / RECORDS).read_bytes()
    assert after.startswith(before)
    assert after.endswith(b"\n")
    records = [Record.from_line(line) for line in after.decode().splitlines()]
    assert Counter(record.cell.case.heads for record in records) == {
        i + 1: 1 for i in range(PLANNED)
    }
    info = load_run(killed_copy).info
    assert "wall_s" in info["spent"]
    assert {"commit", "dirty"} <= set(info)
    assert info["environment"]["ceilings"]["1"]["matmul_tflops"]["float32"] > 0


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"torch": "', '"torch": "0.', ("torch was 0.", "start a new run")),
        ('"naive"', '"mine"', ("unknown implementation 'mine'",)),
    ],
)
def test_resume_elsewhere_is_refused_and_names_the_difference(
    cli, assert_refused, killed_copy, old, new, says
):
    plan, info = killed_copy / PLAN, killed_copy / INFO
    file = plan if old in plan.read_text() else info
    head, _, tail = file.read_text().rpartition(old)
    file.write_text(head + new + tail)
    planned = checksum(plan.read_bytes())
    synthetic.edit(info, lambda facts: facts | {"planned": planned})
    before = (killed_copy / RECORDS).read_bytes()
    assert_refused(cli("sweep", "--resume", killed_copy), *says)
    assert (killed_copy / RECORDS).read_bytes() == before


SLOWLY = pytest.mark.slow


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(x, marks=SLOWLY) for x in (signal.SIGTERM, signal.SIGHUP))],
)
def test_an_interrupt_ends_with_its_code_the_resume_command_and_no_worker(tmp_path, number):
    sweep = Sweep(tmp_path)
    sweep.process.send_signal(number)
    _, stderr = sweep.process.communicate(timeout=60)
    assert sweep.process.returncode == 128 + number
    assert stderr.splitlines()[-1] == "Interrupted. Continue with: attnbench sweep --resume" + (
        " results/r"
    )
    assert "Traceback" not in stderr
    wait_until(sweep.worker_has_ended)
    assert 0 < len(exported(sweep.path)) < PLANNED


# Exit code and table speak of the whole run, not of what was added last.


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize(("status", "code"), [("incorrect", 1), ("oom", 0), ("crashed", 0)])
def test_only_incorrect_rows_make_a_resumed_run_exit_with_1(cli, tmp_path, status, code):
    args = ("--impls", "naive,sdpa", "--output", tmp_path, "--name", "r")
    assert cli("sweep", *args).exit_code == 0
    first = load_run(tmp_path / "r").records[0].cell
    wrong = synthetic.failed(first.case, first.impl, status, "o is off by 1")
    (tmp_path / "r" / RECORDS).write_text(wrong.to_line() + "\n")
    assert cli("sweep", "--resume", tmp_path / "r").exit_code == code


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize(("status", "code"), [("incorrect", 1), ("unsupported", 2), ("crashed", 2)])
def test_a_sweep_in_which_no_cell_was_measured_does_not_exit_with_0(
    cli, tmp_path, monkeypatch, status, code
):
    def failed(_: Any, jobs: Any) -> Any:
        cells = [cell for job in jobs for cell in job.cells()]
        return (synthetic.failed(cell.case, cell.impl, status, "it has to be") for cell in cells)

    monkeypatch.setattr(LocalRunner, "run", failed)
    result = cli("sweep", "--impls", "naive", "--output", tmp_path, "--name", "r")
    assert result.exit_code == code
    assert f"naive (1 cell, n=512): {status}: it has to be" in result.stdout


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize("processes", [1, 2])
def test_what_was_killed_from_outside_is_measured_anew_if_asked_for(
    cli, tmp_path, monkeypatch, processes
):
    measured, suspects = LocalRunner.run, list[str]()

    def measured_(runner: LocalRunner, jobs: Any) -> Any:
        suspects.extend(runner.suspects.values())
        return measured(runner, jobs)

    monkeypatch.setattr(LocalRunner, "run", measured_)
    run, args = tmp_path / "r", ("--impls", "naive", "--seq-lens", "8,16,32", "--quiet")
    cli("sweep", *args, "--processes", processes, "--output", tmp_path, "--name", "r")
    fates: dict[int, Any] = {8: "crashed", 16: "oom"}
    for part in load_run(run).parts:
        if (status := fates.get(part.cell.case.seq_len)) and part.process == processes - 1:
            failed = synthetic.failed(part.cell.case, "naive", status, "killed")
            with RunFolder(SWEEP, run) as folder:
                folder.append(dataclasses.replace(failed, process=part.process).to_line())

    def statuses() -> dict[int, str]:
        return {r.cell.case.seq_len: r.status for r in load_run(run).records}

    cli("sweep", "--resume", run)
    assert statuses() == {8: "crashed", 16: "oom", 32: "ok"}, "a failure is final"
    before = (run / RECORDS).read_bytes()
    assert cli("sweep", "--resume", run, "--retry", "crashed,timeout").exit_code == 0
    assert statuses() == {8: "ok", 16: "oom", 32: "ok"}
    assert suspects == ["crashed: killed"]
    after = (run / RECORDS).read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == before.count(b"\n") + 1, "others were measured anew"


@pytest.mark.parametrize(("args", "says"), [
    (("--resume", "r", "--retry", "crushed"), "--retry takes any of unsupported, inc"),
    (("--resume", "r", "--retry", "ok"), "error, skipped, not 'ok'"),
    (("--resume", "r", "--retry", ""), "--retry takes any of unsupported, inc"),
    (("--resume", "r", "--retry", " , "), "error, skipped, not ''"),
    (("--retry", "crashed"), "goes with --resume RUN"),
])  # fmt: skip
def test_a_retry_that_makes_no_sense_is_refused(cli, assert_refused, args, says):
    assert_refused(cli("sweep", *args), says)


# The disk is full.


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize("written", [0, 1, 4, 6, 7])  # nothing, two records, or all
def test_a_full_disk_is_one_line_and_the_records_so_far_are_intact(
    cli, assert_refused, monkeypatch, tmp_path, written
):
    synced: list[int] = []

    def fsync(file: int) -> None:
        synced.append(file)
        if len(synced) > written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    args = ("--impls", "naive", "--seq-lens", "8..64", "--quiet")
    result = cli("sweep", *args, "--output", tmp_path, "--name", "r")
    assert_refused(result, "No space left")
    if written < 2:
        assert list(tmp_path.iterdir()) == []
        return
    assert written > 4 or f"--resume {tmp_path / 'r'}" in result.stderr
    stored = [row["seq_len"] for row in exported(tmp_path / "r")]
    assert stored[:2] == [8, 16]
    assert written == 4 or stored == [8, 16, 32, 64]
    assert {file.name for file in (tmp_path / "r").iterdir()} == {INFO, PLAN, RECORDS}


def test_records_of_a_run_that_was_removed_are_not_taken_for_stored(tmp_path):
    with new_run(tmp_path, "r", {}) as folder:
        folder.append("a line")
        shutil.rmtree(folder.path)
        with pytest.raises(StoreError, match="was removed while it was written to"):
            folder.append("another")


@pytest.mark.slow
def test_a_file_that_ends_the_worker_is_one_line_with_its_last_words_which_steer_no_terminal(
    cli, assert_refused, tmp_path
):
    words = "'\\x1b[31m\\u202eout of ideas'"
    source = f"import os, sys; print({words}, file=sys.stderr, flush=True); os._exit(7)"
    (tmp_path / "ends.py").write_text(source)
    result = cli("list", "--impl", tmp_path / "ends.py")
    assert_refused(result, "exit code 7", "\ufffd[31m\ufffdout of ideas", exit_code=4)


@pytest.mark.usefixtures("imagined_worker")
def test_resume_decides_again_what_was_never_to_run(cli, tmp_path):
    # As after a kill between run.json and the first record: nothing is recorded yet.
    asked = ("--seq-lens", "16", "--heads", "4", "--kv-heads", "4,3", "--impls", "naive,sdpa")
    cli("sweep", *asked, "--name", "r", "--output", tmp_path)
    run = tmp_path / "r"
    (run / RECORDS).unlink()
    assert cli("sweep", "--resume", run, "--quiet").exit_code == 0
    assert Counter(r.status for r in load_run(run).records) == {"ok": 2, "skipped": 2}
