import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnbench.base.files import cache_folder
from attnbench.base.jsontext import sealed, unsealed
from attnbench.errors import StoreError
from attnbench.schema.case import Case
from attnbench.schema.record import Cell, Record, Sample
from attnbench.store.folder import GATE, SWEEP, RunFolder
from attnbench.store.runs import load_run, new_run
from tests import synthetic


def record(n: int = 64, impl: str = "naive") -> Record:
    samples = tuple(
        Sample(round=i, position=0, calls=2, time_us=10.5 + i, e2e_us=11.0) for i in range(3)
    )
    return Record(
        cell=Cell(case=Case(seq_len=n), impl=impl), status="ok", samples=samples,
        metrics={"flops_useful": 12, "kernel": "aten::bmm"}, spent_s={"check": 0.5},
    )  # fmt: skip


@pytest.fixture
def writer(tmp_path):
    with new_run(tmp_path, "r", {"created": "2026-01-01T00:00:00+00:00"}) as opened:
        yield opened


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "ok"},
        {"status": "oom"},
        {"status": "oom", "reason": "r", "samples": record().samples},
        {"status": "fine", "reason": "r"},
    ],
)
def test_a_record_cannot_contradict_itself(fields):
    with pytest.raises(ValueError, match="status"):
        Record(cell=record().cell, **fields)


def test_half_a_surrogate_pair_in_a_reason_can_be_written_after_it_was_read():
    bad = Record(cell=record().cell, status="error", reason="one half: \ud800")
    again = Record.from_line(bad.to_line())
    assert again.reason == "one half: \ufffd"
    assert again.reason.encode()


@pytest.mark.parametrize("error", [1e30, 1.7e308])
def test_however_wrong_a_result_is_its_record_can_be_read(error):
    wrong = Record(
        cell=record().cell, status="incorrect", reason="wrong", metrics={"error_max": error}
    )
    assert Record.from_line(wrong.to_line()) == wrong


def test_nan_cannot_be_stored():
    broken = Record(cell=record().cell, status="ok", samples=record().samples, metrics={"x": 1e999})
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.to_line()


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_run_killed_in_mid_write_loads_and_continues(writer, cut):
    writer.append(record().to_line(), record(128).to_line())
    writer.close()
    file = writer.path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-cut])
    assert load_run(writer.path).records == [record()]
    with writer.lock() as again:
        again.append(record(256).to_line())
    assert load_run(writer.path).records == [record(), record(256)]


def test_unnamed_runs_that_begin_in_the_same_moment_have_folders_of_their_own(
    tmp_path, monkeypatch
):
    moment = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    monkeypatch.setattr("attnbench.store.folder.datetime", SimpleNamespace(now=lambda _: moment))
    names = [RunFolder.create(GATE, tmp_path, None).path.name for _ in range(3)]
    assert names == [f"gate-20260102-030405-678{more}" for more in ("", "-2", "-3")]


EDITED = {
    "a time of zero": ("samples", {"time_us": [0.0] * 3}),
    "a time that is infinite": ("samples", {"time_us": [float("inf")] * 3}),
    "a time that is a text": ("samples", {"time_us": ["3"] * 3}),
    "a block of NaN": ("samples", {"blocks_us": [[1.0, float("nan")]] * 3}),
    "samples that are none": ("samples", None),
    "a metric that is a table": ("metrics", {"error_max": {"a": 1}}),
}


@pytest.mark.parametrize(("part", "change"), EDITED.values(), ids=EDITED)
def test_a_record_with_numbers_that_cannot_be_is_refused(part, change):
    row = json.loads(record(64).to_line())
    row[part] = change if change is None else row[part] | change
    del row["checksum"]
    with pytest.raises(StoreError, match="not an attnbench record"):
        Record.from_line(sealed(json.dumps(row)))


def test_a_run_of_another_schema_is_named_as_that_and_not_as_damaged(tmp_path):
    run = synthetic.write_named(tmp_path, "one")
    info = json.loads(unsealed((run / "run.json").read_bytes())) | {"schema": 2}
    (run / "run.json").write_text(sealed(json.dumps(info)))
    with pytest.raises(StoreError, match=r"run.json has schema 2; this version reads \d+: measure"):
        load_run(run)


def test_two_sweeps_never_write_to_one_run(writer):
    with pytest.raises(StoreError, match="another sweep"):
        RunFolder(SWEEP, writer.path).lock()
    writer.close()
    RunFolder(SWEEP, writer.path).lock().close()


def test_the_cache_folder_is_where_the_user_says_by_an_absolute_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, folder in (
        (str(tmp_path / "own"), tmp_path / "own"), ("relative", tmp_path / ".cache"),
        ("", tmp_path / ".cache"),
    ):  # fmt: skip
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_folder() == folder / "attnbench"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(FileNotFoundError, match="no home directory is known; set XDG_CACHE_HOME"):
        cache_folder()
