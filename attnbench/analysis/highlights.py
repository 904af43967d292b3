"""A run for people: a few sentences, and the table's most useful columns as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from attnbench.analysis.axes import label, label_axes, slices
from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.leads import against, approx, hardest_case, known_ratio, leads, tie
from attnbench.analysis.notes import doubt_sentence, suspect_sentence
from attnbench.analysis.table import WORST_FIRST, time_ratio
from attnbench.base import units
from attnbench.store.runs import Run
from attnbench.theory.traits import TRAITS

SLICE = ["workload", "device", "dtype", "pass"]


def highlights(run: Run, frame: pd.DataFrame, costs: pd.DataFrame) -> list[str]:
    """Say who is fastest (`leads`), what allocates least, what RoPE costs, what to distrust.

    `frame` is that of `load`, `costs` that of `rope_cost`.
    """
    # Of an unfinished run "all passed" would mislead.
    some = run.unfinished and (frame["status"] == "ok").all()
    sentences = [*leads(run, frame), run.unfinished, models_sentence(frame)]
    sentences += [workspace_sentence(rows) for _, rows in slices(frame, ["workload"])]
    sentences += [cache_sentence(run, rows) for _, rows in slices(frame, SLICE)]
    sentences.append("" if some else failed_sentence(frame))
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


def workspace_sentence(rows: pd.DataFrame) -> str:
    """Which implementations allocate least at a workload's largest n, against the baseline."""
    case, baseline = hardest_case(rows), str(rows["baseline"].iloc[0])
    known = case[case["memory_workspace_bytes"].notna()].sort_values("memory_workspace_bytes")
    of = dict(zip(known["impl"], known["memory_workspace_bytes"], strict=True))
    least = [impl for impl, size in of.items() if size == min(of.values())]
    if baseline in least or baseline not in of or _per_token(known.iloc[0]):
        return ""
    sizes = units.size(of[least[0]]), units.size(of[baseline])
    where = label(known.iloc[0], ["workload", "pass", "dtype", "mask", "seq_len"])
    return (
        f"{where}: the least workspace is that of {', '.join(least)}, {sizes[0]};"
        f" {baseline} needs {sizes[1]}."
    )


def _per_token(row: pd.Series[Any]) -> bool:
    return TRAITS.get(str(row["workload"])).unit == "token"


def cache_sentence(run: Run, rows: pd.DataFrame) -> str:
    """What a cache saves at the longest context that both ways were measured at."""
    decode = rows[rows["cache"].notna() & rows["time_us"].notna()]
    if decode["cache"].nunique() < 2:
        return ""
    same = [
        "impl", "position", "dtype", "heads", "kv_heads", "head_dim", "batch", "mask", "threads",
        "layers", "query_tokens", "new_tokens", "seq_len",
    ]  # fmt: skip
    counts = decode.groupby(same)["cache"].transform("nunique")
    longest = decode[counts == counts.max()].sort_values("seq_len", kind="stable")
    last = longest[longest["case_id"].isin(longest.tail(1)["case_id"])].iloc[0]
    peers = longest[(longest[same] == last[same]).all(axis=1)].sort_values("time_us")
    best, worst = peers.iloc[0], peers.iloc[-1]
    cells = {record.cell.key: record for record in run.records}
    known = time_ratio(run, *(cells[row["case_id"], row["impl"]] for row in (worst, best)))
    if known[0] is None:
        return ""
    compared = against(f"cache {best['cache']}", f"cache {worst['cache']}", known)
    return (
        f"Decoding with {best['impl']} at a context of {best['seq_len']}: {compared},"
        f" {units.time(best['time_us'])} a token."
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
    """One column for people: its header, the columns that it shows, and the text of a row.

    One with `where` is shown where that holds of the records table.
    """

    header: str
    of: tuple[str, ...]
    text: Callable[[Mapping[Any, Any]], str]
    where: Callable[[pd.DataFrame], bool] | None = None

    @property
    def meaning(self) -> str:
        """How to read it."""
        return "; ".join(COLUMNS.get(name).meaning for name in self.of)


def _time(row: Mapping[Any, Any]) -> str:
    """The time, behind a mark where it cannot be right (!) or has no bound for its error (?)."""
    sure = units.is_unknown(row["suspect"]), units.is_unknown(row["unsteady"])
    mark = "" if all(sure) else "? " if sure[0] else "! "
    return mark + units.time(row["time_us"])


def _speed(row: Mapping[Any, Any]) -> str:
    """The ratio; whether it is level; a * where the two times give another one."""
    value, low, high = known_ratio(row, "speedup")
    odd = row["impl"] != row["baseline"] and not units.is_unknown(row["speedup_reason"])
    level = low is not None and high is not None and low <= 1 <= high and tie(low, high)[0]
    return units.ratio(value) + "*" * (odd and value is not None) + " level" * level


def _mask(row: Mapping[Any, Any]) -> str:
    shares = units.percent(row["mask_density"]), units.percent(row["mask_block_density"])
    return ", ".join((*shares, units.time(row["mask_build_us"])))


SUMMARY: dict[str, SummaryColumn] = {
    "impl": SummaryColumn("implementation", ("impl",), lambda row: row["impl"]),
    "time": SummaryColumn("time", ("time_us", "unsteady", "suspect"), _time),
    "interval": SummaryColumn(
        "95 % interval", ("time_us_low",),
        lambda row: units.time_interval(row["time_us_low"], row["time_us_high"]),
    ),
    "speed": SummaryColumn("speed vs {baseline}", ("speedup", "speedup_reason"), _speed),
    "speed_interval": SummaryColumn(
        "95 % CI", ("speedup_low",),
        lambda row: units.ratio_interval(row["speedup_low"], row["speedup_high"]),
    ),
    "behind": SummaryColumn("vs fastest", ("behind",), lambda row: units.ratio(row["behind"])),
    "rate": SummaryColumn("useful rate", ("tflops",), lambda row: units.flop_rate(row["tflops"])),
    "workspace": SummaryColumn(
        "workspace", ("memory_workspace_bytes",),
        lambda row: units.size(row["memory_workspace_bytes"]),
    ),
    "error": SummaryColumn(
        "error / allowed", ("error_ratio",), lambda row: units.digits(row["error_ratio"], 2)
    ),
    "status": SummaryColumn("status", ("status",), lambda row: row["status"]),
    "approx": SummaryColumn(
        "off exact, local", ("approx_error", "approx_error_local"), approx,
        lambda frame: bool(frame["approx_error"].notna().any()),
    ),
    "mask": SummaryColumn(
        "mask: pairs, blocks, built", ("mask_density", "mask_block_density", "mask_build_us"),
        _mask, lambda frame: not frame["mask"].isin(("full", "causal")).all(),
    ),
}  # fmt: skip


def summary_columns(frame: pd.DataFrame) -> dict[str, SummaryColumn]:
    """The SUMMARY columns that have something to say of the rows of the records table."""
    baseline = str(next(iter(frame["baseline"].dropna()), "the baseline"))
    return {
        name: replace(column, header=column.header.format(baseline=baseline))
        for name, column in SUMMARY.items()
        if column.where is None or column.where(frame)
    }


def summary_rows(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Return one dict of texts a row, in `frame`'s order: `case` and then the SUMMARY columns.

    `frame` is that of `table.load`. `case` names the axes that vary in its workload.
    """
    names = label_axes(frame)
    return [
        {"case": label(row, names[row["workload"]])}
        | {name: column.text(row) for name, column in SUMMARY.items()}
        for row in frame.to_dict("records")
    ]
