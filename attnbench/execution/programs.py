"""A user's program, run with hooks on its attention: what it and its children called."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnbench.base.jsontext import plain
from attnbench.base.signals import handled
from attnbench.base.units import counted
from attnbench.errors import UsageError

_SITE = Path(__file__).parents[1] / "capturing" / "site"


def check_program(program: Sequence[str]) -> None:
    """Say before it runs what could not work.

    Raises:
        UsageError: there is no such program.
    """
    if shutil.which(program[0]) is None:
        hint = f"; write -- python {program[0]}" if program[0].endswith(".py") else ""
        raise UsageError(f"no program {program[0]}{hint}")


def run_program(
    program: Sequence[str], *, calls: int | None = None, seconds: float | None = None,
    verify: bool = False,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """What was seen, as `capturing.calls.Seen.report` has it, of all processes; and the exit code.

    `calls` and `seconds` end the program early. With `verify` it has no input and no output. A
    report that lacks the key "calls" means that no Python read our hooks, or none imported torch.
    """
    asked = {"verify": verify, "calls": calls, "seconds": seconds}
    reports, code = _reports(program, "ATTNBENCH_CAPTURE", asked, quiet=verify)
    return joined(reports), code


def run_with(program: Sequence[str], asked: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Run it with advice, as `attnbench.use` takes it; what `stats` of all processes says, added.

    It is empty if no Python of the program imported torch, or has read our hooks.
    """
    reports, code = _reports(program, "ATTNBENCH_USE", asked)
    reports = [report for report in reports if "hits" in report]
    total: dict[str, Any] = {"check_s": sum(report["check_s"] for report in reports)}
    for name in ("hits", "misses", "fallbacks"):
        counts = Counter[str]()
        for report in reports:
            counts.update(report[name])
        total[name] = dict(counts)
    return total if reports else {}, code


def _reports(
    program: Sequence[str], variable: str, asked: Mapping[str, Any], *, quiet: bool = False
) -> tuple[list[dict[str, Any]], int]:
    """What each process with our hooks wrote, the program's own first, and the exit code."""
    before, streams = os.environ.get("PYTHONPATH"), subprocess.DEVNULL if quiet else None
    with tempfile.TemporaryDirectory(prefix="attnbench-capture-") as folder:
        asked = {**asked, "folder": folder, "root": str(_SITE.parents[2])}
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_SITE), *([before] if before else [])]),
            variable: json.dumps(asked),
        }
        with subprocess.Popen(
            program, env=environment, stdin=streams, stdout=streams, stderr=streams
        ) as process:
            try:  # a terminal sends Ctrl-C to the program, too, which ends as it wants to
                with handled((signal.SIGINT,), lambda *_: None):
                    code = process.wait()
            except BaseException:
                process.terminate()
                raise
        files = sorted(Path(folder).glob("*.json"), key=lambda file: file.stat().st_mtime)
        main = [file for file in files if file.name == f"{process.pid}.json"]
        others = (file for file in files if file not in main)
        reports = [json.loads(file.read_text("utf-8")) for file in (*main, *others)]
    return reports, code if code >= 0 else 128 - code


def joined(reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One report of several processes, the program's own first; `children` are the others."""
    first, *others = sorted(reports, key=lambda report: "calls" not in report) or [{}]
    others = [report for report in others if report.get("calls")]
    if not others:
        return first
    total = first | {"children": len(others)}
    for name in ("calls", "compiled"):
        total[name] = first[name] + sum(report[name] for report in others)
    total["wall_s"] = max(report["wall_s"] for report in (first, *others))
    total["undescribed"] = dict(
        sum((Counter(report["undescribed"]) for report in (first, *others)), Counter())
    )
    for name in ("cases", "left_out"):
        total[name] = _rows(row for report in (first, *others) for row in report[name])
    return total


_ADDED = ("calls", "recomputed", "time_s")


def _rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each distinct call once: counts and times are added, its places those of all processes."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        call = row["call"]
        about = {k: v for k, v in call.items() if k not in (*_ADDED, "places", "modules", "caches")}
        key = json.dumps([{k: v for k, v in row.items() if k not in ("count", "call")}, about])
        if (known := found.get(key)) is None:
            found[key] = {**row, "call": dict(call)}
            continue
        known["count"] += row["count"]
        for name in _ADDED:
            known["call"][name] += call[name]
        places = Counter(dict(known["call"]["places"])) + Counter(dict(call["places"]))
        modules = Counter(known["call"]["modules"]) + Counter(call["modules"])
        known["call"] |= {"places": places.most_common(5), "modules": dict(modules.most_common(64))}
    return sorted(found.values(), key=lambda row: -float(row["call"]["time_s"]))


def why_nothing(seen: Mapping[str, Any], program: Sequence[str]) -> str:
    """Why no call was seen."""
    if not seen:
        return f"{program[0]} is not a Python that reads PYTHONPATH (python -I and -E do not)"
    if seen.get("stopped"):
        return f"the program was stopped {seen['stopped']}, before its first call"
    if "calls" in seen:
        more = ["; in a compiled function, SDPA and flex alone"] * bool(seen["compiled"])
        unseen = seen.get("verified", {}).get("unseen", {})
        more += [f"; {counted(n, 'call')} of {op} ran unseen" for op, n in unseen.items()]
        return (
            "the program made no call, looked for scaled_dot_product_attention under any name,"
            " nn.MultiheadAttention, nn.TransformerEncoder and the attention of transformers"
        ) + "".join(more)
    if seen["lacks"]:
        return f"its Python cannot load attnbench ({plain(seen['lacks'])}); install attnbench there"
    return "the program imported no torch"
