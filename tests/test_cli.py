"""What a user can do wrong on the command line, and what the commands print."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.shell_completion import ShellComplete

import attnbench
from attnbench.api import IMPLEMENTATIONS
from attnbench.api.loader import load_built_in, load_file
from attnbench.cli.commands import main
from attnbench.cli.options import wrapped
from attnbench.errors import UsageError
from attnbench.execution.events import Events, Working
from attnbench.planning.battery import battery
from attnbench.schema.axes import AXES
from attnbench.schema.check import CheckResult
from attnbench.store.runs import INFO, RECORDS
from tests import synthetic
from tests.conftest import COMMAND, environment, exported, run_script, yielding

SIZE_FLAGS = [axis.flag for axis in AXES.values() if axis.kind == "sizes"]
NOT_SIZES = ("0", "-1", "x", "1.5", "1e3", "", ",", "1,,2", "..8", "8..", "²", "٣", "9" * 30,
             "9" * 5000)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a few cells called `made`, in the default output folder."""
    return synthetic.write_named(tmp_path / "results", "one").rename(tmp_path / "results" / "made")


# Wrong usage: what is on the command line, and what the one line must say.

WRONG_SWEEPS = {
    "unknown option": (["--bogus"], ["--bogus"]),
    "stray argument": (["latest"], ["latest"]),
    "unknown device": (["--device", "tpu"], ["--device", "auto", "cpu", "cuda"]),
    "a GPU by its number": (
        ["--device", "cuda:1"],
        ["--device cuda:1", "auto, cpu, cuda", "CUDA_VISIBLE_DEVICES chooses among several"],
    ),
    "unknown implementation": (["--impls", "naiv"], ["--impls", "'naive'?", "sdpa-math"]),
    "unknown mask": (["--masks", "casual"], ["--masks", "'causal'?", "full, causal, window"]),
    "window without width": (["--masks", "window"], ["--masks", "needs its width"]),
    "causal with parameter": (["--masks", "causal:3"], ["--masks", "no parameter"]),
    "a mask by another name": (["--masks", "sliding:64"], ["--masks", "mean 'window'?", "full"]),
    "a method for a cache": (["--caches", "gqa"], ["--caches", "--kv-heads 8,2", "static"]),
    "a method for implementations": (["--impls", "longformer"], ["'sliding-window' or 'dil"]),
    "unknown position": (["--positions", "ropes"], ["--positions", "'rope'?", "none"]),
    "rope with a bad base": (["--positions", "rope:x"], ["--positions", "base is a number"]),
    "unknown workload": (["--workload", "decoder"], ["--workload", "'decode'?", "attention"]),
    "unknown cache": (["--workload", "decode", "--caches", "statik"], ["--caches", "'static'?"]),
    "projection without such a parameter": (
        ["--workload", "layer", "--projections", "fused:2"], ["takes none", "--projections"]
    ),
    "impossible rank": (
        ["--workload", "layer", "--projections", "mla:rank=x"], ["rank is a whole number", "'x'"]
    ),
    "no such parameter": (
        ["--impls", "performer:rank=4"], ["no parameter 'rank'; it takes features, chunk, seed"]
    ),
    "too few": (["--impls", "performer:0"], ["features is a whole number, 1 or more, not '0'"]),
    "a parameter without a value": (["--impls", "performer:"], ["features is a whole number"]),
    "a parameter twice": (["--impls", "performer:seed=1:seed=2"], ["seed is given twice"]),
    "not a number": (["--positions", "rope-partial:nan"], ["share is a number", "not 'nan'"]),
    "unknown projection": (
        ["--workload", "layer", "--projections", "fusd"], ["--projections", "'fused'?"]
    ),
    "too many processes": (["--processes", "101"], ["--processes"]),
    "unknown dtype": (["--dtypes", "float8"], ["--dtypes", "bfloat16"]),
    "unknown pass": (["--passes", "sideways"], ["--passes", "forward, backward, both"]),
    "an axis that no workload of a preset has": (
        ["--preset", "quick", "--projections", "fused"],
        ["--projections does not apply to --workload attention; it does to layer"],
    ),
    "a model's name that no file can have": (["--model", "x" * 300], ["unknown model 'xxx"]),
    "a model and a preset": (
        ["--model", "bert-base", "--preset", "quick"], ["take only one of --preset, --model"]
    ),
    "a case with an unknown key": (["--case", "B=2,mak=causal"], ["'mak' (--case B=2", "'mask'?"]),
    "a case with a count of 0": (["--case", "B=2,count=0"], ["--case B=2,count=0: count", "'0'"]),
    "a case without a value": (["--case", "B=2,H"], ["--case B=2,H: write it as KEY=VALUE"]),
    "an empty case": (["--case", ""], ["--case '': write it as KEY=VALUE", "such as B=2,n=512"]),
    "a case's key of another workload": (
        ["--case", "Q=4,n=64"], ["n=64: Q does not apply to workload attention", "decode"]
    ),
    "items of another number": (
        ["--case", "lengths=30+51,B=3"], ["B=3 is not the number of lengths, 2"]
    ),
    "padding longer than the keys": (
        ["--seq-lens", "64", "--masks", "padding:100"],
        ["mask padding:100 has items of 100 keys, of which there are 64"],
    ),
    "a time in another unit": (["--max-total-time", "1ms"], ["--max-total-time", "from 1s on"]),
    "a case with two lengths": (["--case", "L=4,n=5"], ["--case L=4,n=5: n is given twice"]),
    "a case that is two": (["--case", "L=64..128"], ["--case L=64..128: L is given twice"]),
    "a case of sizes that do not fit": (["--case", "H=4,G=3"], ["--kv-heads must divide --heads"]),
    "no file of cases": (["--cases", "none.csv"], ["cannot read none.csv (--cases): No such file"]),
    "unknown model": (["--model", "llama"], ["--model llama:", "'llama-3.1-8b'?", "config.json"]),
    "a step of no model": (["--step", "decode"], ["--step and --tokens go with --model NAME"]),
    "a model's lengths by another flag": (
        ["--model", "bert-base", "--seq-lens", "9"], ["--model takes --tokens, not --seq-lens or"]
    ),
    "an encoder that decodes": (["--model", "vit-b-16", "--step", "decode"], ["no decode step"]),
    "more tokens than positions": (
        ["--model", "bert-base", "--tokens", "1024"], ["it has 512 positions", "--tokens 1024"]
    ),
    "latents in a layer": (
        ["--model", "deepseek-v3", "--workload", "layer"],
        ["layer has not all parts of", "(--workload)"],
    ),
    "no config": (["--model", "no/config.json"], ["cannot read no/config.json: No such file"]),
    "unknown preset": (["--preset", "quik"], ["--preset", "'quick'?", "gpu"]),
    "heads that do not divide": (["--kv-heads", "3"], ["--kv-heads must divide --heads", "3", "4"]),
    "doubling past its end": (["--seq-lens", "128..1000"], ["128..512 or 128..1024"]),
    "reversed doubling": (["--seq-lens", "512..128"], ["512..128 is reversed: 128..512"]),
    "limits of time that contradict each other": (
        ["--min-time", "2", "--max-time", "1"], ["--min-time 2 is above --max-time 1"]
    ),
    "kv-lens in decode": (["--workload", "decode", "--kv-lens", "8"], ["--kv-lens", "decode"]),
    "empty list of names": (["--impls", ""], ["--impls", "a,b,c"]),
    "precision that is no number": (["--precision", "nan"], ["--precision"]),
    "no threads": (["--threads", "0"], ["--threads"]),
    "seed beyond torch's": (["--seed", "9" * 30], ["--seed"]),
    "no GPU": (["--device", "cuda"], ["no CUDA device", "--device cpu"]),
    "no GPU for its preset": (["--preset", "gpu"], ["no CUDA device", "--device cpu"]),
    "name with a separator": (["--name", "a/b"], ["--name", "'a/b'"]),
    "name that means something": (["--name", "latest"], ["--name"]),
    "resume of the latest of none": (["--resume", "latest"], ["no run in results yet"]),
}  # fmt: skip


def test_a_sweep_of_which_nothing_can_run_says_why_and_leaves_no_folder(
    cli, assert_refused, tmp_path
):
    small = ("--seq-lens", "16", "--masks", "window:4", "--output", tmp_path / "o")
    assert_refused(cli("sweep", "--impls", "performer", *small), "performer: ", "window:4")
    assert not (tmp_path / "o").exists()


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize(("args", "says"), WRONG_SWEEPS.values(), ids=WRONG_SWEEPS)
def test_a_wrong_sweep_is_one_line_that_names_the_flag_and_nothing_is_written(
    cli, assert_refused, tmp_path, args, says
):
    assert_refused(cli("sweep", *args), *says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", NOT_SIZES, ids=lambda text: repr(text[:8]))
def test_what_is_no_size_is_refused_by_every_axis(cli, assert_refused, text):
    for flag in SIZE_FLAGS:
        assert_refused(cli("sweep", flag, text), flag)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["bogus"], ["bogus"]),
        (["list", "nayve"], ["nayve", "'naive'?"]),
        (["check", "--dtypes", "float8"], ["--dtypes", "float16"]),
        (["check", "--watch"], ["--watch", "--impl FILE"]),
        (["check", "--impls", "naiv", "--device", "cpu"], ["--impls", "'naive'?"]),
        (["export", "--format", "xlsx"], ["--format", "parquet"]),
        (["report", "a", "b"], ["b"]),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("imagined_worker")
def test_other_commands_refuse_in_one_line_too(cli, assert_refused, args, says):
    assert_refused(cli(*args), *says)


# Runs and folders that are not there, taken, damaged or someone else's.


READING = (["report"], ["export"], ["verify"], ["claims"], ["sweep", "--resume"])


def test_of_many_runs_the_last_are_named_and_the_others_counted(cli, assert_refused, run):
    for number in range(9):
        shutil.copytree(run, run.parent / f"copy{number}")
    assert_refused(cli("report", "nosuch", "--output", run.parent), " and 2 more")


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_a_run_that_cannot_be_read_is_one_line(cli, assert_refused, run, command):
    assert_refused(cli(*command, "mode"), "no run 'mode'", "'made'?")
    assert_refused(cli(*command, "x" * 300), "no run 'xxx")
    assert_refused(cli(*command, "../.."), "is not a run: no run.json")
    assert_refused(cli(*command, ""), "a run without a name")
    records = run / RECORDS
    line = records.read_text()
    records.write_text(line + line[: len(line) // 2] + "\n" + line)
    assert_refused(cli(*command, "made"), RECORDS, "line 2")
    (run / "run.json").unlink()
    assert_refused(cli(*command, "made"), "made is not a run: no run.json")


@pytest.mark.parametrize(
    "damage",
    [
        {"plan": [3]},
        {"plan": [{"case": [], "impl": "naive"}]},
        {"plan": [{"case": {"mask": 3}, "impl": "naive"}]},
        {"plan": None},
        {"settings": {"bogus": 1, "files": []}},
    ],
    ids=json.dumps,
)
@pytest.mark.usefixtures("imagined_worker")
def test_a_plan_that_is_damaged_is_not_resumed(cli, assert_refused, damage):
    assert cli("sweep", "--impls", "naive", "--name", "r").exit_code == 0
    file = Path("results/r/run.json")
    synthetic.edit(file, lambda info: {k: v for k, v in info.items() if k != "planned"} | damage)
    assert_refused(cli("sweep", "--resume", "r"), "run.json", "plan" if "plan" in damage else "")


@pytest.mark.usefixtures("imagined_worker")
def test_a_taken_name_or_a_file_for_a_folder_is_refused_and_left_alone(cli, assert_refused, run):
    before = {file: file.read_bytes() for file in run.iterdir()}
    assert_refused(cli("sweep", "--name", "made"), "--name", "--resume made")
    for output in (run / RECORDS, run / RECORDS / "below"):
        assert_refused(cli("sweep", "--output", output), "--output")
    assert {file: file.read_bytes() for file in run.iterdir()} == before


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize(
    "option",
    [("--impls", "naive"), ("--impl", "x.py"), ("--seed", "0"), ("--preset", "quick")],
    ids="".join,
)
def test_options_beside_resume_are_refused(cli, assert_refused, run, option):
    assert_refused(cli("sweep", "--resume", "made", *option), "--resume", f"remove {option[0]}")


def test_on_a_narrow_terminal_no_word_is_split_and_each_command_has_its_whole_sentence(
    cli, monkeypatch
):
    text = "[1/8]  614 µs naive-heads: attention forward n=128 results/a-long-name/records.jsonl"
    assert wrapped(text) == text
    for columns in (20, 44, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert wrapped(text).split() == text.split()
        assert min(map(len, wrapped(text).splitlines())) <= columns
        refused = cli("sweep", "--seq-lens", "8..4").stderr.splitlines()
        assert max(map(len, refused)) <= columns
    shown = cli("--help").stdout.replace("[ARGS]...", "")
    assert "..." not in shown
    assert "against a run." in shown


# What makes sense only in part is run in part.


@pytest.mark.usefixtures("imagined_worker")
def test_a_dry_run_prints_the_plan_and_writes_nothing(cli, tmp_path):
    result = cli("sweep", "--impls", "naive", "--seq-lens", "8,16", "--dry-run")
    assert result.exit_code == 0
    assert "2 cells to measure" in result.stdout
    assert list(tmp_path.iterdir()) == []
    assert cli("sweep", "--impls", "naive", "--name", "r").exit_code == 0
    (Path("results/r") / RECORDS).write_bytes(b"")
    before = sorted(Path().rglob("*"))
    assert "1 cell to measure" in cli("sweep", "--resume", "r", "--dry-run").stdout
    assert sorted(Path().rglob("*")) == before
    assert exported(Path("results/r")) == []


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize("preset", ["gpu", "verify-gpu"])
def test_a_preset_for_a_gpu_runs_on_a_cpu_that_is_asked_for(cli, preset):
    result = cli("sweep", "--preset", preset, "--device", "cpu", "--dry-run")
    assert result.exit_code == 0, result.stderr


# A user's own file.

WRONG_FILES = {
    "does not parse": ("def (", "SyntaxError"),
    "raises": ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
    "exits": ("raise SystemExit(0)", "SystemExit"),
    "imports what is not there": ("import no_such_module", "no_such_module"),
    "registers nothing": ("import attnbench.api", "registers no implementation"),
    "registers a taken name": (
        "from attnbench.api import attention\n@attention('naive')\ndef f(q, k, v): ...",
        "'naive' is already registered",
    ),
    "registers an unusable name": (
        "from attnbench.api import attention\n@attention('two words')\ndef f(q, k, v): ...",
        "one word",
    ),
    "declares what nobody knows": (
        "from attnbench.api import attention\n@attention('mine', speed=9)\ndef f(q, k, v): ...",
        "unexpected keyword argument 'speed'",
    ),
}


@pytest.mark.parametrize(("source", "says"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_named_with_what_is_wrong_and_leaves_nothing_registered(
    tmp_path, source, says
):
    load_built_in()
    before = IMPLEMENTATIONS.names()
    file = tmp_path / "wrong.py"
    file.write_text(source)
    with pytest.raises(UsageError) as caught:
        load_file(str(file))
    for text in (str(file), "--impl", says):
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert IMPLEMENTATIONS.names() == before
    for name in ("gone.py", tmp_path):
        with pytest.raises(UsageError, match="--impl"):
            load_file(str(name))


# Export.


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_file_holds_what_standard_output_would(cli, run, kind):
    printed = cli("export", run, "--format", kind).stdout
    assert cli("export", run, "--format", kind, "--to", "table").output == ""
    assert Path("table").read_text(encoding="utf-8") == printed


def test_parquet_is_a_file_that_pandas_reads(cli, assert_refused, run):
    assert_refused(cli("export", run, "--format", "parquet"), "--to FILE")
    assert cli("export", run, "--format", "parquet", "--to", "t.parquet").output == ""
    assert pd.read_parquet("t.parquet")["seq_len"].tolist() == [128]


COMMITTED = Path(__file__).parent / "runs" / "busy"


def test_an_export_for_a_paper_has_the_rows_asked_for_and_rounded_numbers(cli, assert_refused):
    where = ("--where", "mask == 'causal' and pass == 'forward' and seq_len == 512")
    latex = cli("export", COMMITTED, "--format", "latex", *where).stdout
    assert latex.count(r" \\") == 4
    assert r"implementation & time (ms) [95 \%] & speed" in latex
    raw = cli("export", COMMITTED, "--format", "latex", "--raw", *where).stdout
    assert "time (µs)" in raw and "memory workspace (B)" in raw  # noqa: PT018
    assert_refused(cli("export", COMMITTED, "--raw"), "--raw is for latex and markdown: csv is raw")
    assert_refused(cli("export", COMMITTED, "--figure", "time"), "attnbench report ")
    both = cli(
        "export", COMMITTED, "--format", "latex", "--where", "workload == 'attention'"
    ).stdout
    cases = attnbench.load(COMMITTED).query("workload == 'attention'")["case_id"].nunique()
    assert both.count(r"\midrule") == cases
    frame = attnbench.load(COMMITTED)
    row = frame[(frame["mask"] == "causal") & (frame["seq_len"] == 512)].iloc[0]
    names = ("--columns", "impl,seq_len,speedup_low,speedup,speedup_high,time_us,status", *where)
    _, rule, line, *_ = cli("export", COMMITTED, "--format", "markdown", *names).stdout.splitlines()
    assert rule == "| --- | ---: | ---: | ---: | ---: | ---: | --- |"
    impl, n, low, speedup, high, time_us, status = line.strip("| ").split(" | ")
    assert (impl, n, status) == ("sdpa", "512", "ok")
    assert float(low) <= float(speedup) <= float(high)
    assert len(speedup) <= 4
    assert float(speedup) == pytest.approx(
        row["speedup"], abs=row["speedup_high"] - row["speedup_low"]
    )
    assert float(time_us) == pytest.approx(row["time_us"] / 1e3, rel=0.1), "in ms, as its median is"
    for wrong, hint in (("seqlen > 3", "'seq_len'"), ("seq_len >", "syntax"), ("1 + 1", "true")):
        assert_refused(cli("export", COMMITTED, "--where", wrong), "--where", hint)
    assert_refused(cli("export", COMMITTED, "--columns", "speed"), "'speedup'")


def test_another_baseline_needs_no_new_run(cli, assert_refused):
    frame = attnbench.load(COMMITTED, baseline="chunked")
    assert (frame[frame["impl"] == "chunked"]["speedup"] == 1).all()
    assert cli("export", COMMITTED, "--baseline", "chunked").stdout.count(",chunked,1.0,") > 0
    shutil.copytree(COMMITTED, "busy")
    assert cli("report", "busy", "--baseline", "chunked").exit_code == 0
    assert "speed vs chunked" in Path("busy/report.md").read_text()
    for command in ("report", "export"):
        assert_refused(cli(command, "busy", "--baseline", "spda"), "--baseline", "'sdpa'", "naive")
    functions: list[Any] = [attnbench.load, attnbench.report]
    for function in functions:
        with pytest.raises(UsageError, match=r"unknown implementation 'spda' \(baseline=…\)"):
            function(COMMITTED, baseline="spda")


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_a_target_that_cannot_be_written_is_named(cli, assert_refused, run, kind):
    for target in ("gone/table", "results"):
        assert_refused(cli("export", run, "--format", kind, "--to", target), "cannot write")


def write_to(stdout: int, args: list[str]) -> tuple[int, str]:
    """Run a command with this standard output; return its exit code and standard error."""
    ended = subprocess.run(
        [*COMMAND, *args], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment(),
        timeout=60, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stderr


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(("command", "code"), [("export", 0), ("verify", 141)])
def test_a_closed_pipe_ends_a_command_quietly_and_passes_for_no_verdict(command, code):
    read, write = os.pipe()
    os.close(read)
    try:
        assert write_to(write, [command]) == (code, "")
    finally:
        os.close(write)


@pytest.mark.usefixtures("run")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_standard_output_is_one_line():
    with Path("/dev/full").open("w") as full:
        code, stderr = write_to(full.fileno(), ["export"])
    assert code == 2
    assert stderr == "Error: cannot write the output (No space left on device)\n"


@pytest.mark.parametrize(
    ("args", "called"),
    [
        (["check"], "attnbench.execution.checks.run_checks"),
        (["sweep"], "attnbench.execution.session.sweep"),
    ],
)
def test_an_interrupt_at_any_moment_exits_with_130(cli, monkeypatch, args, called):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(called, interrupted)
    assert cli(*args).exit_code == 130


@pytest.mark.parametrize(
    ("statuses", "code"),
    [("ok", 0), ("ok unsupported", 0), ("ok incorrect", 1), ("crashed", 1), ("unsupported", 2)],
)
def test_a_check_exits_with_1_if_anything_failed_and_with_2_if_nothing_was_checked(
    cli, monkeypatch, statuses, code
):
    item = battery("cpu", ("float32",))[0]
    results = [
        CheckResult(item=item, impl="mine", status=each, reason="r", metrics={})
        for each in statuses.split()
    ]
    monkeypatch.setattr("attnbench.execution.checks.run_checks", lambda **_: yielding(results))
    assert cli("check").exit_code == code


def test_a_watched_file_is_checked_again_when_it_changes_and_a_broken_one_waited_for(
    cli, monkeypatch, tmp_path
):
    file, beside, runs = tmp_path / "k.py", tmp_path / "other.py", []
    file.write_text("1")

    def run(**options: Any) -> Events[list[CheckResult]]:
        runs.append(options)
        if len(runs) == 1:
            raise UsageError("k.py does not import (--impl): SyntaxError")
        if len(runs) == 2:
            file.write_text("123")  # meanwhile: what is checked is out of date
        if len(runs) == 4:
            raise KeyboardInterrupt
        return yielding([], Working("check"))

    def sleep(seconds: float) -> None:
        (beside if len(runs) == 3 else file).write_text("12")

    monkeypatch.setattr("attnbench.execution.checks.run_checks", run)
    monkeypatch.setattr(time, "sleep", sleep)
    ended = cli("check", "--watch", "--impl", file)
    assert (ended.exit_code, len(runs)) == (130, 4)
    assert ended.stderr.startswith("Error: k.py does not import")
    assert ended.stderr.count("waiting") == 2


# Help, listing and completion.


def test_help_loads_nothing_heavy():
    script = """
import sys
from attnbench.cli.commands import main
from attnbench.cli.options import wrapped
from click.shell_completion import ShellComplete
for args in (["--help"], ["--version"], *([name, "--help"] for name in main.commands)):
    main(args, standalone_mode=False)
for name in main.commands:
    ShellComplete(main, {}, "attnbench", "_ATTNBENCH_COMPLETE").get_completions([name], "")
heavy = {"torch", "numpy", "scipy", "pandas", "matplotlib", "pyarrow"} & set(sys.modules)
sys.exit(f"loaded {heavy}" if heavy else 0)
"""
    ended = run_script(script)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_package_names_what_there_is_and_loads_it_when_it_is_called():
    script = """
import sys
import attnbench
from attnbench import advise, load, sweep
heavy = {"torch", "numpy", "scipy", "pandas", "matplotlib", "click", "psutil"} & set(sys.modules)
print(dir(attnbench), sorted(heavy), attnbench.get.__module__)
"""
    names = ["__version__", "advise", "capture", "get", "load", "report", "sweep", "use"]
    ended = run_script(script)
    assert ended.stdout == f"{names} [] attnbench.api.direct\n", ended.stderr


@pytest.mark.usefixtures("imagined_worker")
def test_list_shows_the_catalogue(cli, recorded_catalogue):
    shown = cli("list").stdout
    names = [info.name for info in recorded_catalogue.implementations]
    for kind in ("workloads", "caches", "positions"):
        names += getattr(recorded_catalogue, kind)
    assert [name for name in names if name not in shown] == []
    found = json.loads(cli("list", "--json").stdout)["sections"]
    rows = {
        row["name"]: row for of in found for part in of["parts"] for row in part.get("table", ())
    }
    for info in recorded_catalogue.implementations:
        assert (rows[info.name]["family"], rows[info.name]["memory"]) == (info.family, info.memory)


@pytest.mark.parametrize("python", [shutil.which("false") or "", "/no/such/python"])
def test_a_worker_that_cannot_start_is_one_line_and_no_hang(
    cli, assert_refused, monkeypatch, python
):
    monkeypatch.setattr(sys, "executable", python)
    assert_refused(cli("list"), "a worker", python, exit_code=4)


@pytest.mark.parametrize("output", ["nowhere", "file", "x" * 5000, "a/b", ""])
def test_completion_of_a_folder_that_cannot_be_read_offers_what_has_a_meaning(tmp_path, output):
    (tmp_path / "file").write_text("")
    shell = ShellComplete(main, {}, "attnbench", "_ATTNBENCH_COMPLETE")
    offered = shell.get_completions(["export", "--output", output], "")
    assert [item.type for item in offered] == ["file", "plain", "plain"]
    assert [item.value for item in offered[1:]] == ["latest", "previous"]


# The latest run, and the one before it.


@pytest.mark.usefixtures("imagined_worker")
def test_the_latest_run_is_resumed_in_the_folder_that_output_names(cli, assert_refused, tmp_path):
    there = ("--output", tmp_path / "there")
    for name in ("whole", "half"):
        cli("sweep", "--seq-lens", "8,16", "--impls", "sdpa", "--name", name, *there)
    whole, half = tmp_path / "there" / "whole", tmp_path / "there" / "half"
    synthetic.edit(whole / INFO, lambda info: info | {"created": "2026-01-01"})
    synthetic.edit(half / INFO, lambda info: info | {"created": "2026-01-02"})
    lines = (half / RECORDS).read_text().splitlines(keepends=True)
    (half / RECORDS).write_text(lines[0])
    assert_refused(cli("sweep", "--resume", "latest"), "no run in results yet")
    for name in ("latest", "previous"):  # the other one is complete, which is no error
        assert cli("sweep", "--resume", name, "--quiet", *there).exit_code == 0
    assert len((half / RECORDS).read_text().splitlines()) == len(lines)
    assert len((whole / RECORDS).read_text().splitlines()) == len(lines)
