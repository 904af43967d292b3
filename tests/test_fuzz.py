"""Damaged, edited and hostile files, lists and command lines: nothing may crash, hang or mislead.

What is stored is read as if nothing had happened, or refused by an error of ours, which becomes
one line and exit code 2. Files whose bytes were changed are never read as something else than they
were; those whose values were changed and whose checksum fits, as by someone who means harm, may
hold anything. FUZZ=1000 tries so many inputs of each kind.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnbench.analysis.claims import judging, statement
from attnbench.analysis.compare import sources
from attnbench.analysis.history import entries
from attnbench.base import units
from attnbench.base.jsontext import plain, sealed
from attnbench.cli.commands import main
from attnbench.errors import AttnbenchError, WorkerError
from attnbench.gate.decide.stored import load_gate, write_gate
from attnbench.gate.decide.verdict import decide
from attnbench.report import figures
from attnbench.schema.case import Case, parse_mask, parse_position
from attnbench.schema.profile import Note, read_profile, write_profile
from attnbench.store.runs import INFO, PLAN, RECORDS, load_run
from tests import gate_runs, synthetic
from tests.test_profiles import NAIVE, profile
from tests.test_report import unwritten

CLAIM = """
[[claim]]
id = "sdpa-speed"
source = "README"
place = "Results"
says = "sdpa is at least 1.5x faster than naive at n = 128"
quantity.kind = "ratio"
quantity.where = { workload = "attention", seq_len = 128 }
quantity.first = { impl = "naive" }
quantity.second = { impl = "sdpa" }
relation = { is = ">=", limit = 1.5 }
"""
BENCHMARKS = """{"benchmarks": [{"fullname": "a", "stats":
{"median": 1e-3, "iqr": 1e-5, "rounds": 9}}], "machine_info": {"cpu": {"brand_raw": "x"}},
"commit_info": {"id": "0000000000", "dirty": false}, "datetime": "2026-11-21T01:02:03"}"""
# Values that a field does not expect.
ODD: st.SearchStrategy[Any] = st.sampled_from([
    None, True, -1, 0, 1, 2**63, 10**30, -0.0, 1e-320, 1e308, "", "0", "nan", "\0", "\x1b[31m",
    "\ud800", "\u202etxt", "\u2028", "../../etc/passwd", "/dev/zero", "--help", "latest", "x" * 300,
    "cuda", "2026-13-45", [], {}, [[]], {"": None}, [None], ["x", 3], {"a": {"b": []}},
]).map(deepcopy)  # fmt: skip
TOKENS = st.sampled_from([
    b"\0", b"\xff", b"\x1b[2J", b"null", b"1e999", b"-", b"9" * 30, b"{", b"}", b"[", b'"', b",",
    b"NaN", b"\n", b"\r\n", b"\\ud800", b"\\u0000", b"[" * 5000, b"\xe2\x80\xae", b"\xef\xbb\xbf",
])  # fmt: skip
WORDS = [
    "128", "128..1024", "0", "-1", "1e3", "9" * 30, "1..3", "8..2", "128,", ",", "", "128..", "..",
    "all", "naive", "sdpa,naive", "performer:features=64", "performer:features=x", "window:16",
    "window:-1", "rope:0", "alibi", "mla:128", "latest", "nothing", "--help", "--", "-", "\0", "r",
    "\x1b[31m", "x" * 300, "../..", "/dev/zero", "/dev/null", ".", "cpu", "cuda", "auto",
    "10%", "5m", "nan", "inf", "1e-9", "\udcff", "𝟙𝟚", "１２８", "csv", "json", "HEAD", "latest/..",
]  # fmt: skip
PARSERS: list[Callable[[str], Any]] = [
    *(lambda text, parse=parse: parse(text, "--flag") for parse in (  # type: ignore[misc]
        units.parse_sizes, units.parse_threads, units.parse_names, units.parse_share,
        units.parse_duration)),
    parse_mask, parse_position,
]  # fmt: skip


def tried(count: int) -> Any:
    """So many inputs, the same in each run."""
    return settings(
        max_examples=int(os.environ.get("FUZZ", count)), derandomize=True, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip


@st.composite
def damaged(draw: Any, data: bytes) -> bytes:
    """The bytes with one to three places changed: a bit, a run of them, or something put in."""
    for _ in range(draw(st.integers(1, 3))):
        place, length = draw(st.integers(0, len(data))), draw(st.sampled_from((1, 1, 4, 30, 400)))
        head, tail = data[:place], data[place:]
        flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in tail[:1])
        changes = (
            flipped + tail[1:], draw(st.sampled_from([b"0", b"7"])) + tail[1:], tail[length:],
            draw(TOKENS) + tail, tail[:length] + tail, b"",
        )  # fmt: skip
        data = head + draw(st.sampled_from(changes))
    return data


@st.composite
def edited(draw: Any, value: Any) -> Any:
    """JSON with one to three values replaced, removed, or put in another's place."""
    whole: Any = {"": json.loads(json.dumps(value))}
    for _ in range(draw(st.integers(1, 3))):
        holder, key = whole, ""
        while isinstance(inner := holder[key], dict | list) and inner and draw(st.integers(0, 6)):
            names = list(inner) if isinstance(inner, dict) else range(len(inner))
            holder, key = inner, draw(st.sampled_from(names))
        change = draw(st.integers(0, 7))
        if change == 0 and holder is not whole:
            del holder[key]
        elif change == 1 and isinstance(holder[key], int | float):
            holder[key] = draw(st.sampled_from((-1, 1.5, 10, 1e-9))) * holder[key]
        elif change == 2 and isinstance(holder, dict):
            holder[str(draw(ODD))] = draw(ODD)
        else:
            holder[key] = draw(ODD)
        whole.setdefault("", {})
    return whole[""]


class Store:
    """A run, a gate, a profile, a history and lists, and how each is used."""

    def __init__(self, folder: Path) -> None:
        cases = [Case(seq_len=n, heads=h) for n in (64, 128) for h in (1, 2)]
        records = [synthetic.ok(case, impl) for case in cases for impl in ("naive", "sdpa")]
        records.append(synthetic.failed(Case(seq_len=256), "naive", "oom", "9 GiB wanted"))
        environment = synthetic.CPU | {"ceilings": {"1": {"matmul_tflops": {"float32": 0.1}}}}
        more = {
            "environment": environment, "settings": {"processes": 1, "files": [], "seed": 0}
        }  # fmt: skip
        self.folder, self.output = folder, folder / "results"
        run = self.path = synthetic.write_run(self.output, "r", records, more)
        gate_run = gate_runs.a_run(cells=gate_runs.CELLS[:2])
        gate = write_gate(self.output / "g", gate_run, decide(gate_run))
        (self.output / "p").mkdir()
        notes = (Note("profiler-cost", {"ratio": 1.05}),)
        shown = write_profile(self.output / "p", profile(*NAIVE, notes=notes))
        entries.add(folder / "history", load_run(run))
        claims, bench = folder / "claims.toml", folder / "bench.json"
        claims.write_text(CLAIM)
        bench.write_text(BENCHMARKS)
        self.run = load_run(run)
        self.traps = list(self._traps())
        # Of each kind of damage: the file, whether values are changed, and how it is used after.
        self.uses: dict[str, tuple[Path, bool, Callable[[], Any]]] = {
            "records": (run / RECORDS, False, self._same_run),
            "run.json": (run / INFO, False, self._same_run),
            "plan.json": (run / PLAN, False, self._same_run),
            "gate.json": (gate, False, self._same(lambda: load_gate(gate))),
            "profile.json": (shown, False, self._same(lambda: read_profile(shown.parent))),
            "gate.json, edited": (gate, True, lambda: decide(load_gate(gate))),
            "profile.json, edited": (shown, True, lambda: read_profile(shown.parent).cell),
            "history": (
                folder / "history" / entries.FILE, False, lambda: entries.read(folder / "history")),
            "claims": (claims, False, lambda: judging.judged(statement.read(claims), self.run)),
            "benchmarks": (bench, False, lambda: sources.read(str(bench), self.output)),
        }  # fmt: skip

    def _traps(self) -> Iterator[Path]:
        """What a name may lead to: a pipe that nobody writes, no end, no file, torn text."""
        os.mkfifo(fifo := self.folder / "fifo")
        (zero := self.folder / "zero").symlink_to("/dev/zero")
        for trap, content in {"deep": "[" * 100_000, "folder": None, "torn": "{"}.items():
            for name in (INFO, RECORDS, "gate.json"):
                (file := self.folder / trap / name).parent.mkdir(exist_ok=True)
                file.write_text(content) if content else file.mkdir()
            yield self.folder / trap
        for trap, target in (("a", fifo), ("b", zero)):  # unknown names must not fall over these
            (self.output / trap).mkdir()
            (self.output / trap / INFO).symlink_to(target)
        shutil.copytree(self.path, lines := self.folder / "lines")
        (lines / RECORDS).unlink()
        (lines / RECORDS).symlink_to(fifo)
        yield from (fifo, zero, lines)

    def _same(self, read: Callable[[], Any]) -> Callable[[], None]:
        whole = read()

        def use() -> None:
            assert read() == whole, "it is read as something else"

        return use

    def _same_run(self) -> None:
        run = load_run(self.path)
        assert run.info == self.run.info, "run.json is read as something else"
        assert all(record in self.run.records for record in run.records), "another number"
        missing = len(self.run.records) - len(run.records)
        assert run.unfinished or not (missing or run.torn), "nothing says what is missing"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", [
    "records", "run.json", "plan.json", "gate.json", "profile.json", "gate.json, edited",
    "profile.json, edited", "history", "claims", "benchmarks",
])  # fmt: skip
def test_what_is_stored_is_read_right_or_refused(store: Store, kind: str) -> None:
    file, values, use = store.uses[kind]
    whole, ends = file.read_bytes(), set[bool]()

    def changed(draw: Any) -> bytes:
        if not values:
            return bytes(draw(damaged(whole)))
        row = draw(edited({k: v for k, v in json.loads(whole).items() if k != "checksum"}))
        text = json.dumps(row)
        return (sealed(text) if isinstance(row, dict) and row else text).encode()

    @tried(40)
    @given(st.data())
    def one(data: Any) -> None:
        file.write_bytes(changed(data.draw))
        try:
            use()
            ends.add(True)
        except AttnbenchError:
            ends.add(False)

    try:
        one()
    finally:
        file.write_bytes(whole)
    assert False in ends, "an input that harms nothing tries nothing"


@tried(150)
@given(st.data())
def test_lists_are_read_or_refused(data: Any) -> None:
    letters = st.sampled_from(
        [*"0123456789,..:+=-% \t\nmshrope,window128,all\0\x1b\ud800²½", *WORDS]
    )
    text = data.draw(st.sampled_from(WORDS))
    for more in data.draw(st.lists(letters, max_size=3)):
        place = data.draw(st.integers(0, len(text)))
        text = text[:place] + more + text[place + data.draw(st.integers(0, 1)) :]
    number = data.draw(st.integers(0, len(PARSERS) - 1))
    try:
        sizes = PARSERS[number](text)
    except AttnbenchError:
        return
    if number == 0:
        assert sizes
        assert all(type(n) is int and 1 <= n <= 2**40 for n in sizes), "a size out of bounds"


@tried(25)
@given(st.data())
def test_command_lines_end_with_an_exit_code_and_one_line(
    store: Store, monkeypatch: pytest.MonkeyPatch, data: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise WorkerError("nothing is started here")

    monkeypatch.chdir(store.folder)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(store.folder))
    monkeypatch.setattr(figures, "write", unwritten)
    name = data.draw(st.sampled_from([name for name in main.commands if name != "doctor"]))
    parameters = [p for p in main.commands[name].params if p.name != "watch"]  # that waits
    arguments = [name]
    for option in data.draw(st.lists(st.sampled_from(parameters), max_size=4)):
        words = [*WORDS, *(2 * list(map(str, getattr(option.type, "choices", ()))))]
        if option.name != "to":  # into a pipe it waits for a reader
            words += map(str, (store.path, store.folder / "claims.toml", *store.traps))
        flag = option.opts[0] if isinstance(option, click.Option) else ""
        word = [] if getattr(option, "is_flag", False) else [data.draw(st.sampled_from(words))]
        arguments += [flag] * bool(flag) + word
    places = {place: set(os.listdir(place)) for place in (store.folder, store.output)}
    result, shown = CliRunner().invoke(main, arguments), shlex.join(arguments)
    for place, names in places.items():  # what the command has made
        for made in (place / name for name in set(os.listdir(place)) - names):
            shutil.rmtree(made) if made.is_dir() and not made.is_symlink() else made.unlink()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    code, stderr = result.exit_code, result.stderr
    assert code in range(5), f"exit code {code}: {stderr[:300]}; {shown}"
    errors = [line for line in stderr.splitlines() if line.startswith("Error: ")]
    assert code not in (2, 4) or not stderr or len(errors) == 1, f"{stderr[:300]!r}; {shown}"
    for text in (result.stdout, stderr):
        assert plain(text) == text, f"steers the terminal: {shown}"
