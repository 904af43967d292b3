"""Damaged, edited and hostile files, lists and command lines: nothing may crash, hang or mislead.

An input is made by a seeded random mutation, so that its number finds it again. What is right of
each: it is read as if nothing had happened, or refused by an error that becomes one line and exit
code 2. Files whose bytes were changed may never be read as something else than they were; those
whose values were changed and whose checksum was made anew, as by someone who means harm, may hold
anything, and only have to be read or refused.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
from click.testing import CliRunner

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

Judge = Callable[[random.Random], Any]
LONGEST_S = 120.0  # of an input, on a machine with other work; what takes longer hangs
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
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 10**30, -0.0, 1e-320, 1e308, "", "0", "nan", "\0", "\x1b[31m",
    "\ud800", "\u202etxt", "\u2028", "../../etc/passwd", "/dev/zero", "--help", "latest", "x" * 300,
    "cuda", "2026-13-45", [], {}, [[]], {"": None}, [None], ["x", 3], {"a": {"b": []}},
)  # fmt: skip
TOKENS = (
    b"\0", b"\xff", b"\x1b[2J", b"null", b"1e999", b"-", b"9" * 30, b"{", b"}", b"[", b'"', b",",
    b"NaN", b"\n", b"\r\n", b"\\ud800", b"\\u0000", b"[" * 5000, b"\xe2\x80\xae", b"\xef\xbb\xbf",
)  # fmt: skip
WORDS = (
    "128", "128..1024", "0", "-1", "1e3", "9" * 30, "1..3", "8..2", "128,", ",", "", "128..", "..",
    "all", "naive", "sdpa,naive", "performer:features=64", "performer:features=x", "window:16",
    "window:-1", "rope:0", "alibi", "mla:128", "latest", "nothing", "--help", "--", "-", "\0", "r",
    "\x1b[31m", "x" * 300, "../..", "/dev/zero", "/dev/null", ".", "cpu", "cuda", "auto",
    "10%", "5m", "nan", "inf", "1e-9", "\udcff", "𝟙𝟚", "１２８", "csv", "json", "HEAD", "latest/..",
)  # fmt: skip


@dataclass
class Summary:
    """How inputs of each kind ended."""

    ends: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def odd_bytes(rng: random.Random, data: bytes) -> bytes:
    """The bytes with one to three places changed: a bit, a run of them, or something put in."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 4, 30, 400))
        head, tail = data[:at], data[at:]
        flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in tail[:1])
        changed = (
            flipped + tail[1:], rng.choice(b"0123456789").to_bytes() + tail[1:], tail[length:],
            rng.choice(TOKENS) + tail, tail[:length] + tail, b"",
        )  # fmt: skip
        data = head + rng.choice(changed)
    return data


def odd_values(rng: random.Random, value: Any) -> Any:
    """JSON with one to three values replaced, removed, or put in another's place."""
    whole: Any = {"": json.loads(json.dumps(value))}
    for _ in range(rng.choice((1, 1, 2, 3))):
        holder, key = whole, ""
        while isinstance(inner := holder[key], dict | list) and inner and rng.random() < 0.85:
            names = list(inner) if isinstance(inner, dict) else range(len(inner))
            holder, key = inner, rng.choice(names)
        change = rng.randrange(8)
        if change == 0 and holder is not whole:
            del holder[key]
        elif change == 1 and isinstance(holder[key], int | float):
            holder[key] = rng.choice((-1, 1.5, 10, 1e-9)) * holder[key]
        elif change == 2 and isinstance(holder, dict):
            holder[str(rng.choice(ODD))] = deepcopy(rng.choice(ODD))
        else:
            holder[key] = deepcopy(rng.choice(ODD))
        whole.setdefault("", {})
    return whole[""]


class Fuzzer:
    """Makes inputs in a folder of its own, and judges how they end."""

    def __init__(self, folder: Path) -> None:
        cases = [Case(seq_len=n, heads=h) for n in (64, 128) for h in (1, 2)]
        records = [synthetic.ok(case, impl) for case in cases for impl in ("naive", "sdpa")]
        records.append(synthetic.failed(Case(seq_len=256), "naive", "oom", "9 GiB wanted"))
        environment = synthetic.CPU | {"ceilings": {"1": {"matmul_tflops": {"float32": 0.1}}}}
        settings = {"processes": 1, "files": [], "seed": 0}
        more = {"environment": environment, "settings": settings}
        self.output = folder / "results"
        self.path = synthetic.write_run(self.output, "r", records, more)
        gate_run = gate_runs.a_run(cells=gate_runs.CELLS[:2])
        self.gate = write_gate(self.output / "g", gate_run, decide(gate_run))
        (self.output / "p").mkdir()
        notes = (Note("profiler-cost", {"ratio": 1.05}),)
        self.profile = write_profile(self.output / "p", profile(*NAIVE, notes=notes))
        given = {"claims.toml": CLAIM, "bench.json": BENCHMARKS}
        self.history = folder / "history"
        entries.add(self.history, load_run(self.path))
        for name, text in given.items():
            (folder / name).write_text(text)
        self.folder = folder
        self.traps = [folder / name for name in ("fifo", "deep", "zero", "folder", "torn", "lines")]
        os.mkfifo(self.traps[0])
        (folder / "zero").symlink_to("/dev/zero")
        texts: dict[str, str | None] = {"deep": "[" * 100_000, "folder": None, "torn": "{"}
        for trap, content in texts.items():
            for name in (INFO, RECORDS, "gate.json"):
                (file := folder / trap / name).parent.mkdir(exist_ok=True)
                file.write_text(content) if content else file.mkdir()
        for trap, name in (("a", "fifo"), ("b", "zero")):  # unknown names must not fall over these
            (self.output / trap).mkdir()
            (self.output / trap / INFO).symlink_to(folder / name)
        shutil.copytree(self.path, folder / "lines")
        (folder / "lines" / RECORDS).unlink()
        (folder / "lines" / RECORDS).symlink_to(self.traps[0])
        self.run = load_run(self.path)
        self.whole = {
            file: file.read_bytes()
            for file in (
                self.path / INFO, self.path / PLAN, self.path / RECORDS, self.gate, self.profile,
                self.history / entries.FILE, *(folder / name for name in given),
            )
        }  # fmt: skip

        def same(read: Callable[[Path], Any], path: Path) -> Judge:
            def judge(_: random.Random) -> None:
                assert read(path) == whole, f"{path.name} is read as something else"

            whole = read(path)
            return judge

        same_gate, same_profile = (
            same(load_gate, self.gate),
            same(read_profile, self.profile.parent),
        )
        claims = folder / "claims.toml"
        info, lines, history = self.path / INFO, self.path / RECORDS, self.history / entries.FILE
        # Of each kind how many of 116 inputs; what is changed how; and how it is judged.
        self.kinds: dict[str, tuple[int, Callable[[random.Random], str]]] = {
            "records, bytes": (30, partial(self._bytes, lines, self._same_run)),
            "run.json, bytes": (18, partial(self._bytes, info, self._same_run)),
            "plan.json, bytes": (4, partial(self._bytes, self.path / PLAN, self._same_run)),
            "gate.json, bytes": (14, partial(self._bytes, self.gate, same_gate)),
            "profile.json, bytes": (12, partial(self._bytes, self.profile, same_profile)),
            "gate.json, values": (2, partial(self._values, self.gate, self._used_gate)),
            "profile.json, values": (2, partial(
                self._values, self.profile, lambda _: read_profile(self.profile.parent).cell)),
            "history.jsonl": (4, partial(
                self._bytes, history, lambda _: entries.read(self.history))),
            "claims": (4, partial(self._bytes, claims, lambda _: judging.judged(
                statement.read(claims), self.run))),
            "benchmarks": (3, partial(
                self._bytes, folder / "bench.json",
                lambda _: sources.read(str(folder / "bench.json"), self.output))),
            "lists": (20, self._lists),
            "command lines": (3, self._commands),
        }  # fmt: skip

    # Each returns how it ended, in a word; what it raises beside our own errors is a finding.

    def _bytes(self, file: Path, judge: Judge, rng: random.Random) -> str:
        return self._with(file, odd_bytes(rng, self.whole[file]), judge, rng)

    def _values(self, file: Path, judge: Judge, rng: random.Random) -> str:
        row = json.loads(self.whole[file])
        del row["checksum"]
        changed = odd_values(rng, row)
        text = json.dumps(changed)
        text = sealed(text) if isinstance(changed, dict) and changed else text
        return self._with(file, text.encode(), judge, rng)

    def _with(self, file: Path, data: bytes, judge: Judge, rng: random.Random) -> str:
        try:
            file.write_bytes(data)
            judge(rng)
            return "read"
        finally:
            file.write_bytes(self.whole[file])

    def _same_run(self, _: random.Random) -> None:
        found = load_run(self.path)
        assert found.info == self.run.info, "run.json is read as something else"
        assert all(record in self.run.records for record in found.records), "another number"
        missing = len(self.run.records) - len(found.records)
        assert found.unfinished or not (missing or found.torn), "nothing says what is missing"

    def _used_gate(self, rng: random.Random) -> None:
        decide(load_gate(self.gate))
        if rng.random() < 0.2:
            self._invoke(["gate", "--replay", str(self.gate)])

    def _lists(self, rng: random.Random) -> str:
        alphabet = "0123456789,..:+=-% \t\nmshrope,window128,all\0\x1b\ud800²½"
        text = rng.choice(WORDS)
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(text) + 1)
            more = rng.choice((*alphabet, rng.choice(WORDS), rng.choice(alphabet) * 3))
            text = text[:at] + more + text[at + rng.randrange(2) :]
        parse: Any = rng.choice((
            units.parse_sizes, units.parse_threads, units.parse_names, units.parse_share,
            units.parse_duration, parse_mask, parse_position,
        ))  # fmt: skip
        found = parse(text) if parse in (parse_mask, parse_position) else parse(text, "--flag")
        if parse is units.parse_sizes:
            assert found, "no size"
            assert all(type(n) is int and 1 <= n <= 2**40 for n in found), "a size out of bounds"
        return "read"

    def _commands(self, rng: random.Random) -> str:
        name = rng.choice([name for name in main.commands if name != "doctor"])
        command = main.commands[name]
        arguments = [name]
        for _ in range(rng.randrange(5)):
            option = rng.choice([p for p in command.params if p.name != "watch"])  # that waits
            flag = option.opts[0] if isinstance(option, click.Option) else ""
            kinds = getattr(option.type, "choices", ())
            word = str(rng.choice((*WORDS, *kinds, *kinds)))
            if rng.random() < 0.2 and option.name != "to":  # into a pipe it waits for a reader
                word = str(rng.choice((self.path, self.folder / "claims.toml", *self.traps)))
            arguments += [flag] * bool(flag) + [word] * (not getattr(option, "is_flag", False))
        return self._invoke(arguments)

    def _invoke(self, arguments: list[str]) -> str:
        result, shown = CliRunner().invoke(main, arguments), shlex.join(arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        code, stderr = result.exit_code, result.stderr
        assert code in range(5), f"exit code {code}: {stderr[:300]}; {shown}"
        errors = [line for line in stderr.splitlines() if line.startswith("Error: ")]
        assert code not in (2, 4) or not stderr or len(errors) == 1, f"{stderr[:300]!r}; {shown}"
        for text in (result.stdout, stderr):
            assert plain(text) == text, f"steers the terminal: {shown}"
        return f"exit code {code}"


@contextmanager
def nothing_starts(folder: Path) -> Iterator[None]:
    """Commands work in `folder`, where tracebacks stay, and no process is started."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise WorkerError("nothing is started here")

    def hang(*_: Any) -> Any:
        # No OSError, which a command may take for that of a file.
        raise AssertionError(f"hangs: more than {LONGEST_S} s")

    before, here = signal.signal(signal.SIGALRM, hang), Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(subprocess, "Popen", refuse),
            mock.patch.object(tempfile, "tempdir", str(folder)),
            mock.patch.object(figures, "write", unwritten),
        ):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.chdir(here)


def _tidy(places: dict[Path, set[str]]) -> None:
    """Remove what commands have made."""
    for place, names in places.items():
        for name in set(os.listdir(place)) - names:
            made = place / name
            shutil.rmtree(made) if made.is_dir() and not made.is_symlink() else made.unlink()


def fuzz(
    folder: Path, inputs: int, seed: int = 0, tell: Callable[[str], None] = lambda _: None,
) -> Summary:  # fmt: skip
    """Try so many inputs, shared among the kinds; `folder` is new, and may be deleted."""
    folder.mkdir(parents=True)
    fuzzer, summary = Fuzzer(folder := folder.resolve()), Summary()
    shares = sum(share for share, _ in fuzzer.kinds.values())
    places = {place: set(os.listdir(place)) for place in (folder, fuzzer.output)}
    with nothing_starts(folder):
        for kind, (share, one) in fuzzer.kinds.items():
            ends, begin = summary.ends.setdefault(kind, Counter()), time.monotonic()
            for number in range(max(1, inputs * share // shares)):
                start = time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
                try:
                    ends[one(random.Random(f"{seed} {kind} {number}"))] += 1
                except AttnbenchError:
                    ends["refused"] += 1
                except Exception as err:
                    ends["FOUND"] += 1
                    frames = traceback.extract_tb(err.__traceback__)
                    at = [f for f in frames if "/attnbench/" in f.filename] or frames
                    where = f"{Path(at[-1].filename).name}:{at[-1].lineno}"
                    what = f"{type(err).__name__}: {plain(str(err))[:400]} ({where})"
                    summary.findings.append(f"{kind}, number {number}: {what}")
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                summary.slowest_s = max(summary.slowest_s, time.monotonic() - start)
                _tidy(places)
            took = time.monotonic() - begin
            tell(f"{kind}: {', '.join(f'{n} {end}' for end, n in ends.items())} in {took:.0f} s")
    return summary
