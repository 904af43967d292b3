"""Which attention a program called: its distinct calls by time, with their places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from attnbench.base.units import counted
from attnbench.report import document as doc


def document(seen: Mapping[str, Any], file: str, code: int) -> doc.Document:
    """What the file of a capture holds; `code` is how the program exited."""
    rows = sorted((*seen["cases"], *seen["left_out"]), key=_time_s, reverse=True)
    calls = {id(row): row["call"] for row in rows}
    total_us, wall_s = 1e6 * sum(map(_time_s, rows)), seen["wall_s"]
    table = doc.Table(
        columns={"calls": "calls", "call": "call", "op": "by", "time": "time",
                 "place": "first place"},
        rows=[
            (doc.Value(row["count"], "count"), _words(row), _op(calls[id(row)]),
             doc.Value(1e6 * _time_s(row), "us"), _place(calls[id(row)]))
            for row in rows
        ],
        spare=("op",), cut="place", most=12,
    )  # fmt: skip
    left = Counter[str]()
    for row in seen["left_out"]:
        left[", ".join(row["problems"])] += row["count"]
    notes: list[doc.Words] = [
        f"{counted(count, 'call')} in no case: {what}" for what, count in left.items()
    ]
    notes += [f"{counted(count, 'call')} could not be described: {what}"
              for what, count in seen["undescribed"].items()]  # fmt: skip
    if again := sum(call["recomputed"] for call in calls.values()):
        notes.append(f"{counted(again, 'call')} ran again in a checkpoint's backward pass")
    if seen["compiled"]:
        notes.append(f"{counted(seen['compiled'], 'function')} went through torch.compile, whose"
                     " calls are not seen")  # fmt: skip
    if seen["stopped"]:
        notes.append(f"stopped {seen['stopped']}, as asked")
    cases = len(seen["cases"])
    return doc.Document(
        kind="capture", exit_code=code,
        conclusion=doc.Finding(
            sign="none", verdict=counted(seen["calls"], "call"), subject="attention",
            reason=doc.sentence(
                f"{counted(cases, 'case')} in {{file}}; the forward passes took {{time}},"
                " {share} of the program's {wall}",
                file=file, time=doc.Value(total_us, "us"),
                share=doc.Value(total_us / wall_s / 1e6, "share"), wall=doc.Value(wall_s, "s"),
            ),
        ),
        sections=[doc.Section("", [table, doc.Text(notes)])],
        commands=[("which is best for them", f"attnbench advise --cases {file}")] * (cases > 0),
    )  # fmt: skip


def _time_s(row: Mapping[str, Any]) -> float:
    """Its part of the time of a call that is split by its passes."""
    return float(row["call"]["time_s"] * row["count"] / row["call"]["calls"])


def _op(call: Mapping[str, Any]) -> str:
    return f"{call['op']} ({call['backend']})" if call.get("backend") else str(call["op"])


def _words(row: Mapping[str, Any]) -> str:
    """Its sizes as in labels, with what differs from plain multi-head attention."""
    parts = [f"B={row['B']}", f"H={row['H']}"]
    parts += [f"{x}={row[x]}" for x, same in (("G", "H"),) if row[x] != row[same]]
    n = [f"n={row['L']}"] if row["L"] == row["S"] else [f"L={row['L']}", f"S={row['S']}"]
    parts += [*n, f"D={row['D']}", *([f"V={row['V']}"] if row["V"] != row["D"] else [])]
    parts += [row["dtype"], *([row["mask"]] if row["mask"] != "full" else [])]
    parts += [row["pass"]] * (row["pass"] != "forward") + list(row.get("problems", ()))
    return " ".join(parts)


def _place(call: Mapping[str, Any]) -> str:
    if not call["places"]:
        return ""
    where, _, function = call["places"][0][0].rpartition(" ")
    return f"{PurePath(where).name} {function}"
