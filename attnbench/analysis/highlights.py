"""A run for people: a few sentences, and the table's most useful columns as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.analysis.axes import label, label_axes, slices, varying
from attnbench.analysis.notes import WIDE, doubt_sentence, suspect_sentence
from attnbench.analysis.pairs import decided
from attnbench.analysis.table import BASELINE, WORST_FIRST, time_ratio
from attnbench.base import units
from attnbench.execution.store import Run
from attnbench.theory.traits import TRAITS

SLICE = ["workload", "device", "dtype", "pass"]


def highlights(run: Run, frame: pd.DataFrame, costs: pd.DataFrame) -> list[str]:
    """Say what is fastest, what RoPE costs, what failed and what to distrust.

    `frame` is that of `compared`, `costs` that of `rope_cost`. Only what the intervals of pairs
    decide is said to be faster; what they do not is level.
    """
    # Of an unfinished run "all passed" would mislead.
    some = run.unfinished and (frame["status"] == "ok").all()
    sentences = [run.unfinished, models_sentence(frame), "" if some else failed_sentence(frame)]
    for _, rows in slices(frame, SLICE):
        hardest = " ".join(filter(None, (fastest_sentence(rows), workspace_sentence(rows))))
        sentences += [hardest, cache_sentence(run, rows)]
    sentences += [rope_sentence(costs), suspect_sentence(frame), doubt_sentence(run, frame)]
    return [sentence for sentence in sentences if sentence]


def measured_on(run: Run, frame: pd.DataFrame) -> tuple[str | None, str]:
    """The device, and how its times were taken; of a CPU only what is not the default."""
    known = run.shared(run.environments)
    on_gpu, allocator = known.get("device") == "cuda", known.get("allocator")
    timers = [_TIMERS[name] for name in sorted(frame["timer"].dropna().unique()) if name in _TIMERS]
    caches = " and ".join(sorted(frame["l2"].dropna().unique()))
    plain = ("",) if on_gpu else ("", "warm")
    mhz = frame["sm_mhz"].dropna()
    span = dict.fromkeys(f"{end:.0f}" for end in (mhz.min(), mhz.max()))  # often one clock
    facts = [
        f"driver {known['driver']}" if known.get("driver") else "",
        f"timed {' and '.join(timers)}" if timers else "",
        f"{'L2' if on_gpu else 'last cache'} {caches}" if caches not in plain else "",
        f"SM clock {'–'.join(span)} MHz" if len(mhz) else "",
        f"allocator {allocator}" if allocator not in (None, "settled") else "",
    ]
    models = " and ".join(sorted(frame["device_name"].dropna().unique()))
    return models or known.get("device_name"), ", ".join(filter(None, facts))


def models_sentence(frame: pd.DataFrame) -> str:
    """Of a run on several models of device that their rows are not compared."""
    counts = frame["device_name"].value_counts()
    models = ", ".join(f"{name} ({units.counted(n, 'cell')})" for name, n in counts.items())
    apart = f"Measured on {len(counts)} device models: {models}; rows of different ones are not"
    return f"{apart} compared." if len(counts) > 1 else ""


_TIMERS = {"events": "by CUDA events", "graph": "in a CUDA graph"}


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


def fastest_sentence(rows: pd.DataFrame) -> str:
    """Which implementation leads at the largest n, or which are level there."""
    case = hardest_case(rows)
    case = case[case["behind"].notna() & case["suspect"].isna()]
    if case.empty:
        return ""
    case = case.sort_values("time_us_median", kind="stable")
    best, others = case.iloc[0], case.iloc[1:].to_dict("records")
    time = units.time(best["time_us_median"]) + (" a token" if _per_token(best) else "")
    off = _approx(best["approx_error"], best["approx_error_local"])
    aside = "" if off == units.UNKNOWN else f" (off exact attention by {off} on local inputs)"
    # What its slice is, and the axes that vary within it.
    names = [name for name in varying(rows) if name not in (*SLICE, "seq_len")]
    where = f"{best['workload']} {best['pass']} {best['dtype']}, n={best['seq_len']}"
    text = f"{where} {label(best, names)}".rstrip() + f": {best['impl']}{aside}"
    if not others:
        return f"{text} takes {time}."
    ties: dict[str, list[str]] = {"level with": [], "not told apart from": []}
    for row in others:
        if decided(row["behind_low"], row["behind_high"]) <= 0:
            level, known = tie(row["behind_low"], row["behind_high"])
            how = "level with" if level else "not told apart from"
            ties[how].append(f"{row['impl']} ({known})")
    if said := [f"{how} {', '.join(names)}" for how, names in ties.items() if names]:
        return f"{text} with {time} is {', and '.join(said)}."
    if best["impl"] == BASELINE or decided(best["speed_low"], best["speed_high"]) <= 0:
        return f"{text} is fastest with {time}."
    between = units.ratio_interval(best["speed_low"], best["speed_high"])
    times = f"{units.ratio(best['speed'])} as fast as {BASELINE} (95 % interval {between})"
    return f"{text} is fastest with {time}, {times}."


def tie(low: Any, high: Any) -> tuple[bool, str]:
    """Whether a ratio whose interval holds 1 is level, and what is known: `± 6 %`, `0.600–1.70×`.

    It is level if it is known to lie within 10 % of 1.
    """
    if units.is_unknown(low) or units.is_unknown(high):
        return False, "too few samples"
    beyond = max(high, 1 / low) - 1
    if beyond > WIDE:
        return False, units.ratio_interval(low, high)
    return True, f"± {units.brief_percent(beyond)}"


def workspace_sentence(rows: pd.DataFrame) -> str:
    """Which implementations allocate least at the largest n, against the baseline."""
    case = hardest_case(rows)
    known = case[case["memory_workspace_bytes"].notna()].sort_values("memory_workspace_bytes")
    of = dict(zip(known["impl"], known["memory_workspace_bytes"], strict=True))
    least = [impl for impl, size in of.items() if size == min(of.values())]
    if BASELINE in least or BASELINE not in of or _per_token(known.iloc[0]):
        return ""
    sizes = units.size(of[least[0]]), units.size(of[BASELINE])
    names = ", ".join(least)
    return f"The least workspace is that of {names}, {sizes[0]}; {BASELINE} needs {sizes[1]}."


def _per_token(row: pd.Series[Any]) -> bool:
    return TRAITS.get(str(row["workload"])).unit == "token"


def cache_sentence(run: Run, rows: pd.DataFrame) -> str:
    """What a cache saves at the longest context that both ways were measured at."""
    decode = rows[rows["cache"].notna() & rows["time_us_median"].notna()]
    if decode["cache"].nunique() < 2:
        return ""
    same = [
        "impl", "position", "dtype", "heads", "kv_heads", "head_dim", "batch", "mask", "threads",
        "layers", "query_tokens", "new_tokens", "seq_len",
    ]  # fmt: skip
    counts = decode.groupby(same)["cache"].transform("nunique")
    longest = decode[counts == counts.max()].sort_values("seq_len", kind="stable")
    last = longest[longest["case_id"].isin(longest.tail(1)["case_id"])].iloc[0]
    peers = longest[(longest[same] == last[same]).all(axis=1)].sort_values("time_us_median")
    best, worst = peers.iloc[0], peers.iloc[-1]
    cells = {record.cell.key: record for record in run.records}
    value, low, high = time_ratio(
        run, *(cells[row["case_id"], row["impl"]] for row in (worst, best))
    )
    level, known = tie(low, high)
    compared = f"{'level' if level else 'not told apart'}, {known}"
    if decided(low, high):
        compared = f"{units.ratio(value)}, 95 % interval {units.ratio_interval(low, high)}"
    return (
        f"Decoding with {best['impl']} at a context of {best['seq_len']}:"
        f" cache {best['cache']} takes {units.time(best['time_us_median'])} a token,"
        f" cache {worst['cache']} {units.time(worst['time_us_median'])}"
        f" ({compared})."
    )


def rope_sentence(costs: pd.DataFrame) -> str:
    """What a position encoding adds to the time, over all pairs."""
    if costs.empty:
        return ""
    added = costs["cost"] - 1
    middle, low, high = (units.percent(float(added.quantile(q))) for q in (0.5, 0.25, 0.75))
    clear = int(((costs["cost_low"] > 1) | (costs["cost_high"] < 1)).sum())
    if not clear:
        return f"No cost of the position encoding is shown in any of {len(costs)} pairs."
    return (
        f"The position encoding adds {middle} to the time in the median of {len(costs)} pairs"
        f" (middle half: {low} to {high}); in {clear} of them the interval excludes no change."
    )


def failed_sentence(frame: pd.DataFrame) -> str:
    """How many cells have no result, by status."""
    bad, cells = units.tally(frame["status"], WORST_FIRST), units.count(len(frame))
    if bad:
        missing = units.count((frame["status"] != "ok").sum())
        return f"{missing} of {cells} cells have no time: {bad}."
    if len(frame) > 1:
        return f"All {cells} cells passed their check and were measured."
    one = "The only cell passed its check and was measured."
    return "No cell has been recorded yet." if frame.empty else one


# The summary table: one row a column.


@dataclass(frozen=True)
class SummaryColumn:
    """One column for people: its header, how to read it, and the text of a row.

    One with `where` is shown where that holds of the records table.
    """

    header: str
    meaning: str
    text: Callable[[Mapping[Any, Any]], str]
    where: Callable[[pd.DataFrame], bool] | None = None


def _time(row: Mapping[Any, Any]) -> str:
    """The time, behind a mark where it cannot be right (!) or has no bound for its error (?)."""
    sure = units.is_unknown(row["suspect"]), units.is_unknown(row["unsteady"])
    mark = "" if all(sure) else "? " if sure[0] else "! "
    return mark + units.time(row["time_us_median"])


def _speed(row: Mapping[Any, Any]) -> str:
    ratio, low, high = units.ratio(row["speed"]), row["speed_low"], row["speed_high"]
    if row["impl"] == BASELINE or ratio == units.UNKNOWN or decided(low, high):
        return ratio
    if units.is_unknown(low):
        return f"? {ratio}"
    level, known = tie(low, high)
    return f"level {known}" if level else known


SUMMARY: dict[str, SummaryColumn] = {
    "impl": SummaryColumn(
        "implementation",
        "sorted fastest first within a case",
        lambda row: row["impl"],
    ),
    "time": SummaryColumn(
        "time",
        "per call (decode: per token): host time on a CPU, the low end of what other work left"
        " alone; stream time on a GPU; ?: unsteady, its error has no bound (see notes); !:"
        " suspect, it cannot be right",
        _time,
    ),
    "interval": SummaryColumn(
        "95 % interval",
        "of that time: over fresh processes where there are several (--processes), else within one"
        " process, from order statistics; – below 6 samples",
        lambda row: units.time_interval(row["time_us_ci_low"], row["time_us_ci_high"]),
    ),
    "speed": SummaryColumn(
        "speed vs naive",
        "naive's time / this time in rounds that both were timed in: above 1 is faster; where the"
        " interval holds 1, level within so much, or from 10 % on the interval; ?: without one",
        _speed,
    ),
    "speed_interval": SummaryColumn(
        "its interval",
        "at least 95 %, of another process of the same code, too; – below 6 rounds",
        lambda row: units.ratio_interval(row["speed_low"], row["speed_high"]),
    ),
    "rate": SummaryColumn(
        "useful rate",
        "useful FLOPs (admitted pairs only, flash-attention's convention) / median time",
        lambda row: units.flop_rate(row["tflops"]),
    ),
    "workspace": SummaryColumn(
        "workspace",
        "highest allocation during the call, without inputs, prepared memory and outputs",
        lambda row: units.size(row["memory_workspace_bytes"]),
    ),
    "error": SummaryColumn(
        "error / allowed",
        "error against float64 over the allowed error; right at 1 or below",
        lambda row: units.digits(row["error_ratio"], 2),
    ),
    "status": SummaryColumn("status", "ok, or what became of the cell", lambda row: row["status"]),
    "approx": SummaryColumn(
        "off exact, local",
        "how far the output is from that of exact attention, relative, in the root mean"
        " square: on normal inputs, whose attention is spread over all keys, and on inputs whose"
        " attention is local; – for what is exact",
        lambda row: _approx(row["approx_error"], row["approx_error_local"]),
        lambda frame: bool(frame["approx_error"].notna().any()),
    ),
    "mask": SummaryColumn(
        "mask: pairs, blocks, built",
        "pairs that the mask admits, of all, and blocks of 128 x 128 that hold one; the"
        " time it took to make the mask, once, outside the calls; – where it made none",
        lambda row: (
            f"{units.percent(row['mask_density'])}, {units.percent(row['mask_block_density'])}, "
            f"{units.time(row['mask_build_us'])}"
        ),
        lambda frame: not frame["mask"].isin(("full", "causal")).all(),
    ),
}


def _approx(*errors: float | None) -> str:
    known = [f"{units.digits(100 * e, 2)} %" for e in errors if e is not None and e == e]
    return ", ".join(known) or units.UNKNOWN


def summary_columns(frame: pd.DataFrame) -> dict[str, SummaryColumn]:
    """The SUMMARY columns that have something to say of the rows of the records table."""
    return {name: c for name, c in SUMMARY.items() if c.where is None or c.where(frame)}


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
