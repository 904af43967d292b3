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
    rows = sorted((*seen["cases"], *seen["left_out"]), key=lambda row: -row["call"]["time_s"])
    total_us, wall_s = sum(1e6 * row["call"]["time_s"] for row in rows), seen["wall_s"]
    table = doc.Table(
        columns={"calls": "calls", "call": "call", "op": "by", "time": "time",
                 "place": "first place"},
        rows=[
            (doc.Value(row["count"], "count"), call_words(row),
             row["call"]["op"] + f" ({row['call']['backend']})" * bool(row["call"]["backend"]),
             doc.Value(1e6 * row["call"]["time_s"] or None, "us"),
             PurePath(row["call"]["places"][0][0].rpartition(" ")[0]).name)
            for row in rows
        ],
        spare=("op",), cut="place", most=12,
    )  # fmt: skip
    left = Counter[str]()
    for row in seen["left_out"]:
        left[f"in no case: {', '.join(row['problems'])}"] += row["count"]
    left.update({f"could not be described: {x}": n for x, n in seen["undescribed"].items()})
    notes: list[doc.Words] = [f"{counted(n, 'call')} {what}" for what, n in left.items()]
    if again := sum(row["call"]["recomputed"] for row in rows):
        notes.append(f"{counted(again, 'call')} ran again in a checkpoint's backward pass")
    if seen["compiled"]:
        notes.append(f"{counted(seen['compiled'], 'function')} went through torch.compile: calls in"
                     " graphs that were compiled meanwhile count, without a time")  # fmt: skip
    if verified := seen.get("verified"):
        unseen = [f"{n} × {op}" for op, n in verified["unseen"].items()]
        notes.append(
            f"verified in a second run: {counted(verified['calls'], 'call')} seen, "
            f"{sum(verified['unseen'].values())} more ran that capture cannot describe"
            + f": {', '.join(unseen)}"
            * bool(unseen)
        )
    if children := seen.get("children"):
        notes.append(f"some were made by child processes: {children}")
    if seen["stopped"]:
        notes.append(f"stopped {seen['stopped']}, as asked")
    cases, words = len(seen["cases"]), "{cases} in {file}"
    if total_us:
        words += "; the forward passes took {time}, {share} of the program's {wall}"
    return doc.Document(
        kind="capture", exit_code=code,
        conclusion=doc.Finding(
            sign="none", verdict=counted(seen["calls"], "call"), subject="attention",
            reason=doc.sentence(
                words, cases=counted(cases, "case"), file=file, time=doc.Value(total_us, "us"),
                share=doc.Value(total_us / wall_s / 1e6, "share"), wall=doc.Value(wall_s, "s"),
            ),
        ),
        sections=[doc.Section("", [table, doc.Text(notes)])],
        commands=[("which is best for them", f"attnbench advise --cases {file}")] * (cases > 0),
    )  # fmt: skip


def call_words(row: Mapping[str, Any]) -> str:
    """Its sizes as in labels, with what differs from plain multi-head attention."""
    sizes = [f"{x}={row[x]}" for x in ("B", "H", "G") if x != "G" or row["G"] != row["H"]]
    sizes += [f"n={row['L']}"] if row["L"] == row["S"] else [f"L={row['L']}", f"S={row['S']}"]
    sizes += [f"{x}={row[x]}" for x in ("D", "V") if x != "V" or row["V"] != row["D"]]
    more = (row["mask"], "full"), (row["pass"], "forward")
    parts = [*sizes, row["dtype"], *(word for word, plain in more if word != plain)]
    return " ".join((*parts, *row.get("problems", ())))
