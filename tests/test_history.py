"""A history: what is kept of a run, which steps are findings, and what may explain them."""

import math
import random
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from attnbench.analysis.history import entries, series
from attnbench.analysis.history.entries import CellLine, Entry
from attnbench.analysis.history.steps import steps
from attnbench.errors import StoreError
from attnbench.schema.case import Case
from attnbench.store.runs import load_run
from tests.synthetic import failed, ok, write_run

HERE = {"device": "cpu", "device_name": "AMD EPYC", "cores": 2, "torch": "2.13.0"}
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
LEAST = 0.05


def made(logs, *, group="", case="case", environments=None):
    """Runs of cells by name; `logs[name][run]` is ln of the time over 1 ms, None where missing."""
    count = len(next(iter(logs.values())))
    return [
        Entry(
            run=f"run-{i}",
            created=(BEGIN + timedelta(days=i)).isoformat(),
            environment=HERE | (environments or {}).get(i, {}),
            cells=tuple(
                CellLine(case, name, "attention n=512", 1000 * math.exp(row[i]), group=group)
                for name, row in logs.items()
                if row[i] is not None
            ),
        )
        for i in range(count)
    ]


def noise(count, seed, sd=0.01):
    rng = random.Random(seed)
    return [rng.gauss(0, sd) for _ in range(count)]


def quiet(count=60, cells=8):
    return {f"impl-{c}": noise(count, c) for c in range(cells)}


def stepped(values, at, by):
    return [x + by * (i >= at) for i, x in enumerate(values)]


def line_of(found, name):
    (line,) = [one for one in found.lines if one.name.startswith(name)]
    return line


def only(entries_, least=LEAST):
    (found,) = series.history(entries_, least)
    return found


def verdicts(entries_, name="impl-0", least=LEAST):
    return [(f.at, f.verdict, f.why) for f in line_of(only(entries_, least), name).found]


def test_a_step_of_the_middle_cell_is_not_taken_for_the_groups():
    # The others of its group scatter widely: in half of the runs it is in the middle.
    logs = {"impl-0": stepped(noise(60, 0), 30, -0.1), "impl-1": noise(60, 1, sd=0.3)}
    rest = made({f"other-{i}": noise(60, i + 9) for i in range(9)}, group="b")
    both = zip(made(logs, group="a"), rest, strict=True)
    found = only([msgspec.structs.replace(a, cells=a.cells + b.cells) for a, b in both])
    (step,) = line_of(found, "impl-0").found
    assert math.isclose(step.step.log, -0.1, abs_tol=0.02)


def test_of_two_implementations_of_a_case_that_move_alike_none_is_a_finding():
    logs = {"impl-0": stepped(noise(60, 0), 30, 0.2)}
    rest = made({f"other-{i}": noise(60, i + 9) for i in range(9)}, group="b", case="other")
    for by, why in ((0.15, ("together",)), (0.0, ())):
        logs["impl-1"] = stepped(noise(60, 1), 30, by)
        both = zip(made(logs), rest, strict=True)
        runs = [msgspec.structs.replace(a, cells=a.cells + b.cells) for a, b in both]
        assert [(at, found) for at, _, found in verdicts(runs)] == [(30, why)]


def test_times_of_another_machine_are_another_series():
    logs = quiet(40)
    there = {i: {"device_name": "Xeon"} for i in range(1, 40, 2)}
    slower = {n: [x + (i % 2) for i, x in enumerate(row)] for n, row in logs.items()}
    found = series.history(made(slower, environments=there), LEAST)
    assert [len(one.runs) for one in found] == [20, 20]
    assert not any(line.found for one in found for line in one.lines)


def test_outliers_hide_no_step():
    row = stepped(noise(80, 1, sd=0.01), 40, 0.08)
    hit = [x + (0.6 if i % 7 == 3 else 0.0) for i, x in enumerate(row)]
    assert [step.at for step in steps(hit, LEAST, tests=80 * 79)] == [40]


def test_what_was_tried_often_must_be_surer():
    row = stepped(noise(20, 0, sd=0.03), 10, 0.06)
    assert len(steps(row, LEAST, tests=1)) == 1
    assert steps(row, LEAST, tests=10**6) == []


def stored(folder, name="first", **info):
    case = Case(seq_len=512)
    records = [ok(case, "naive", group="ab"), ok(case, "sdpa", group="ab")]
    return write_run(folder, name, records, info)


def test_a_run_is_added_once_and_read_as_it_was(tmp_path):
    run = load_run(stored(tmp_path, commit="abc", dirty=True))
    added = entries.add(tmp_path / "kept", run)
    assert entries.add(tmp_path / "kept", run) is None
    assert added is not None
    assert entries.read(tmp_path / "kept") == [added] == [entries.entry_of(run)]
    assert (added.commit, added.dirty) == ("abc", True)
    assert [c.impl for c in added.cells] == ["naive", "sdpa"]
    assert {c.group for c in added.cells} == {added.cells[0].case_id}
    # A run folder that is in the file too counts once.
    (tmp_path / "kept" / "first").symlink_to(run.path)
    assert len(entries.read(tmp_path / "kept")) == 1


def test_only_times_that_can_be_right_are_kept(tmp_path):
    case = Case(seq_len=512)
    records = [ok(case, "naive"), failed(case, "sdpa", "oom", "out of memory")]
    found = entries.entry_of(load_run(write_run(tmp_path, "run", records)))
    assert [c.impl for c in found.cells] == ["naive"]
    # A run of which all failed hides no others, and is not added.
    failed_only = write_run(tmp_path, "none", records[1:])
    assert [entry.run for entry in entries.read(tmp_path)] == ["run"]
    with pytest.raises(StoreError, match="no cell with a time"):
        entries.add(tmp_path, load_run(failed_only))


def test_an_unfinished_run_is_not_added(tmp_path):
    path = stored(tmp_path)
    lines = (path / "records.jsonl").read_text().splitlines(keepends=True)
    (path / "records.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(StoreError, match="--resume"):
        entries.add(tmp_path / "kept", load_run(path))
    assert not (tmp_path / "kept").exists()
