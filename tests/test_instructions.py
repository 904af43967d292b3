"""Instructions of a call: what Callgrind is asked, and that a count which is not there is null."""

import os
from pathlib import Path
from typing import get_args

import pytest
import torch

from attnbench.execution.process import Settings
from attnbench.execution.profiling import count_instructions
from attnbench.machine.callgrind import VARIABLE, under_callgrind
from attnbench.measure import instructions as measured
from attnbench.report.profile import one
from attnbench.schema.case import Case
from attnbench.schema.profile import Counter, Unknown, write_profile
from attnbench.worker import calling
from tests.test_profile import profile


def program(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder whose programs are found first; without a `valgrind` or `vgdb` elsewhere."""
    found = [d for d in os.environ["PATH"].split(":") if not (Path(d) / "valgrind").exists()]
    (folder := tmp_path / "bin").mkdir()
    if not any((Path(d) / "env").exists() for d in found):
        program(folder, "env", '/usr/bin/env "$@"')
        program(folder, "sleep", '/usr/bin/sleep "$@"')
    monkeypatch.setenv("PATH", ":".join([str(folder), *found]))
    return folder


@pytest.fixture
def switched(tmp_path, tools, monkeypatch):
    """What is switched and called, in order; Callgrind says 40 instructions a call."""
    order: list[str] = []
    program(tools, "vgdb", "exit 0")
    dumps = tmp_path / "callgrind"

    def dump() -> None:
        order.append("dump")
        counted = order[order.index("toggle") :].count("call")
        for number in (2, 10):  # the newest is the tenth
            text = f"events: Ir\ntotals: {40 * counted if number == 10 else 7}\n"
            Path(f"{dumps}.{number}").write_text(text)

    monkeypatch.setattr(torch._C, "_valgrind_toggle", lambda: order.append("toggle"))
    monkeypatch.setattr(torch._C, "_valgrind_toggle_and_dump_stats", dump)
    monkeypatch.setattr(measured, "_instrument", lambda state: order.append(state))
    return order, dumps


def test_only_calls_after_a_warm_up_are_counted_and_the_newest_file_says_how_many(switched):
    order, dumps = switched
    assert measured.instructions(lambda: order.append("call"), dumps) == 40
    assert order[:30] == ["call"] * 30
    assert order[30:] == ["on", "toggle", *["call"] * 20, "dump", "off"]


@pytest.mark.parametrize(("flops", "calls"), [(None, 20), (4e6, 20), (1e8, 4), (1e12, 1)])
def test_how_many_calls_are_counted_depends_on_flops_and_not_on_time(switched, flops, calls):
    order, dumps = switched
    measured.instructions(lambda: order.append("call"), dumps, flops)
    assert order[order.index("toggle") : order.index("dump")].count("call") == calls


def test_where_callgrind_cannot_be_reached_nothing_is_counted(tools, tmp_path):
    program(tools, "vgdb", "exit 3")
    with pytest.raises(OSError, match="exit code 3"):
        measured.instructions(lambda: None, tmp_path / "callgrind")


def test_the_process_is_told_where_the_files_lie_and_hashes_strings_as_every_other(tmp_path):
    command = under_callgrind(["python", "-V"], tmp_path / "dumps")
    assert f"{VARIABLE}={tmp_path / 'dumps'}" in command
    assert "PYTHONHASHSEED=0" in command
    assert f"--callgrind-out-file={tmp_path / 'dumps'}" in command
    assert command[-2:] == ["python", "-V"]


@pytest.mark.parametrize(
    ("script", "counter"),
    [
        ("echo 116677.5", Counter(116677.5)),
        ("exit 1", Counter(None, "not-emulated")),
        ("echo no number", Counter(None, "not-emulated")),
        ("kill -ILL $$", Counter(None, "not-emulated")),
        ("exec sleep 60", Counter(None, "not-emulated")),
        (None, Counter(None, "no-valgrind")),
    ],
)
def test_what_valgrind_does_not_count_is_null_with_the_reason(tools, tmp_path, script, counter):
    if script is not None:
        program(tools, "valgrind", script)
        program(tools, "vgdb", "exit 0")
    settings = Settings(timeout_s=0.5 if script == "exec sleep 60" else 60.0)
    assert count_instructions(settings, tmp_path / "profile.json") == counter


def test_a_process_that_callgrind_runs_prints_the_count_of_its_cell_alone(
    tmp_path, monkeypatch, capsys
):
    seen = []

    def instructions(call, dumps, flops):
        seen.append((dumps, flops))
        return 123.5

    monkeypatch.setenv(VARIABLE, str(tmp_path / "dumps"))
    monkeypatch.setattr(calling, "instructions", instructions)
    case = Case(seq_len=8, kv_len=8)
    file = write_profile(tmp_path, profile(case=case.to_json(), impl="sdpa"))
    assert calling.run_alone(file, ()) == 0
    assert capsys.readouterr().out == "123.5\n"
    assert seen == [(tmp_path / "dumps", 4 * case.heads * 8 * 8 * case.head_dim)]


def test_a_profile_shows_the_count_or_why_there_is_none_and_nothing_unasked():
    def line(counter):
        return [x for x in one.sentences(profile(instructions=counter)) if "Callgrind" in x]

    assert line(None) == []
    assert line(Counter(116677.0)) == ["instructions of a call on the host, by Callgrind: 116,677"]
    for reason in get_args(Unknown):
        (shown,) = line(Counter(None, reason))
        assert "unknown: " in shown
        assert shown.count(" ") > 8
