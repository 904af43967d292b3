"""`--processes N`: each cell in N fresh processes, one row in the table; and how it is resumed."""

from dataclasses import replace
from typing import Any

import pytest

from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.execution.supervision import Supervision
from attnbench.planning.plan import Job
from attnbench.schema.case import Case
from attnbench.schema.messages import CellMeasured
from attnbench.store.runs import RECORDS, load_run
from tests import synthetic
from tests.conftest import TINY, Cli, exported

AXES = ("--seq-lens", "16,32", "--impls", "naive,sdpa", *TINY)


def keys(path):
    return [(r.cell.case.seq_len, r.cell.impl, r.process) for r in load_run(path).parts]


def test_what_measures_a_cell_again_shares_no_address_layout(monkeypatch):
    renewed: list[LocalRunner] = []

    def run(supervision, keys):
        for index, impl in keys:
            yield (index, impl), CellMeasured(0, synthetic.ok(supervision.cases[index], impl))

    monkeypatch.setattr(Supervision, "run", run)
    monkeypatch.setattr(LocalRunner, "renew", lambda runner: renewed.append(runner))
    job = Job(groups=(((Case(seq_len=16), ("naive",)),),))
    records: Any = LocalRunner(Settings()).run(replace(job, process=i) for i in (0, 0, 1, 2))
    assert [(record.process, len(renewed)) for record in records] == [
        (0, 0),
        (0, 0),
        (1, 1),
        (2, 2),
    ]


@pytest.mark.usefixtures("imagined_worker")
class TestPlanned:
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

    def test_what_has_failed_is_not_measured_again_and_has_no_time(
        self, cli: Cli, tmp_path, monkeypatch
    ):
        def run(runner, jobs):
            for job, cell in ((one, cell) for one in jobs for cell in one.cells()):
                found = synthetic.ok(cell.case, cell.impl)
                if cell.impl == "naive" and job.process:
                    found = synthetic.failed(cell.case, cell.impl, "incorrect", "it fails")
                yield replace(found, process=job.process)

        monkeypatch.setattr(LocalRunner, "run", run)
        result = cli("sweep", *AXES, "--processes", 3, "--output", tmp_path, "--name", "r")
        assert result.exit_code == 1
        impls = [impl for _, impl, _ in keys(tmp_path / "r")]
        assert (impls.count("naive"), impls.count("sdpa")) == (4, 6)
        for row in exported(tmp_path / "r"):
            if row["impl"] == "naive":
                assert row["reason"] == "in process 2 of 2: it fails"
                assert (row["status"], row["time_us"]) == ("incorrect", None)
            else:
                assert row["processes"] == 3

    @pytest.mark.parametrize(
        "flags", [("--timer", "graph"), ("--timer", "events"), ("--energy",)], ids=" ".join
    )
    def test_what_only_a_gpu_has_is_refused_on_cpu(self, cli: Cli, assert_refused, tmp_path, flags):
        result = cli("sweep", *AXES, *flags, "--device", "cpu", "--output", tmp_path / "new")
        assert_refused(result, flags[0], "needs a GPU")
        assert not (tmp_path / "new").exists()
