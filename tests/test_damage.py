"""Files of a run that were cut or changed: nothing that was edited passes for a measurement."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnbench.base.jsontext import sealed, unsealed
from attnbench.errors import StoreError
from attnbench.execution.store import INFO, RECORDS, Run, RunWriter, load_run
from attnbench.report.pages import write_report
from attnbench.schema.case import Case
from tests import synthetic
from tests.conftest import Cli, Refused
from tests.test_report import unwritten


def small(folder: Path, cells: int = 4) -> Path:
    records = [
        synthetic.timed(Case(seq_len=64 << i), "naive", (10.0 + i, 11.5 + i), kernel="bmm")
        for i in range(cells)
    ]
    return synthetic.write_run(folder, "r", records)


def content(run: Run) -> object:
    return run.info, run.records, run.parts


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("intact"), cells=2)


@pytest.mark.parametrize("name", [INFO, RECORDS])
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_byte_of_a_run_can_change_unnoticed(
    intact: Path, name: str, data: st.DataObject
) -> None:
    before, file = load_run(intact), intact / name
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1), label="position")
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != whole[at]), label="byte")
    try:
        file.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        try:
            found = load_run(intact)
            refusal = ""
        except StoreError as err:
            refusal = str(err)
    finally:
        file.write_bytes(whole)
    if refusal:
        assert str(file) in refusal
        assert "\n" not in refusal
    elif name == RECORDS and at == len(whole) - 1:  # the last line is not ended: as if cut off
        assert found.torn
        assert found.records == before.records[:-1]
        assert "the last line of records.jsonl was cut off" in found.unfinished
    else:
        assert content(found) == content(before)


def test_a_changed_digit_is_refused_with_file_line_and_what_to_do(
    cli: Cli, assert_refused: Refused, tmp_path: Path
) -> None:
    file = small(tmp_path) / RECORDS
    file.write_text(file.read_text().replace("12.5", "92.5"))
    for command in (("export",), ("report",), ("sweep", "--resume")):
        result = cli(*command, file.parent)
        assert_refused(result, f"{file}, line 2: ", "checksum", "delete the line", "--resume")


def test_a_field_without_its_checksum_is_refused_from_schema_3_on_alone(tmp_path: Path) -> None:
    path = small(tmp_path, cells=1)
    row = json.loads((path / RECORDS).read_text())
    del row["checksum"]
    for schema in (2, 3):  # in a run of schema 3 no line is older
        (path / RECORDS).write_text(json.dumps(row | {"schema": schema}) + "\n")
        with pytest.raises(StoreError, match="checksum is missing"):
            load_run(path)
    synthetic.edit(path / INFO, lambda info: info | {"schema": 2})
    (path / RECORDS).write_text(json.dumps(row | {"schema": 2}) + "\n")
    assert load_run(path).records
    older = sealed(json.dumps(row | {"schema": 2})).replace("11.5", "91.5")
    (path / RECORDS).write_text(older + "\n")
    with pytest.raises(StoreError, match="checksum does not fit"):
        load_run(path)


def test_a_field_that_stands_twice_in_an_older_file_is_refused() -> None:
    with pytest.raises(ValueError, match="'time_us' stands twice"):
        unsealed(b'{"schema":2,"samples":{"time_us":[1],"time_us":[2]}}', since=3)


@pytest.mark.parametrize("schema", [2, 3])
def test_the_id_of_a_line_is_that_of_its_case(tmp_path: Path, schema: int) -> None:
    path = small(tmp_path, cells=1)
    synthetic.edit(path / INFO, lambda info: info | {"schema": schema})
    synthetic.edit(path / RECORDS, lambda row: row | {"schema": schema, "case_id": "0" * 12})
    (path / RECORDS).write_text((path / RECORDS).read_text() + "\n")
    with pytest.raises(StoreError, match=r"line 1.*its case is [0-9a-f]{12}, not '000000000000'"):
        load_run(path)


def test_a_record_that_was_not_planned_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path)
    with RunWriter.reopen(path) as writer:
        writer.append(synthetic.ok(Case(seq_len=64), "sdpa"))
    with pytest.raises(StoreError, match=f"line 5: the plan in {INFO} has no such cell"):
        load_run(path)


def test_a_run_cut_after_its_first_line_never_reads_as_complete(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnbench.report.figures.write", unwritten)
    path = small(tmp_path)
    whole = (path / RECORDS).read_bytes()
    first = whole.index(b"\n") + 1
    for end in (first, first + 40):  # the second one in the middle of a line
        (path / RECORDS).write_bytes(whole[:end])
        exported = cli("export", path)
        page = write_report(path).read_text()
        for text in (exported.stderr, page, (path / "report.md").read_text()):
            text = text.replace("\\", "")
            assert "only 1 of 4 planned cells measured" in text
            assert ("the last line of records.jsonl was cut off" in text) == (end > first)
            assert "The only cell passed" not in text
        assert len(exported.stdout.splitlines()) == 2


def test_the_summary_of_a_sweep_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from attnbench.cli.sweep import _print_summary

    path = small(tmp_path)
    lines = (path / RECORDS).read_bytes().splitlines(keepends=True)
    (path / RECORDS).write_bytes(lines[0])
    _print_summary(load_run(path))
    assert "only 1 of 4 planned cells measured" in capsys.readouterr().out


def test_what_a_line_was_cut_off_is_measured_anew(tmp_path: Path) -> None:
    path = small(tmp_path)
    (path / RECORDS).write_bytes((path / RECORDS).read_bytes()[:-1])
    assert load_run(path).torn
    RunWriter.reopen(path).close()
    assert not load_run(path).torn


def test_records_are_never_appended_through_a_link(tmp_path: Path) -> None:
    path, target = small(tmp_path), tmp_path / "target"
    shutil.move(path / RECORDS, target)
    (path / RECORDS).symlink_to(target)
    before = target.read_bytes()
    with pytest.raises(StoreError, match="cannot append"):
        RunWriter.reopen(path)
    assert target.read_bytes() == before
