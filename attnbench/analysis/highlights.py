"""A run for people: a few sentences, and the table's most useful columns as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.analysis.axes import label, label_axes, slices, varying
from attnbench.analysis.table import BASELINE, WORST_FIRST
from attnbench.base import units
from attnbench.base.registry import Registry
from attnbench.theory.traits import TRAITS

WIDE_INTERVAL = 0.2  # of the median; differences below it are lost in such a cell
SLICE = ["workload", "device", "dtype", "pass"]


def highlights(frame: pd.DataFrame, costs: pd.DataFrame, unfinished: str = "") -> list[str]:
    """Say what is fastest, what RoPE costs, what failed and what to distrust.

    `frame` is that of `compared`, `costs` that of `rope_cost`, `unfinished` that of the run.
    """
    some = unfinished and (frame["status"] == "ok").all()  # then "all passed" would mislead
    sentences = [unfinished, "" if some else failed_sentence(frame)]
    for _, rows in slices(frame, SLICE):
        hardest = " ".join(filter(None, (fastest_sentence(rows), workspace_sentence(rows))))
        sentences += [hardest, cache_sentence(rows)]
    sentences += [rope_sentence(costs), *doubt_sentences(frame)]
    return [sentence for sentence in sentences if sentence]


def hardest_case(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the measured case that stands for a slice.

    The one with the largest n; among those the plainest mask and position, the fewest threads, the
    most work, then (between caches, which do the same work) the one that is done soonest.
    """
    measured = rows[rows["time_us_median"].notna()]
    if measured.empty:
        return measured
    plain = measured.assign(
        _mask=measured["mask"] != "full",
        _position=measured["position"] != "none",
        _work=measured["batch"] * measured["heads"] * measured["head_dim"],
    )
    by = ["seq_len", "_mask", "_position", "threads", "_work", "time_us_median"]
    rising = [False, True, True, True, False, True]
    chosen = plain.sort_values(by, ascending=rising, kind="stable").iloc[0]
    there: pd.DataFrame = rows[rows["case_id"] == chosen["case_id"]]
    return there


def where(rows: pd.DataFrame, row: pd.Series[Any]) -> str:
    """Name a row among `rows`: what its slice is, and the axes that vary within it."""
    names = [name for name in varying(rows) if name not in (*SLICE, "seq_len")]
    kind = " ".join(str(row[name]) for name in ("workload", "pass", "dtype"))
    return " ".join(filter(None, (f"{kind}, n={row['seq_len']}", label(row, names))))


def fastest_sentence(rows: pd.DataFrame) -> str:
    """Which implementation leads at the largest n, and by how much over the baseline."""
    case = hardest_case(rows)
    if case["time_us_median"].count() == 0:
        return ""
    case = case.sort_values("time_us_median")
    best = case.iloc[0]
    time = units.time(best["time_us_median"])
    text = f"{where(rows, best)}: {best['impl']} is fastest with {time}"
    if _per_token(best):
        text += " a token"
    level = case["impl"][case["time_us_ci_low"] <= best["time_us_ci_high"]].tolist()[1:]
    if level:
        text += f" (level within the intervals: {', '.join(level)})"
    if best["impl"] == BASELINE or units.is_unknown(best["speed"]):
        return text + "."
    between = "too few samples for an interval"
    if not units.is_unknown(best["speed_low"]):
        between = f"95 % interval {units.ratio_interval(best['speed_low'], best['speed_high'])}"
    return text + f", {units.ratio(best['speed'])} as fast as {BASELINE} ({between})."


def workspace_sentence(rows: pd.DataFrame) -> str:
    """Which implementation allocates least at the largest n, against the baseline."""
    case = hardest_case(rows)
    known = case[case["memory_workspace_bytes"].notna()].sort_values("memory_workspace_bytes")
    of = dict(zip(known["impl"], map(units.size, known["memory_workspace_bytes"]), strict=True))
    least = next(iter(of), BASELINE)
    if least == BASELINE or BASELINE not in of or _per_token(known.iloc[0]):
        return ""
    return f"The least workspace is that of {least}, {of[least]}; {BASELINE} needs {of[BASELINE]}."


def _per_token(row: pd.Series[Any]) -> bool:
    return TRAITS.get(str(row["workload"])).unit == "token"


def cache_sentence(rows: pd.DataFrame) -> str:
    """What a cache saves at the longest context that both ways were measured at."""
    decode = rows[rows["cache"].notna() & rows["time_us_median"].notna()]
    if decode["cache"].nunique() < 2:
        return ""
    same = ["impl", "position", "heads", "batch", "mask", "threads", "seq_len"]
    counts = decode.groupby(same)["cache"].transform("nunique")
    longest = decode[counts == counts.max()].sort_values("seq_len", kind="stable")
    last = longest[longest["case_id"].isin(longest.tail(1)["case_id"])].iloc[0]
    peers = longest[(longest[same] == last[same]).all(axis=1)].sort_values("time_us_median")
    best, worst = peers.iloc[0], peers.iloc[-1]
    return (
        f"Decoding with {best['impl']} at a context of {best['seq_len']}:"
        f" cache {best['cache']} takes {units.time(best['time_us_median'])} a token,"
        f" cache {worst['cache']} {units.time(worst['time_us_median'])}"
        f" ({units.ratio(worst['time_us_median'] / best['time_us_median'])})."
    )


def rope_sentence(costs: pd.DataFrame) -> str:
    """What a position encoding adds to the time, over all pairs."""
    if costs.empty:
        return ""
    added = costs["cost"] - 1
    middle, low, high = (units.percent(float(added.quantile(q))) for q in (0.5, 0.25, 0.75))
    clear = int(((costs["cost_low"] > 1) | (costs["cost_high"] < 1)).sum())
    return (
        f"The position encoding changes the time by {middle} in the median of {len(costs)} pairs"
        f" (middle half: {low} to {high}); in {clear} of them the interval excludes no change."
    )


def failed_sentence(frame: pd.DataFrame) -> str:
    """How many cells have no result, by status."""
    counts = frame["status"].value_counts()
    bad = ", ".join(f"{counts[status]} {status}" for status in WORST_FIRST if status in counts)
    if frame.empty:
        return "No cell has been recorded yet."
    if not bad and len(frame) == 1:
        return "The only cell passed its check and was measured."
    cells = units.count(len(frame))
    if not bad:
        return f"All {cells} cells passed their check and were measured."
    missing = units.count(len(frame) - int(counts.get("ok", 0)))
    return f"{missing} of {cells} cells have no time: {bad}."


def doubt_sentences(frame: pd.DataFrame) -> list[str]:
    """How many times cannot be right, are too uncertain to compare by, or come with a note."""
    suspect, unsteady = (int(frame[name].notna().sum()) for name in ("suspect", "unsteady"))
    width = (frame["time_us_ci_high"] - frame["time_us_ci_low"]) / frame["time_us_median"]
    wide, known = int((width > WIDE_INTERVAL).sum()), int(width.notna().sum())
    sentences = {
        f"{suspect} times are beyond what the device can do: see the column suspect.": suspect,
        f"{units.count(wide)} of {units.count(known)} intervals are wider than"
        f" {100 * WIDE_INTERVAL:.0f} % of their median: the machine was busy, or the samples"
        " few.": wide,
        f"{unsteady} of {int(frame['time_us_median'].notna().sum())} times were disturbed or"
        " unsteady (column notes): don't compare by them; measure again on a quiet machine, or"
        " with --threads 1.": unsteady,
        "Intervals replicate samples within one process; another process of the same code may"
        " differ by a few percent more.": frame["interval"].notna().any(),
    }
    return [sentence for sentence, applies in sentences.items() if applies]


# The summary table: one row a column.


@dataclass(frozen=True, kw_only=True)
class SummaryColumn:
    """One column for people: its header, how to read it, and the text of a row."""

    header: str
    meaning: str
    text: Callable[[Mapping[Any, Any]], str]


def _status(row: Mapping[Any, Any]) -> str:
    if not units.is_unknown(row["suspect"]):
        return "suspect"
    return str(row["status"]) if units.is_unknown(row["unsteady"]) else "unsteady"


SUMMARY: Registry[SummaryColumn] = Registry("summary column")
for _name, _header, _meaning, _text in (
    ("impl", "implementation", "sorted fastest first within a case", lambda row: row["impl"]),
    (
        "time", "time",
        "median per call (decode: per token); host time on a CPU, of each sample's fastest batch;"
        " stream time on a GPU",
        lambda row: units.time(row["time_us_median"]),
    ),
    (
        "interval", "95 % interval",
        "of that time: over fresh processes where there are several (--processes), else within one"
        " process, from order statistics; – below 6 samples",
        lambda row: units.time_interval(row["time_us_ci_low"], row["time_us_ci_high"]),
    ),
    (
        "speed", "speed vs naive", "naive's time / this time on the same case; above 1 is faster",
        lambda row: units.ratio(row["speed"]),
    ),
    (
        "speed_interval", "its interval", "at least 95 %, from the intervals of both medians",
        lambda row: units.ratio_interval(row["speed_low"], row["speed_high"]),
    ),
    (
        "rate", "useful rate",
        "useful FLOPs (admitted pairs only, flash-attention's convention) / median time",
        lambda row: units.flop_rate(row["tflops"]),
    ),
    (
        "workspace", "workspace",
        "highest allocation during the call, without inputs, prepared memory and outputs",
        lambda row: units.size(row["memory_workspace_bytes"]),
    ),
    (
        "error", "error / allowed",
        "error against float64 over the allowed error; right at 1 or below",
        lambda row: units.digits(row["error_ratio"], 2),
    ),
    (
        "status", "status",
        "ok, or what became of the cell; suspect: the time cannot be right; unsteady: see notes",
        _status,
    ),
):  # fmt: skip
    SUMMARY.add(_name, SummaryColumn(header=_header, meaning=_meaning, text=_text))


def summary_rows(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Return one dict of texts a row, in `frame`'s order: `case` and then the SUMMARY columns.

    `frame` is that of `table.compared`. `case` names the axes that vary in its workload.
    """
    names = label_axes(frame)
    return [
        {"case": label(row, names[row["workload"]])}
        | {name: column.text(row) for name, column in SUMMARY.items()}
        for row in frame.to_dict("records")
    ]
