"""gate.json: what is written is what is read, and what cannot be is refused by its path."""

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from attnbench.errors import StoreError
from attnbench.gate.decide.stored import (
    NAME,
    load_gate,
    write_gate,
)
from attnbench.gate.decide.verdict import decide
from attnbench.store.folder import GATE, SWEEP, RunFolder
from tests import gate_runs, synthetic

KINDS = gate_runs.the_kinds()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    run = KINDS["broken"]
    return write_gate(tmp_path / "g", run, decide(run))


def test_a_run_is_found_by_file_folder_name_and_as_the_latest(tmp_path):
    old, new = KINDS["clean"], replace(KINDS["clean"], created="2026-12-01T00:00:00+00:00")
    files = {name: write_gate(tmp_path / name, run, decide(run))
             for name, run in (("b-new", new), ("c-old", old))}  # fmt: skip
    nowhere = Path("elsewhere")
    for text, output, name in (
        (files["c-old"], nowhere, "c-old"), (files["c-old"].parent, nowhere, "c-old"),
        ("c-old", tmp_path, "c-old"), ("latest", tmp_path, "b-new"),
        ("previous", tmp_path, "c-old"),
    ):  # fmt: skip
        assert RunFolder.find(str(text), output, GATE).file == files[name]
    assert load_gate(Path("b-new"), tmp_path).created.startswith("2026-12")
    with pytest.raises(StoreError, match=r"no gate run 'b-neww' in .*did you mean 'b-new'"):
        RunFolder.find("b-neww", tmp_path, GATE)
    assert RunFolder.find("c-old", tmp_path, SWEEP, GATE).kind is GATE
    (tmp_path / "c-old" / "run.json").write_text("{}")
    assert RunFolder.find("c-old", tmp_path, SWEEP, GATE).kind is SWEEP
    files["c-old"].unlink()
    with pytest.raises(StoreError, match=f"only b-new in {tmp_path} yet; make one with: attnbench"):
        RunFolder.find("previous", tmp_path, GATE)


@pytest.mark.parametrize(
    "content",
    [
        b"", b'{"kind": "attnbench gate", "sch', b"\xff\xfe", b"[" * 100_000, b'{"benchmarks": []}',
        b'{"kind": "attnbench gate", "schema": 4}', b'{"kind": "attnbench gate", "schema": 1}',
    ],
)  # fmt: skip
def test_a_file_that_is_cut_foreign_or_newer_names_itself(content, tmp_path):
    (tmp_path / NAME).write_bytes(content)
    says = f"{tmp_path / NAME} is damaged, or not by attnbench gate of schema 3: "
    with pytest.raises(StoreError, match=re.escape(says)):
        load_gate(tmp_path)


# Where a value is put, and what the message must say.
DAMAGE = {
    "a time below 0": ("samples.base", [[-5]], "samples[...]"),
    "no batches": ("samples.base", [[]], "samples[...]"),
    "a variant of ours": ("samples.b", [[1]], "key"),
    "a cell twice": ("rounds.0.samples.03", {}, "$.rounds[0].samples"),
    "a failure's code": (
        "rounds.1.failures.0", {"variant": "base", "reason": "", "code": ""}, "failures[...].code",
    ),
    "grown by texts": ("rounds.1.facts", {"grown": {"0": {"base": "x"}}}, "$.rounds[1].facts"),
    "a cell": ("cells.0.case.seq_len", -1, "seq_len"),
    "a threshold": ("rules.threshold", -1, "threshold"),
    "a level": ("rules.alpha", 2, "$.rules.alpha"),
    "looks": ("rules.looks", [8, 4], "looks must ascend"),
    "a budget": ("spent.checks_s", -3, "$.spent"),
}  # fmt: skip


@pytest.mark.parametrize(("place", "value", "says"), DAMAGE.values(), ids=DAMAGE)
def test_values_that_cannot_be_are_refused_by_their_path(place, value, says, written):
    at = row = json.loads(written.read_text())
    del row["checksum"]
    *path, last = place.replace("samples.b", "rounds.0.samples.3.b").split(".")
    for name in path:
        at = at[int(name)] if isinstance(at, list) else at[name]
    at[int(last) if isinstance(at, list) else last] = value
    synthetic.edit(written, lambda _: row)
    with pytest.raises(StoreError) as refused:
        load_gate(written)
    assert f"{written} is damaged, " in str(refused.value)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_full_disk_leaves_no_half_file_and_the_old_one_as_it_was(written, monkeypatch):
    def fsync(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = written.read_text()
    monkeypatch.setattr(os, "fsync", fsync)
    run = KINDS["clean"]
    with pytest.raises(StoreError, match=f"cannot write {written} .No space left"):
        write_gate(written.parent, run, decide(run))
    with pytest.raises(StoreError, match="cannot write"):  # a folder that cannot be made
        write_gate(written / "g", run, decide(run))
    assert [path.name for path in written.parent.iterdir()] == [NAME]
    assert written.read_text() == before
