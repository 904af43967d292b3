"""Sweeps over hostile implementations whose processes are killed meanwhile: is anything lost?"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from attnbench.base.units import seconds
from attnbench.store.runs import RECORDS, load_run
from tests import hostile
from tests.validation.page import Table, markdown, write_texts
from tests.validation.runner import SUMMARY, Ended, Figures, Tell

INNOCENT = ("naive", "sdpa")
_MARK = "ATTNBENCH_CHAOS"  # in the environment of all that a sweep starts, and whatever that starts
_GONE_S = 20.0  # within which all of a killed runner's processes have to be gone
_AFTER_S = (0.2, 30.0)  # between two kills


@dataclass(kw_only=True)
class Chaos:
    """One run in `folder`, killed `kills` times and gone on with until it is complete."""

    folder: Path
    cells: int
    kills: int
    seed: int
    options: tuple[str, ...] = ()  # of `attnbench sweep`, also to go on
    may_end: tuple[int, ...] = ()  # the exit codes after which it is gone on with, too
    found: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._mark = uuid4().hex
        self._temporary = self.folder / "tmp"
        self._temporary.mkdir(parents=True)
        self._run = self.folder / "runs" / "chaos"

    def go(self, kill: Callable[[subprocess.Popen[bytes]], str], tell: Tell) -> None:
        """Sweep, `kill(runner)` at random moments, resume after each death of the runner."""
        begin, killed, started = time.monotonic(), Counter[str](), 0
        before = b""
        shared = set(os.listdir("/dev/shm"))
        while True:
            runner, started = self._start(), started + 1
            while runner.poll() is None and killed.total() < self.kills:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    runner.wait(self.random.uniform(*_AFTER_S))
                    break
                before = self._kept(before)
                killed[kill(runner)] += 1
                records = len(before.splitlines())
                tell(f"{killed.total()} kills, {records} records: {dict(killed)}")
            code = runner.wait()
            self.all_gone(f"start {started}, which ended with {code}", self._mark)
            before = self._kept(before)
            if code in (0, 1):  # measured all, and found what is incorrect
                break
            if code not in (-signal.SIGKILL, *self.may_end):
                last = (self.folder / "log").read_text(errors="replace").splitlines()[-1:]
                self.wrong.append(f"start {started} ended with {code}: {last}")
            if started > 3 * self.kills + 3:
                break
        if killed.total() < self.kills:
            self.wrong.append(f"complete after {killed.total()} of {self.kills} kills")
        self._kept(before)
        self._judge()
        kept = [p for p in self._temporary.rglob("*") if not p.name.startswith("hostile-")]
        if left := [*kept, *(set(os.listdir("/dev/shm")) - shared)]:
            self.wrong.append(f"left behind: {', '.join(map(_described, left[:5]))}")
        self.found |= {
            "kills": dict(killed), "starts": started, "exit_code": code,
            "took_s": round(time.monotonic() - begin, 1), "seed": self.seed,
        }  # fmt: skip

    def _start(self) -> subprocess.Popen[bytes]:
        sweep = [str(Path(sys.executable).parent / "attnbench"), "sweep"]
        names = [*INNOCENT, *hostile.FATES]
        if (self._run / "run.json").exists():
            sweep += ["--resume", str(self._run), *self.options]
        else:
            sizes = [str(16 * i) for i in range(1, 1 - (-self.cells // len(names)))]
            sweep += [
                "--impl", str(Path(hostile.__file__)), "--impls", ",".join(names),
                "--seq-lens", ",".join(sizes), "--heads", "2", "--head-dims", "16",
                "--min-time", "0.01", "--max-time", "0.05", "--timeout", "3",
                "--output", str(self._run.parent), "--name", self._run.name,
                *self.options,
            ]  # fmt: skip
        environment = os.environ | {_MARK: self._mark, "TMPDIR": str(self._temporary)}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(sweep, stdout=log, stderr=log, env=environment)

    def pick(self, runner: subprocess.Popen[bytes]) -> str:
        """Kill the runner, or one of the processes that measure."""
        workers = [p for p, line in _marked(self._mark) if "attnbench.worker" in line]
        target = self.random.choice([runner.pid] * (len(workers) or 1) + workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
        return "runner" if target == runner.pid else "worker"

    def all_gone(self, when: str, mark: str) -> None:
        """End what lives on longer than it may, and note it."""
        deadline = time.monotonic() + _GONE_S
        while (left := dict(_marked(mark))) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process, line in left.items():
            self.wrong.append(f"{when}: {line!r} lives on")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _kept(self, before: bytes) -> bytes:
        """The whole records of now; those of before must stand there unchanged."""
        file = self._run / RECORDS
        now = file.read_bytes() if file.exists() else b""
        if not now.startswith(before):
            self.wrong.append("a record that was finished has changed")
        return now[: now.rfind(b"\n") + 1]

    def _judge(self) -> None:
        """Each cell has one record, of a status that its implementation may get."""
        run = load_run(self._run)
        lines = Counter((part["case_id"], part["impl"]) for part in self._lines())
        planned = len(run.info["plan"])
        if run.unfinished or len(lines) != planned or max(lines.values()) > 1:
            self.wrong.append(f"{len(lines)} of {planned} cells, {lines.most_common(1)}")
        fates = hostile.FATES | {name: {"ok"} for name in INNOCENT}
        # What ran out of memory implies that larger ones would.
        fates |= {name: own | {"skipped"} for name, own in fates.items() if "oom" in own}
        for record in run.records:
            # Who was killed twice by us is not to blame, and recorded as what it was.
            killed = record.status == "crashed" and "SIGKILL" in str(record.reason)
            self.found["killed twice"] = self.found.get("killed twice", 0) + killed
            if record.status not in fates[record.cell.impl] and not killed:
                case = record.cell.case
                self.wrong.append(
                    f"{record.cell.impl} n={case.seq_len}: {record.status}: {record.reason}"
                )
        self.found["cells"] = len(run.records)
        self.found["statuses"] = Counter(record.status for record in run.records)

    def _lines(self) -> Iterator[dict[str, Any]]:
        return map(json.loads, (self._run / RECORDS).read_text().splitlines())


def _described(path: object) -> str:
    """A file with its first bytes, or a folder with its files."""
    with contextlib.suppress(OSError):
        if (file := Path(str(path))).is_dir():
            return f"{file}/ {os.listdir(file)[:5]}"
        return f"{file} {file.read_bytes()[:80]!r}"
    return str(path)


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    """Ids and command lines of all processes that have the mark in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if stat[0] != "Z":
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    yield int(folder.name), line.decode(errors="replace").strip()


def examine(
    path: Path, tell: Tell, *, on: tuple[str, ...], cells: int, kills: int, seed: int
) -> Ended:
    """Run each kind of chaos; a row of the same kind from before is replaced."""
    path.mkdir(parents=True, exist_ok=True)
    summary, page = path / SUMMARY, path / "chaos.md"
    found: Figures = json.loads(summary.read_text()) if summary.exists() else {}
    for kind in on:
        with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
            tell(f"{kind}: log in {scratch}/log")
            found[kind] = KINDS[kind](Path(scratch), cells, kills, seed, tell)
    rows = [
        (
            kind,
            str(of["cells"]),
            ", ".join(f"{count} {name}" for name, count in sorted(of["statuses"].items())),
            ", ".join(f"{count} × {what}" for what, count in of["kills"].items()),
            str(of["starts"]),
            seconds(of["took_s"]),
            str(len(of["wrong"])),
        )
        for kind, of in found.items()
    ]
    header = ("where", "cells", "statuses", "killed", "starts", "took", "wrong")
    table = Table(title="Chaos", header=header, rows=tuple(rows))
    wrong = [f"{kind}: {line}" for kind, of in found.items() for line in of["wrong"]]
    text = markdown("What kills and hostile code leave of a sweep", [table], _READING, wrong)
    write_texts(path, {SUMMARY: json.dumps(found, indent=1) + "\n", page.name: text})
    return Ended(met=not wrong, tables=[table], page=page)


_READING = [
    "Implementations that crash, hang, leak, lie, print, fork and close descriptors"
    " (`tests/hostile.py`) beside naive and sdpa; each cell must end with one record, of a status"
    " that its implementation may get, and no record may change once it is written.",
    "Killed are, by SIGKILL at random moments, the runner, one of its workers, or a node. After"
    " each death of the runner all its processes must be gone, and the sweep is gone on with.",
    "wrong counts what was lost, doubled, changed, mislabelled or left behind: processes, temporary"
    " files, shared memory.",
]


def _local(folder: Path, cells: int, kills: int, seed: int, tell: Tell) -> dict[str, Any]:
    chaos = Chaos(folder=folder, cells=cells, kills=kills, seed=seed)
    chaos.go(chaos.pick, tell)
    return chaos.found | {"wrong": chaos.wrong}


def _ray(folder: Path, cells: int, kills: int, seed: int, tell: Tell) -> dict[str, Any]:
    """On two nodes; one that is killed is replaced by another."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    names = map("node{}".format, itertools.count())
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **own})
    marks: dict[Any, str] = {}

    def add() -> None:
        mark = uuid4().hex
        marks[made.add_node(num_cpus=1, node_name=next(names), env_vars={_MARK: mark}, **own)] = (
            mark
        )

    def kill(_: object) -> str:
        node = chaos.random.choice(list(marks))
        made.remove_node(node, allow_graceful=False)
        chaos.all_gone("a killed node", marks.pop(node))
        add()
        return "node"

    where = ("--on", "ray", "--ray-address", made.address)
    # Where both nodes have been lost, the sweep ends with 4.
    chaos = Chaos(folder=folder, cells=cells, kills=kills, seed=seed, options=where, may_end=(4,))
    try:
        add()
        add()
        chaos.go(kill, tell)
    finally:
        made.shutdown()
    for mark in marks.values():
        chaos.all_gone("the cluster", mark)
    return chaos.found | {"wrong": chaos.wrong}


KINDS: dict[str, Callable[[Path, int, int, int, Tell], dict[str, Any]]] = {
    "local": _local,
    "ray": _ray,
}
