"""What a program spends in attention, by place, and what advice on its calls would save of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from attnbench.analysis.advice import Advice
from attnbench.analysis.table import Ratio
from attnbench.base.units import counted
from attnbench.report import document as doc
from attnbench.report.documents.capture import call_words
from attnbench.store.runs import Run

_MOST = 12  # rows on a terminal
_MODULE = 3  # the last names of a module's path


class Spent(NamedTuple):
    """One distinct call: the program's own time in it, and the advice on it, if there is one."""

    row: Mapping[str, Any]
    time_us: float
    advice: Advice | None = None

    @property
    def saved_us(self) -> Ratio:
        """What following the advice saves, with its interval: 0 where it is to keep the default."""
        if self.advice is None or self.advice.verdict not in ("switch", "likely"):
            return 0.0, 0.0, 0.0
        return tuple(r and self.time_us * (1 - 1 / r) for r in self.advice.regret)  # type: ignore[return-value]


def spent(run: Run, found: Sequence[Advice]) -> list[Spent]:
    """The program's distinct calls, the longest first; [] where the run is not of a program.

    A capture times forward passes, outside of compiled regions. What came backward, and what was
    compiled, counts at the default's measured time.
    """
    program = run.info.get("program")
    if program is None:
        return []
    by_case = {each.case.case_id: each for each in found}
    rows = [Spent(row, 1e6 * row["call"]["time_s"]) for row in program["left_out"]]
    for row, case_id in zip(program["cases"], program["case_ids"], strict=True):
        call, advice = row["call"], by_case.get(case_id)
        time_us = 1e6 * call["time_s"]
        unknown = row["pass"] == "both" or not time_us
        if unknown and advice is not None and advice.default is not None:
            time_us = call["calls"] * float(advice.default["time_us"])
        rows.append(Spent(row, time_us, advice))
    return sorted(rows, key=lambda one: -one.time_us)


def sentences(run: Run, rows: Sequence[Spent]) -> Iterator[doc.Words]:
    """How much of the program is attention, and how much of that the advice saves."""
    if not rows:
        return
    program, total_us = run.info["program"], sum(one.time_us for one in rows)
    wall_us = 1e6 * program["wall_s"]
    value, low, high = (
        None if any(x is None for x in ends) else sum(ends) / wall_us  # type: ignore[arg-type]
        for ends in zip(*(one.saved_us for one in rows), strict=True)
    )
    text = "Attention takes {share} of the program's {wall}: {time}; "
    if value:
        text += "the advice below saves {saved} of the program" + " [{saved.interval}]" * bool(low)
    else:
        text += "nothing that was tried saves any of that"
    yield doc.sentence(
        text + ".", share=doc.Value(total_us / wall_us, "share"), wall=doc.Value(wall_us, "us"),
        time=doc.Value(total_us, "us"), saved=doc.Value(value, "share", low, high),
    )  # fmt: skip
    without = [one for one in rows if one.advice is None]
    if lost_us := sum(one.time_us for one in without):
        calls = sum(one.row["call"]["calls"] for one in without)
        verb = "is" if calls == 1 else "are"
        why = sorted({problem for one in without for problem in one.row.get("problems", ())})
        yield doc.sentence(
            f"{counted(calls, 'call')} {verb} not compared, {{share}} of the"
            f" program: {', '.join(why) or 'no time within the budget'}.",
            share=doc.Value(lost_us / wall_us, "share"),
        )  # fmt: skip


def section(run: Run, rows: Sequence[Spent]) -> doc.Section:
    """The calls by place."""
    wall_us = 1e6 * run.info["program"]["wall_s"] if rows else 1.0
    cells = []
    for one in rows:
        value, low, high = one.saved_us
        best = "–" if one.advice is None else str(one.advice.pick["impl"])
        share, low, high = (x / wall_us if x and value else None for x in (value, low, high))
        cells.append((
            _place(one.row["call"]), doc.Value(one.row["call"]["calls"], "count"),
            call_words(one.row), doc.Value(one.time_us, "us"),
            doc.Value(one.time_us / wall_us, "share"), doc.Value(best, "impl"),
            doc.Value(share, "share", low, high),
        ))  # fmt: skip
    table = doc.Table(
        columns={"place": "place", "calls": "calls", "call": "call", "time": "time",
                 "share": "of it", "best": "best", "saved": "saves"},
        rows=cells, spare=("call", "time"), cut="call", most=_MOST,
    )  # fmt: skip
    return doc.Section("In the program", [table] if rows else [])


def _place(call: Mapping[str, Any]) -> str:
    """The module that made most of the calls, by its last names; else the line."""
    if modules := call.get("modules"):
        first, more = max(modules, key=modules.__getitem__), len(modules) - 1
        return ".".join(first.split(".")[-_MODULE:]) + f" and {more} more" * (more > 0)
    return PurePath(call["places"][0][0].rpartition(" ")[0]).name if call["places"] else "–"
