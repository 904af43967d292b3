"""`--processes N`: each cell in N fresh processes, one row in the table; and how it is resumed."""

import json

import pytest

from attnbench.execution.runner import LocalRunner
from attnbench.execution.store import RECORDS, load_run
from tests import synthetic
from tests.conftest import TINY, Cli, exported, run_attnbench

AXES = ("--seq-lens", "16,32", "--impls", "naive,sdpa", *TINY)

# Right in the process that plans and in the first that measures, wrong from then on: the file
# remembers between processes.
UNSTEADY = """
from pathlib import Path
from torch.nn.functional import scaled_dot_product_attention
from attnbench.api import attention

seen = Path(__file__).with_suffix(".seen")
loads = len(seen.read_text()) if seen.exists() else 0
seen.write_text("x" * (loads + 1))
first = loads < 2

@attention("unsteady")
def unsteady(q, k, v, *, causal, scale):
    o = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return o if first else o * 2
"""


def keys(path):
    return [(r.cell.case.seq_len, r.cell.impl, r.process) for r in load_run(path).parts]


@pytest.mark.usefixtures("imagined_worker")
class TestPlanned:
    def test_each_cell_is_measured_once_in_each_process_and_is_one_row(self, cli: Cli, tmp_path):
        result = cli("sweep", *AXES, "--processes", 3, "--output", tmp_path, "--name", "r")
        assert result.exit_code == 0, result.stderr
        assert "4 cells, each 3 times, in 3 processes" in result.stderr
        assert "[12/12]" in result.stderr
        path = tmp_path / "r"
        expected = [(n, impl, p) for p in range(3) for n in (16, 32) for impl in ("naive", "sdpa")]
        assert sorted(keys(path)) == sorted(expected)
        assert [p for *_, p in keys(path)] == sorted(p for *_, p in keys(path))
        rows = exported(path)
        assert [(row["processes"], row["interval"]) for row in rows] == [
            (3, "between_processes")
        ] * 4

    def test_resuming_adds_exactly_the_processes_that_are_missing(self, cli: Cli, tmp_path):
        cli("sweep", *AXES, "--processes", 3, "--output", tmp_path, "--name", "r")
        path = tmp_path / "r"
        lines = (path / RECORDS).read_text().splitlines(keepends=True)
        kept = [line for i, line in enumerate(lines) if i not in (2, 7, 11)]
        (path / RECORDS).write_text("".join(kept))
        before = set(keys(path))
        result = cli("sweep", "--resume", path)
        assert result.exit_code == 0, result.stderr
        assert "[3/3]" in result.stderr
        added = keys(path)[len(before) :]
        assert len(added) == 3
        assert len(set(keys(path))) == len(keys(path)) == 12

    def test_what_was_measured_in_all_is_not_measured_again(self, cli: Cli, tmp_path):
        cli("sweep", *AXES, "--processes", 2, "--output", tmp_path, "--name", "r")
        before = (tmp_path / "r" / RECORDS).read_bytes()
        assert cli("sweep", "--resume", tmp_path / "r").exit_code == 0
        assert (tmp_path / "r" / RECORDS).read_bytes() == before

    def test_what_has_failed_is_not_measured_again(self, cli: Cli, tmp_path, monkeypatch):
        def run(runner, jobs):
            for cell in (cell for job in jobs for cell in job.cells()):
                if cell.impl == "sdpa":
                    yield synthetic.ok(cell.case, cell.impl)
                else:
                    yield synthetic.failed(cell.case, cell.impl, "error", "it fails")

        monkeypatch.setattr(LocalRunner, "run", run)
        cli("sweep", *AXES, "--processes", 2, "--output", tmp_path, "--name", "r")
        impls = [impl for _, impl, _ in keys(tmp_path / "r")]
        assert (impls.count("naive"), impls.count("sdpa")) == (2, 4)

    @pytest.mark.parametrize(
        "flags", [("--timer", "graph"), ("--timer", "events"), ("--energy",)], ids=" ".join
    )
    def test_what_only_a_gpu_has_is_refused_on_cpu(self, cli: Cli, assert_refused, tmp_path, flags):
        result = cli("sweep", *AXES, *flags, "--device", "cpu", "--output", tmp_path / "new")
        assert_refused(result, flags[0], "needs a GPU")
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("text", ["0", "-1", "many", "101", "1.5"])
    def test_a_number_of_processes_that_makes_no_sense_is_refused(
        self, cli: Cli, assert_refused, text
    ):
        assert_refused(cli("sweep", *AXES, "--processes", text), "--processes")


def test_a_kernel_that_fails_in_the_second_process_has_no_time(tmp_path):
    (tmp_path / "unsteady.py").write_text(UNSTEADY)
    args = ("--impl", "unsteady.py", "--impls", "sdpa", "--seq-lens", "16,32", *TINY)
    result = run_attnbench("sweep", *args, "--processes", 3, "--name", "r", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    rows = {(row["impl"], row["seq_len"]): row for row in exported(tmp_path / "results/r")}
    for n in (16, 32):
        bad = rows["unsteady", n]
        assert bad["status"] == "incorrect"
        assert bad["reason"].startswith("in process 2 of 2: ")
        assert bad["time_us_median"] is None
        assert rows["sdpa", n]["processes"] == 3
    assert len(json.loads((tmp_path / "results/r/run.json").read_text())["plan"]) == 4
    processes = [r.process for r in load_run(tmp_path / "results/r").parts]
    assert processes.count(2) == 2, "what has failed was measured again"
