"""Files of a run that were cut or changed: nothing that was edited passes for a measurement."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from attnbench.base.jsontext import sealed
from attnbench.errors import StoreError
from attnbench.report.documents import sweep
from attnbench.report.render import rendered
from attnbench.schema.case import Case
from attnbench.store.folder import SWEEP, RunFolder
from attnbench.store.runs import INFO, RECORDS, load_run, write_info
from tests import synthetic
from tests.test_report import unwritten


def small(folder: Path, cells: int = 4) -> Path:
    records = [
        synthetic.timed(Case(seq_len=64 << i), "naive", (10.0 + i, 11.5 + i), kernel="bmm")
        for i in range(cells)
    ]
    return synthetic.write_run(folder, "r", records)


def test_a_changed_digit_is_refused_with_file_line_and_what_to_do(cli, assert_refused, tmp_path):
    file = small(tmp_path) / RECORDS
    file.write_text(file.read_text().replace("12.5", "92.5"))
    for command in (("export",), ("report",), ("sweep", "--resume")):
        result = cli(*command, file.parent)
        assert_refused(result, f"{file}, line 2: ", "checksum", "delete the line", "--resume")


def test_the_id_of_a_line_is_that_of_its_case(tmp_path):
    path = small(tmp_path, cells=1)
    synthetic.edit(path / RECORDS, lambda row: row | {"case_id": "0" * 12})
    (path / RECORDS).write_text((path / RECORDS).read_text() + "\n")
    with pytest.raises(StoreError, match=r"line 1.*its case is [0-9a-f]{12}, not '000000000000'"):
        load_run(path)


def test_records_are_never_appended_through_a_link(tmp_path):
    path, target = small(tmp_path), tmp_path / "target"
    shutil.move(path / RECORDS, target)
    (path / RECORDS).symlink_to(target)
    before = target.read_bytes()
    with pytest.raises(StoreError, match="is a symbolic link, through which nothing is written"):
        RunFolder(SWEEP, path).lock()
    assert target.read_bytes() == before


def test_what_keeps_a_report_from_being_written_is_said(tmp_path, monkeypatch):
    path = small(tmp_path)
    (path / "plots").mkdir()

    def rmdir(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "rmdir", rmdir)
    with pytest.raises(StoreError, match=r"cannot write .*\(Permission denied\)"):
        synthetic.write_report(path)


@pytest.mark.parametrize(
    "names", [("report.html", "report.md", "plots/page.svg", "run.json"), ("plots",)]
)
def test_a_report_is_never_written_through_a_link(tmp_path, names):
    path, outside = small(tmp_path), tmp_path / "outside"
    outside.mkdir()
    for number, name in enumerate(names):
        target = outside if name == "plots" else outside / f"kept{number}"
        if name != "plots":
            target.write_text("mine")
            (path / name).parent.mkdir(exist_ok=True)
        if name == INFO:
            shutil.move(path / name, target)
        (path / name).symlink_to(target)
    before = {file: file.read_bytes() for file in outside.iterdir()}
    synthetic.write_report(path)
    write_info(RunFolder(SWEEP, path), load_run(path).info)
    assert {file: file.read_bytes() for file in outside.iterdir()} == before
    assert not any((path / name).is_symlink() for name in names)
    assert (path / "report.html").read_text().startswith("<!")


HOSTILE = "".join(
    map(chr, [*range(32), *range(0x7F, 0xA0), 0x202E, 0x2028, 0x2066, 0x200F, 0xFEFF])
)


@pytest.mark.parametrize("escaped", [False, True])
def test_no_text_of_a_run_steers_a_terminal_or_hides_in_a_table(
    cli, tmp_path, monkeypatch, escaped
):
    monkeypatch.setattr("attnbench.report.figures.write", unwritten)
    text = f"said \x1b[31mred\r{HOSTILE} and \\u001b, 3 µs"
    good, bad = Case(seq_len=64), Case(seq_len=128)
    records = [
        synthetic.timed(good, "naive", (10.0, 11.0), flops_note=text),
        synthetic.failed(bad, "naive", "error", text),
    ]
    path = synthetic.write_run(tmp_path, "r", records)
    if escaped:
        lines = [json.dumps(json.loads(line)) for line in (path / RECORDS).open()]
        lines = [sealed(line.rpartition(', "checksum"')[0] + "}") for line in lines]
        (path / RECORDS).write_text("".join(line + "\n" for line in lines))
    synthetic.edit(path / INFO, lambda info: info | {"options": {"--impls": text}})
    page = synthetic.write_report(path).read_text()
    shown = [cli("export", path, "--format", kind).stdout for kind in ("csv", "json")]
    shown += [page, (path / "report.md").read_text(), cli("compare", path, path).stdout]
    shown.append(rendered(sweep.document(load_run(path), brief=True)))
    for found in shown:
        assert "[31mred" in found or found == shown[4]
        assert set(found) & set(HOSTILE) <= {"\n", "\t"}
    assert str(load_run(path).records[1].reason).endswith("\\u001b, 3 µs")  # what is harmless stays


@pytest.mark.usefixtures("imagined_worker")
@pytest.mark.parametrize("change", ["edited", "gone", "unknown"])
def test_a_file_that_a_run_names_is_imported_only_as_it_was(cli, assert_refused, tmp_path, change):
    (file := tmp_path / "mine.py").write_text("# mine")
    asked = ("--impl", file, "--impls", "naive", "--seq-lens", "64,128", "--name", "r")
    assert cli("sweep", *asked, "--output", tmp_path).exit_code == 0
    path = tmp_path / "r"
    line, _ = (path / RECORDS).read_text().splitlines()
    (path / RECORDS).write_text(line + "\n")
    if change == "edited":
        file.write_text("# changed")
    elif change == "gone":
        file.unlink()
    else:
        synthetic.edit(path / INFO, lambda info: {k: v for k, v in info.items() if k != "files"})
    for command in (("sweep", "--resume", path), ("profile", "naive", "--from", path)):
        assert_refused(
            cli(*command), f"{file} (--impl) has changed; restore it, or start a new run"
        )


def traps(folder: Path) -> list[Path]:
    """What may stand in place of a file."""
    os.mkfifo(folder / "fifo")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "folder").mkdir()
    (folder / "deep").write_text("[" * 100_000)
    (folder / "deeper").write_text('{"schema":3,"run_id":' + '{"a":' * 100_000)
    (folder / "digits").write_text('{"schema":' + "9" * 30 + "}")
    (folder / "binary").write_bytes(bytes(range(256)))
    names = ("fifo", "zero", "folder", "deep", "deeper", "digits", "binary")
    return [folder / name for name in names]


def test_what_is_no_file_of_ours_is_one_line(cli, assert_refused, tmp_path):
    path = small(tmp_path)
    for trap in traps(tmp_path):
        (run := tmp_path / f"run-{trap.name}").mkdir()
        for name in (INFO, "gate.json"):
            (run / name).symlink_to(trap)
        shutil.copytree(path, lines := tmp_path / f"lines-{trap.name}")
        (lines / RECORDS).unlink()
        (lines / RECORDS).symlink_to(trap)
        wrong = [("export", run), ("gate", "--replay", run), ("sweep", "--resume", run)]
        wrong += [("verify", run), ("compare", path, run), ("claims", path, "--file", trap)]
        wrong += [("history", tmp_path), ("report", run)]
        if trap.name not in ("deep", "deeper", "digits"):  # whose line is cut off
            wrong.append(("report", lines))
        for command in wrong:
            assert_refused(cli(*command))
    assert cli("export", "latest", "--output", tmp_path).exit_code == 0
