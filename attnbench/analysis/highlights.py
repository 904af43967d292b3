"""A run for people: a few sentences, and the table's most useful columns as text."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from attnbench.analysis.axes import AXES, slices
from attnbench.analysis.leads import against, hardest_case, number_of, place
from attnbench.analysis.notes import doubt, fresh, suspect_sentence
from attnbench.analysis.table import WORST_FIRST, time_ratio
from attnbench.base import units
from attnbench.store.runs import Run
from attnbench.theory.traits import TRAITS

SLICE = ["workload", "device", "dtype", "pass"]
_PLACE = ["workload", "pass", "dtype", "mask", "projection", "seq_len"]


def highlights(run: Run, frame: pd.DataFrame, costs: pd.DataFrame) -> list[str]:
    """Say what allocates least, what RoPE costs, what to distrust; `leads` say who is fastest.

    `frame` is that of `load`, `costs` that of `rope_cost`.
    """
    sentences = [run.unfinished, models_sentence(frame)]
    sentences += [workspace_sentence(rows) for _, rows in slices(frame, ["workload"])]
    sentences += [share_sentence(rows) for _, rows in slices(frame, ["workload"])]
    sentences += [cache_sentence(run, rows) for _, rows in slices(frame, SLICE)]
    sentences += [*retained_sentences(frame), *built_sentences(frame), *kept_sentences(frame)]
    sentences += math_sentences(frame)
    sentences += [fresh(run, frame)[0], rope_sentence(costs)]
    sentences += [suspect_sentence(frame), doubt(run, frame)[0]]
    return [sentence for sentence in sentences if sentence]


def measured_on(run: Run, frame: pd.DataFrame) -> tuple[str | None, str]:
    """The device, and how its times were taken; of a CPU only what is not the default."""
    known = run.shared(run.environments)
    on_gpu, allocator = known.get("device") == "cuda", known.get("allocator")
    timers = [_TIMERS[name] for name in sorted(frame["timer"].dropna().unique()) if name in _TIMERS]
    caches = " and ".join(sorted(frame["l2"].dropna().unique()))
    reads = ((frame["workload"] == "attention") & (frame["seq_len"] < frame["kv_len"])).any()
    plain = ("",) if on_gpu or reads else ("", "warm")
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
    of_tokens = TRAITS.get(str(rows["workload"].iloc[0])).unit == "token"
    if baseline in least or baseline not in of or of_tokens:
        return ""
    sizes = units.size(of[least[0]]), units.size(of[baseline])
    where = place(known.iloc[0], _PLACE, rows)
    return (
        f"{where}: the least workspace is {sizes[0]} ({', '.join(least)}); {baseline} needs"
        f" {sizes[1]}."
    )


def share_sentence(rows: pd.DataFrame) -> str:
    """Which part of a layer's time its attention takes: of the fastest, and of the baseline."""
    case, parts = hardest_case(rows), list[str]()
    first, base = case.index[:1], case.index[case["impl"] == case["baseline"]]
    for _, row in case.loc[first.union(base, sort=False)].iterrows():
        if (share := number_of(row, "core_share"))[1]:
            value, *ends = (f"{100 * (end or 0):.0f}" for end in share)
            parts.append(f"{value} % [{'–'.join(ends)}] with {row['impl']}")
    if not parts:
        return ""
    where = place(case.iloc[0], _PLACE, rows)
    takes = f"{where}: of the layer's time attention takes {', '.join(parts)}"
    rest = "projections" + " and positions" * (case["position"].iloc[0] != "none")
    rest += " and the cache" * (case["workload"].iloc[0] == "decode")
    return f"{takes}; {rest} take the rest."


def cache_sentence(run: Run, rows: pd.DataFrame) -> str:
    """What a cache saves at the longest context that both ways were measured at."""
    decode = rows[rows["cache"].notna() & rows["time_us"].notna()]
    if decode["cache"].nunique() < 2:
        return ""
    same = [name for name in ("impl", *AXES) if name != "cache" and decode[name].notna().all()]
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


def retained_sentences(frame: pd.DataFrame) -> Iterator[str]:
    """Implementations that hold memory after a first call, the more the longer n is."""
    for impl, rows in frame[frame["memory_retained_bytes"] > 0].groupby("impl", sort=False):
        kept = rows.groupby("seq_len")["memory_retained_bytes"].min()
        if len(kept) > 1 and (kept.diff().iloc[1:] > 0).all():
            first, last = (f"{units.size(kept.iloc[i])} at n={kept.index[i]}" for i in (0, -1))
            yield f"{impl} holds memory after its first call, more at each n: {first}, {last}."


def built_sentences(frame: pd.DataFrame) -> Iterator[str]:
    """Implementations whose building outlasts ten calls, or a token of those that decode.

    Without what made the mask, which has a column, and without compiling.
    """
    built_us = frame["build_us"] - frame["mask_build_us"].fillna(0)
    calls = (built_us / frame["time_us"]).where(frame["compile_s"].isna())
    long = (calls > 10) | (calls > 1) & (frame["workload"] == "decode")
    slow = frame.assign(calls=calls, built_us=built_us)[long]
    for row in slow.sort_values("calls").drop_duplicates("impl", keep="last").to_dict("records"):
        each = " for each token" if row["workload"] == "decode" else ""
        times = f"{units.digits(row['calls'])} times its call, and is not in the time"
        built = f"{units.time(row['built_us'])}{each}"
        yield f"Building {row['impl']} takes {built} at n={row['seq_len']}, {times}."


def kept_sentences(frame: pd.DataFrame) -> Iterator[str]:
    """Implementations that keep what they computed from their inputs: repeated calls are timed."""
    kept = frame[frame["new_inputs_us"].notna()].sort_values("seq_len")
    for row in kept.drop_duplicates("impl", keep="last").to_dict("records"):
        times = f"{units.time(row['new_inputs_us'])} on new inputs"
        yield (
            f"{row['impl']} keeps what it computed from its inputs: at n={row['seq_len']} a call"
            f" takes {times}, {units.time(row['time_us'])} on the same again."
        )


def math_sentences(frame: pd.DataFrame) -> Iterator[str]:
    """Where SDPA fell back to its math path without being asked for it, and torch's reason."""
    known = frame[frame["sdpa_reason"].notna()]
    for (impl, reason), rows in known.groupby(["impl", "sdpa_reason"], sort=False):
        cells = units.counted(len(rows), "cell")
        yield f"In {cells} of {impl} SDPA took its math path: {str(reason).rstrip('.')}."


def rope_sentence(costs: pd.DataFrame) -> str:
    """What a position encoding adds to the time, over all pairs."""
    if costs.empty:
        return ""
    added = costs["cost"] - 1
    middle, low, high = (units.percent(float(added.quantile(q))) for q in (0.5, 0.25, 0.75))
    clear = int(((costs["cost_low"] > 1) | (costs["cost_high"] < 1)).sum())
    if not clear:
        return f"The position encoding's cost could not be detected in any of {len(costs)} pairs."
    return (
        f"The position encoding adds {middle} to the time (median of {len(costs)} pairs, half of"
        f" them between {low} and {high}). In {clear} pairs the interval excludes 0."
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
