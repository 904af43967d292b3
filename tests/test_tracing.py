"""A cell traced: what its profile says, what is refused, and the command from end to end."""

import gzip
import json
import runpy
import shlex
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from attnbench.api import IMPLEMENTATIONS
from attnbench.api.loader import load_built_in
from attnbench.base.files import digest
from attnbench.base.sample import Batch, Sample
from attnbench.execution.process import Settings
from attnbench.execution.profiling import NotProfiledError, commands, with_share
from attnbench.execution.runner import LocalRunner
from attnbench.measure import ops
from attnbench.measure.clock import HostClock
from attnbench.measure.opcosts import OpCosts
from attnbench.measure.probes import CALL
from attnbench.measure.sampling import Target
from attnbench.schema.case import Case
from attnbench.schema.messages import Trace
from attnbench.schema.profile import Op, read_profile, write_profile
from attnbench.schema.record import Cell, Record
from attnbench.store.runs import new_run
from attnbench.worker import calling, tracing
from attnbench.worker.tracing import op_rows, trace_cell
from attnbench.worker.trial import Trial
from attnbench.worker.workloads import Bound
from tests.test_profiles import NAIVE, profile

load_built_in()
CASE = Case(seq_len=32, heads=2, head_dim=16)


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    monkeypatch.setattr(tracing, "take_cores", lambda threads: None)  # tests share this process
    monkeypatch.setattr(tracing, "_ROUNDS", 3)


def trace(tmp_path, impl="naive", case=CASE):
    file = tmp_path / "trace.json.gz"
    return trace_cell(Trace(case=case, impl=impl, seed=0, file=str(file), label=impl))


@pytest.fixture(scope="module")
def naive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("naive")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "take_cores", lambda threads: None)
        patch.setattr(tracing, "_ROUNDS", 3)
        found = trace(folder)
    assert (found.status, found.reason) == ("ok", None)
    return folder, found.profile


def test_ops_of_naive_attention_have_the_costs_that_its_sizes_say(naive):
    _, found = naive
    n, d, heads = CASE.seq_len, CASE.head_dim, CASE.heads
    by_name = {op.name: op for op in found.ops}
    bmm, softmax = by_name["aten::bmm"], by_name["aten::_softmax"]
    assert (bmm.count, bmm.flops) == (2, 2 * 2 * heads * n * n * d)
    assert bmm.bytes == 4 * heads * (4 * n * d + 2 * n * n)  # q, k, v, the output; scores twice
    assert (softmax.count, softmax.flops, softmax.bytes) == (1, None, 4 * 2 * heads * n * n)
    assert softmax.allocated_bytes == 4 * heads * n * n


def test_traced_measured_and_predicted_workspace_agree(naive):
    _, found = naive
    memory = found.memory
    scores = 4 * CASE.heads * CASE.seq_len**2
    assert memory.traced_bytes == memory.measured_bytes == memory.predicted_bytes == 2 * scores
    assert memory.peak_bytes == max(point.live_bytes for point in memory.timeline)
    assert memory.timeline[-1].live_bytes == memory.outputs_bytes
    assert not {note.code for note in found.notes} & {"memory-differs", "prediction-differs"}


def test_the_trace_is_one_that_perfetto_opens_and_has_the_calls(naive):
    folder, found = naive
    with gzip.open(folder / found.trace) as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("name") == CALL and event.get("ph") == "X" for event in events) == 3
    assert found.trace_events >= 3
    assert [path.name for path in folder.iterdir()] == [found.trace]


def test_an_extra_copy_is_an_op_of_its_own_with_count_and_bytes(tmp_path, naive, monkeypatch):
    plain = IMPLEMENTATIONS.get("naive")

    def build(case):
        core = plain.build(case)
        return lambda q, k, v: core(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)

    copies = replace(plain, build=build)
    monkeypatch.setattr(tracing, "implementation", lambda name: copies)
    monkeypatch.setattr("attnbench.worker.measuring.implementation", lambda name: copies)
    before, after = (
        {op.name: op for op in found.ops} for found in (naive[1], trace(tmp_path).profile)
    )
    assert "aten::clone" not in before
    clone = after["aten::clone"]
    q_bytes = 4 * CASE.heads * CASE.seq_len * CASE.head_dim
    assert (clone.count, clone.bytes, clone.allocated_bytes) == (1, 2 * q_bytes, q_bytes)


def test_a_wrong_cell_has_no_profile(tmp_path, monkeypatch):
    wrong = replace(IMPLEMENTATIONS.get("naive"), build=lambda case: lambda q, k, v: v * 1.0)
    monkeypatch.setattr("attnbench.worker.measuring.implementation", lambda name: wrong)
    found = trace(tmp_path)
    assert (found.status, found.profile) == ("incorrect", None)
    assert "is off by" in found.reason
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_would_be_too_large_is_refused_before_anything_is_checked(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tracing, "MOST_OPS", 3)
    monkeypatch.setattr(tracing, "prepare", lambda *_: pytest.fail("it was checked"))
    found = trace(tmp_path)
    assert (found.status, found.profile) == ("skipped", None)
    assert "--seq-lens" in found.reason


def test_costs_that_cannot_be_counted_are_unknown_and_the_note_says_why(tmp_path, monkeypatch):
    def fails(*_):
        raise ValueError("no formula")

    monkeypatch.setattr(tracing, "op_costs", fails)
    found = trace(tmp_path).profile
    assert {(op.flops, op.bytes) for op in found.ops} == {(None, None)}
    figures = {note.code: note.figures for note in found.notes}
    assert "no formula" in figures["no-costs"]["error"]


def call(counts, launched_by=None):
    return ops.CallSeen(
        total_us=10.0, counts=Counter(counts), self_us=dict.fromkeys(counts, 1.0),
        gaps_us=0.0, launched_by=launched_by or {},
    )  # fmt: skip


def test_costs_of_an_op_that_the_profiler_saw_another_number_of_times_are_unknown():
    costs = OpCosts()
    costs.counts.update({"aten::add": 6, "aten::bmm": 2})
    costs.bytes.update({"aten::add": 60, "aten::bmm": 20})
    rows = {row.name: row for row in op_rows([call({"aten::add": 1, "aten::bmm": 2})], costs, [])}
    assert (rows["aten::add"].bytes, rows["aten::bmm"].bytes) == (None, 20)


def test_a_kernel_has_the_costs_of_its_op_where_neither_has_another():
    costs = OpCosts()
    costs.counts.update({"aten::bmm": 2, "aten::sum": 1, "aten::mm": 1})
    costs.flops.update({"aten::bmm": 100, "aten::mm": 7})
    by = {"gemm": {"aten::bmm"}, "reduce": {"aten::sum"}, "split": {"aten::mm"}, "k": {"aten::mm"}}
    seen = call({"gemm": 2, "reduce": 1, "split": 1, "k": 1}, by)
    rows = {
        row.name: (row.flops, row.bytes, row.allocated_bytes) for row in op_rows([seen], costs, [])
    }
    assert rows["gemm"] == (100, None, None)
    assert rows["split"] == rows["k"] == (None, None, None), "two kernels share the op"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_samples_and_the_profiler_take_turns_but_on_a_gpu_nothing_is_timed_after_it(
    monkeypatch, device
):
    did = []

    def session(_, device, calls, before=None):
        did.append("profiler")
        return [call({"aten::bmm": 2})] * calls

    class Steady(HostClock):
        def batch(self, call, calls):
            did.append("batch")
            return Batch(time_us=10.0, e2e_us=10.0)

    monkeypatch.setattr(ops, "run_session", session)
    monkeypatch.setattr(ops, "calls_of", lambda found, device: found)
    target = Target(call=lambda: None, calls=1, each_us=40_000.0)
    batches, seen = tracing._rounds(target, Steady(), device, lambda stage: None)
    turns = [*["batch", "profiler"] * 3] if device == "cpu" else [*["batch"] * 3, "profiler"]
    assert did == turns
    assert len(batches) == len(seen) == 3, "calls in a row count as one"


CEILINGS = {"matmul_tflops": {"float32": 0.1}, "read_gbps": 8.0, "copy_gbps": 10.0,
            "cache_bytes": 1000}  # fmt: skip


@pytest.mark.parametrize(("flops", "bytes_", "count", "expected"), [
    (1e6, None, 1, (0.5, "matmul")),  # 10 µs of 20
    (None, 1e5, 1, (0.5, "memory")),
    (1e6, 1.5e5, 1, (0.75, "memory")),  # what takes longer binds
    (1e6, 900, 1, (0.5, "matmul")),
    (None, 900, 1, (None, None)),  # in the cache: no ceiling is known
    (None, 5000, 10, (None, None)),  # of ten ops, each in the cache
    (None, None, 1, (None, None)),
])  # fmt: skip
def test_the_share_is_of_the_ceiling_that_binds(flops, bytes_, count, expected):
    op = Op(name="x", count=count, self_us=20.0, flops=flops, bytes=bytes_)
    found = with_share(op, "float32", CEILINGS)
    assert (found.share, found.ceiling) == expected
    assert with_share(op, "float32", {}).share is None


def test_the_commands_of_other_profilers_start_this_cell_and_take_its_calls_alone(tmp_path):
    found = commands(Settings(files=("/my kernels/own.py",)), tmp_path)
    for name, range_ in (("nsys", "--capture-range=cudaProfilerApi"), ("ncu", f"{CALL}/")):
        words = shlex.split(found[name])
        assert words[0] == name
        assert range_ in words
        assert words[-5:] == [
            sys.executable, "-m", "attnbench.worker.calling", str(tmp_path / "profile.json"),
            "/my kernels/own.py",
        ]  # fmt: skip
    assert commands(Settings(python="/other/python", lent="/gone"), tmp_path) == {}


def test_the_process_that_other_profilers_start_calls_the_cell_of_the_profile(
    tmp_path, monkeypatch, capsys
):
    files = []
    monkeypatch.setattr("attnbench.machine.state.remember", lambda threads: None)
    monkeypatch.setattr("attnbench.api.loader.load_file", lambda file, replace: files.append(file))

    def started(name):
        file = write_profile(tmp_path, profile(*NAIVE, impl=name))
        monkeypatch.setattr(sys, "argv", ["tracing", str(file), "own.py"])
        with pytest.raises(SystemExit) as ended:
            # By its path: the loader that pytest may have put around the package runs no modules.
            runpy.run_path(calling.__file__, run_name="__main__")
        return ended.value.code, capsys.readouterr()

    code, printed = started("naive")
    assert (code, printed.out, files) == (0, "5 calls of naive\n", ["own.py"])
    code, printed = started("nobodys")
    assert code == 2
    assert printed.err.startswith("Error: unknown implementation 'nobodys'")


OWN = """
from attnbench.api import attention

@attention("own")
def own(q, k, v, *, causal, scale):
    return ((q * scale) @ k.mT).softmax(-1) @ v
"""


def test_on_a_gpu_each_phase_is_a_range_and_only_the_calls_are_captured(tmp_path, monkeypatch):
    log = []
    bound = Bound(call=lambda: log.append("call"), named=lambda o: {"o": o}, grad=False)

    def built(case, impl, seed):
        log.append("built")
        return Trial(impl=IMPLEMENTATIONS.get("naive"), case=case, tensors={}, bound=bound)

    monkeypatch.setattr(calling, "built", built)
    monkeypatch.setattr(calling, "remember", lambda threads: None)
    monkeypatch.setattr("attnbench.worker.trial.restore_settings", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", log.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("end"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: log.append(name))
    write_profile(tmp_path, profile(*NAIVE, case=Case(device="cuda").to_json()))
    assert calling.run_alone(tmp_path / "profile.json", ()) == 0
    one = [CALL, "call", "wait", "end"]
    assert log == [
        "attnbench-build", "built", "wait", "end",
        "attnbench-warm-up", "call", "wait", "end", "start", *one * calling.CALLS_ALONE, "stop",
    ]  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), [
    (["naive", "--seq-lens", "64,128"], ["--seq-lens 64,128", "one value"]),
    (["naive", "--masks", "full,causal"], ["--masks full,causal", "one value"]),
    (["naive", "--threads", "1,2"], ["--threads 1,2", "one value"]),
    (["naive", "sdpa", "chunked"], ["3 implementations", "two are"]),
    (["naive", "sdpa", "--base", "HEAD"], ["--python", "--base"]),
    (["naive", "--base", "HEAD"], ["--base", "--impl FILE"]),
    (["naive", "--python", "/no/python"], ["--python /no/python", "cannot be run"]),
])  # fmt: skip
def test_what_cannot_be_profiled_is_one_line_and_writes_nothing(
    cli, assert_refused, tmp_path, monkeypatch, arguments, says
):
    monkeypatch.chdir(tmp_path)
    assert_refused(cli("profile", *arguments), *says)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_stays_though_nobody_reads_on_and_one_that_fails_leaves_nothing(
    cli, tmp_path, monkeypatch
):
    def profiled(subject, case, folder):
        write_profile(folder, profile(*NAIVE))
        if subject.impl == "sdpa":
            raise NotProfiledError("sdpa has no profile: incorrect: by far", "incorrect")
        return profile(*NAIVE)

    def closed(*_):
        raise BrokenPipeError

    monkeypatch.setattr("attnbench.execution.profiling.profile_subject", profiled)
    monkeypatch.setattr(sys.modules["attnbench.cli.profile"], "_show", closed)
    output = ["--output", tmp_path / "new", "--name"]
    done = cli("profile", "naive", "sdpa", *output, "failed")
    assert (done.exit_code, done.stderr) == (1, "Error: sdpa has no profile: incorrect: by far\n")
    assert list(tmp_path.iterdir()) == []
    cli("profile", "naive", *output, "kept")
    assert read_profile(tmp_path / "new" / "kept") == profile(*NAIVE)


@pytest.mark.slow
def test_a_cell_of_a_run_is_profiled_with_its_file_and_a_second_name_in_its_case(
    cli, assert_refused, tmp_path, monkeypatch, run_of_two
):
    (tmp_path / "own.py").write_text(OWN)
    run = run_of_two(tmp_path)
    low = CEILINGS | {"matmul_tflops": {"float32": 1e-9}}
    measured = [low, low, CEILINGS, low]
    monkeypatch.setattr(LocalRunner, "ceilings", lambda *_: measured.pop())
    arguments = ["profile", "own", "--from", run, "--output", tmp_path, "--name", "own"]
    done = cli(*arguments, "--top", 2)
    assert done.exit_code == 0, done.output
    assert "suspect" not in done.stdout, "the first time the ceiling was measured too low"
    assert "suspect: aten::" in cli(*arguments[:-1], "above").stdout
    found = read_profile(tmp_path / "own")
    assert found.cell.case.seq_len == 32, "the larger of two"
    assert found.environment["torch"] == torch.__version__
    assert found.ops[0].share
    lines = done.stdout.splitlines()
    assert "--seq-lens 32" in lines[0]
    assert "largest n of 2" in lines[0]
    first = next(i for i, line in enumerate(lines) if line.startswith("op ")) + 2
    assert [line.split()[0] for line in lines[first:][:2]] == [op.name for op in found.ops[:2]]
    assert lines[first + 2].split()[1] == "more"
    assert f"trace:  {tmp_path / 'own' / 'trace.json.gz'}" in done.stdout
    assert_refused(cli(*arguments), "own", "--name")
    assert_refused(cli(*arguments[:-2], "--masks", "causal"), "no ok record of own")
    assert_refused(cli(*arguments[:-2], "--masks", "causal,full"), "one value")
    wrong = cli("profile", "nowhere", "--from", run, "--output", tmp_path)
    assert_refused(wrong, "no record of nowhere", "in it: own")


@pytest.fixture
def run_of_two():
    def make(folder):
        own = folder / "own.py"
        info = {"settings": {"files": [str(own)]}, "files": {str(own): digest(own)}}
        sample = Sample(time_us=5.0, e2e_us=5.0, round=0, position=0, calls=1)
        with new_run(folder, "run", info) as made:
            for n in (32, 16):
                cell = Cell(case=replace(CASE, seq_len=n, kv_len=n), impl="own")
                made.append(Record(cell=cell, status="ok", samples=(sample,)).to_line())
            skipped = Cell(case=replace(CASE, seq_len=64, kv_len=64), impl="own")
            made.append(Record(cell=skipped, status="oom", reason="too large").to_line())
        return folder / "run"

    return make
