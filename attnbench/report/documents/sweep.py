"""A run of sweeps: who is fastest, every result, what failed, how cost grows, what limits it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import pandas as pd

from attnbench.analysis import table
from attnbench.analysis.axes import fixed, heading, label, label_axes, slices, varying
from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.crossovers import Crossover, crossovers
from attnbench.analysis.highlights import failed_sentence, highlights, measured_on
from attnbench.analysis.leads import approx, leads, number_of, tie
from attnbench.analysis.notes import doubt, fresh
from attnbench.analysis.scaling import scaling
from attnbench.analysis.scaling.results import Scaling, grows
from attnbench.analysis.times import time_us
from attnbench.base import units
from attnbench.errors import ExitCode
from attnbench.machine import limits
from attnbench.report import document as doc
from attnbench.report.documents import check
from attnbench.report.documents.verify import decisive, laws
from attnbench.report.growth import raised
from attnbench.store.runs import Run

SHOWN = 60  # rows of the table that comes first
MOST_ROWS = 1500  # of all tables: a browser stays quick, and the export holds everything
MOST_CROSSOVERS = 120
ORDER = {"crosses": 0, "none": 1, "no difference": 2}
INNER = ("seq_len", "kv_len")  # what differs between the cases of one table
PLOTS = (
    "A colour and a marker stand for one implementation in all figures, a dash pattern for its"
    " cache, projection or parameters; bars are intervals. The first figure of each kind is in"
    " plots/ as PNG; any of them for a paper: attnbench report RUN --figure NAME"
)
CROSSINGS = (
    "Where one overtakes the other, all else being equal. The ratio of their times is interpolated"
    " between the sizes measured; its interval covers every n where the two are level."
)
LIMITS = (
    "What large matmuls, reads and copies reached on this machine, each from several rounds. The"
    " columns fraction_of_compute_peak, fraction_of_memory_peak and bound compare each cell with"
    " these limits. Other work on the machine can only have lowered them."
)
STEPS = (
    "Times of the calls multiplied by their counts. The ends of their intervals add up; ratios are"
    " weighted by these times. Unknown where a call has no time."
)
CI = {"speed": "95 % CI", "ratio": "95 % CI"}
PACKED = (
    "The same tokens, but for queries of padding. Ratios are paired; below 1 packing is faster."
)
NAIVE = (
    "In half precision naive's softmax is in float32: 24 bytes a score, where papers' standard"
    " attention has 8. Ratios against it are 2 to 3 times theirs."
)
Row = Mapping[Any, Any]


def _time(row: Row) -> doc.Value:
    """The time, behind a mark where it cannot be right (!) or has no bound for its error (?)."""
    sure = units.is_unknown(row["suspect"]), units.is_unknown(row["unsteady"])
    of = "" if all(sure) else "?" if sure[0] else "!"
    return replace(_value(row, "time_us", "us"), of=of)


PAIRED = (
    "* from the rounds in which both were timed, where what slows the machine slows both; the times"
    " of these rows rest on all their samples, and give another ratio"
)


def _speed(row: Row) -> doc.Value:
    """The ratio; whether it is level; a * where the two times give another one."""
    found = _value(row, "speedup", "ratio")
    odd = row["impl"] != row["baseline"] and not units.is_unknown(row["speedup_reason"])
    level = False
    if found.low is not None and found.high is not None and found.low <= 1 <= found.high:
        level = tie(found.low, found.high)[0]
    mark = "*" * (odd and found.number is not None) + " level" * level
    return replace(found, mark=mark)


def _value(row: Row, name: str, unit: doc.Unit) -> doc.Value:
    """A column of the records table with its interval, where it has one."""
    number, low, high = number_of(row, name)
    return doc.Value(number, unit, low, high)


def _mask(row: Row) -> doc.Cell:
    if row["mask"] in ("full", "causal"):
        return doc.Value(None)
    shares = units.percent(row["mask_density"]), units.percent(row["mask_block_density"])
    return ", ".join((*shares, units.time(row["mask_build_us"])))


# By the name in JSON: header, the columns of the export that it shows, and its value.
SUMMARY: dict[str, tuple[str, tuple[str, ...], Callable[[Row], doc.Cell]]] = {
    "impl": ("impl", ("impl",), lambda row: doc.Value(row["impl"], "impl")),
    "time": ("time", ("time_us", "unsteady", "suspect"), _time),
    "speed": ("speed vs {baseline}", ("speedup", "speedup_reason"), _speed),
    "behind": ("vs fastest", ("behind",),
               lambda row: doc.Value(_value(row, "behind", "ratio").number, "ratio")),
    "rate": ("useful FLOP/s", ("tflops",), lambda row: _value(row, "tflops", "tflops")),
    "workspace": ("workspace", ("memory_workspace_bytes",),
                  lambda row: _value(row, "memory_workspace_bytes", "bytes")),
    "cache": ("cache size", ("cache_bytes",), lambda row: _value(row, "cache_bytes", "bytes")),
    "error": ("error / allowed", ("error_ratio",),
              lambda row: _value(row, "error_ratio", "number")),
    "approx": ("off exact, local", ("approx_error", "approx_error_local"),
               lambda row: approx(row) or doc.Value(None)),
    "mask": ("mask: pairs, blocks, built", ("mask_density", "mask_block_density", "mask_build_us"),
             _mask),
    "status": ("status", ("status",), lambda row: str(row["status"])),
}  # fmt: skip
_NOTHING: set[doc.Cell] = {"ok", *(doc.Value(None, unit) for unit in get_args(doc.Unit))}
_KEPT = ("case", "impl", "time", "speed")
_SPARE = ("mask", "error", "rate", "behind", "workspace", "cache", "approx")


def document(run: Run, baseline: str | None = None, *, brief: bool = False) -> doc.Document:
    """All of a run; if `brief` without figures and growth. Ratios are against `baseline`.

    Raises:
        UnknownNameError: the run has no implementation of that name.
    """
    frame = table.load(run, baseline)
    costs = frame.iloc[:0] if brief else table.rope_cost(run)
    found = None if brief else (scaling(run), crossovers(run, baseline))
    fastest = leads(run, frame)
    law = raised(grows(found[0].exponents)) if found else ""
    statuses = set(frame["status"])
    code = ExitCode.OK if "ok" in statuses else ExitCode.USAGE
    bad = statuses & {"incorrect", "crashed", "error"}
    sign: doc.Sign = "bad" if bad else "good" if statuses == {"ok"} else "none"
    where = shlex.quote(str(run.path))
    meanings: doc.Facts = {
        head: doc.Value("; ".join(COLUMNS.get(name).meaning for name in SUMMARY[key][1]))
        for key, head in _headers(frame).items()
    }
    sections = [
        doc.Section("Results", list(_results(frame, where))),
        doc.Section("What a step spends", list(_steps(run, frame))),
        doc.Section("Padded or packed", list(packed(run, frame))),
        doc.Section("Without a result", list(failures(run, frame))),
        doc.Section("Suspect times", list(_suspects(frame))),
    ]
    if found:
        sections += _figures(frame, costs, *found)
    sections += [
        *_all_results(frame, where),
        doc.Section("Limits of the machine", list(_limits(run)), folded=True),
        doc.Section("Wall time", list(_spent(run)), folded=not brief),
        doc.Section("Environment", [doc.facts(run.shared(run.environments))], folded=True),
        doc.Section("Options", [doc.facts(run.info.get("options") or {})], folded=True),
        doc.Section("How to read the columns", [meanings], folded=True),
    ]
    return doc.Document(
        kind="report", created=run.info.get("created") or "",
        exit_code=ExitCode.FINDING if "incorrect" in statuses else code,
        conclusion=doc.Finding(
            sign="open" if run.unfinished else sign, subject=run.run_id,
            verdict="unfinished" if run.unfinished else failed_sentence(frame).rstrip("."),
            reason=failed_sentence(frame).rstrip(".") if run.unfinished and bad else "",
        ),
        about=[*fastest, *[law] * bool(law), *highlights(run, frame, costs),
               " · ".join(head(run, frame))],
        sections=sections, title="" if bad or run.unfinished else next(iter(fastest), ""),
        commands=[*((name, command) for name, of in (("narrow", doubt), ("keep", fresh))
                    for command in of(run, frame)[1:] if command),
                  *(decisive(found[0], run) if found else ()),
                  ("records", str(run.path / "records.jsonl")),
                  ("report", f"attnbench report {where}")],
    )  # fmt: skip


def head(run: Run, frame: pd.DataFrame) -> Iterator[str]:
    """Run, device, how it was timed, date and versions."""
    known = run.shared(run.environments)
    counts = frame["threads"][frame["device"] == "cpu"].unique().tolist()
    pinned = ", pinned to a CPU" * bool(frame["pinned_cpu"].notna().any())
    words = [
        *measured_on(run, frame), units.moment(run.info.get("created")),
        *(units.counted(count, "thread") + (count == 1) * pinned for count in sorted(counts)
          if len(counts) > 1 or count == 1),
        f"torch {known['torch']}" if known.get("torch") else None,
        f"attnbench {run.info['attnbench']}" if run.info.get("attnbench") else None,
        fixed(frame) or None,
    ]  # fmt: skip
    yield from (str(word) for word in words if word)


def _headers(frame: pd.DataFrame) -> dict[str, str]:
    baseline = str(next(iter(frame["baseline"].dropna()), "the baseline"))
    return {name: head.format(baseline=baseline) for name, (head, *_) in SUMMARY.items()}


def results_table(
    frame: pd.DataFrame, names: Mapping[str, list[str]], titles: Mapping[str, str] = {},
    without: Collection[str] = (), **more: Any,
) -> Iterator[doc.Part]:  # fmt: skip
    """Rows of the records table as people read them, each case once, by its title or its axes.

    Without columns that say nothing; what is the same in all rows follows in a line.
    """
    heads = {"case": "case"} | {n: h for n, h in _headers(frame).items() if n not in without}
    rows: list[dict[str, doc.Cell]] = [
        {"case": titles.get(row["case_id"]) or heading(row, names[row["workload"]])}
        | {name: value(row) for name, (_, _, value) in SUMMARY.items()}
        for row in frame.to_dict("records")
    ]
    alike = {
        name: values.pop()
        for name in heads
        if name not in _KEPT and len(values := {row[name] for row in rows}) == 1
        and (len(rows) > 1 or values <= _NOTHING)
    }  # fmt: skip
    columns = {name: head for name, head in heads.items() if name not in alike}
    fastest = frame["behind"].notna() & frame["suspect"].isna() & ~(frame["behind_low"] > 1)
    yield doc.Table(
        columns=columns, rows=[[row[name] for name in columns] for row in rows],
        spare=[name for name in _SPARE if name in columns], cut="impl", grouped=True,
        intervals=CI, bold=[i for i, x in enumerate(fastest) if x], **more,
    )  # fmt: skip
    odd = frame[frame["speedup_reason"].notna() & (frame["impl"] != frame["baseline"])]
    if odd["speedup"].notna().any():  # of each row the export says why
        yield doc.Text([PAIRED], quiet=True)
    same = [(heads[name], value) for name, value in alike.items() if value not in _NOTHING]
    if same:
        text = ", ".join(f"{name} {{{i}}}" for i, (name, _) in enumerate(same))
        known: Any = {str(i): value for i, (_, value) in enumerate(same)}
        yield doc.Text([doc.sentence(f"in all rows: {text}", **known)], quiet=True)


def _results(frame: pd.DataFrame, where: str) -> Iterator[doc.Part]:
    """All rows with a result if they are few, else those of the largest n of each workload."""
    measured = shown = frame[frame["status"] == "ok"]
    if len(measured) > SHOWN:
        top = measured.groupby("workload")["seq_len"].transform("max")
        shown = measured[measured["seq_len"] == top].head(SHOWN)
    if shown.empty:
        return
    bold = "Bold: the fastest of a case, and all that cannot be told apart from it."
    yield from results_table(shown, label_axes(frame), most=SHOWN, bold_means=bold)
    if set(shown["baseline"]) == {"naive"} and {"bfloat16", "float16"} & set(shown["dtype"]):
        yield doc.Text([NAIVE], quiet=True)
    if left_out := len(measured) - len(shown):
        more = f"Only the largest n; {left_out} more rows: attnbench export {where}"
        yield doc.Text([more], quiet=True)


def _steps(run: Run, frame: pd.DataFrame) -> Iterator[doc.Part]:
    """Totals by count for each implementation, of each kind of call and of all."""
    names, rows = label_axes(frame), list[list[doc.Cell]]()
    for step, calls in (run.info.get("steps") or {}).items():
        for ids in [*([case] for case in calls if len(calls) > 1), list(calls)]:
            part = frame[frame["case_id"].isin(ids)]
            times = part["case_id"].map(calls)
            count = sum(calls[case] for case in ids)
            title = f"{count} × {step}"
            if len(ids) < len(calls) and len(part):
                title += f", {heading(part.iloc[0], names[part.iloc[0]['workload']])}"
            for impl, own in part.groupby("impl", sort=False):
                known = len(own) == len(ids)  # else a call is missing, or was made on two machines
                weights = times[own.index] * own["time_us"]
                row = {
                    f"{name}{end}": (own[f"{name}{end}"] * by).sum(skipna=False) / over
                    for name, by, over in (
                        ("time_us", times[own.index], 1.0),
                        ("speedup", weights, weights.sum(skipna=False)),
                    )
                    for end in ("", "_low", "_high") if known
                }  # fmt: skip
                found = _value(row, "time_us", "us"), _value(row, "speedup", "ratio")
                calls_of = doc.Value(count, "count")
                rows.append([title, doc.Value(str(impl), "impl"), calls_of, *found])
    if rows:
        columns = {"step": "step", "impl": "impl", "calls": "", "time": "time"}
        columns["speed"] = _headers(frame)["speed"]
        yield doc.Table(columns=columns, rows=rows, cut="impl", grouped=True, intervals=CI)
        yield doc.Text([STEPS], quiet=True)


def packed(run: Run, frame: pd.DataFrame) -> Iterator[doc.Part]:
    """What packing the tokens of a padded batch brings to each implementation."""
    cells, names = {record.cell.key: record for record in run.records}, label_axes(frame)
    rows = list[list[doc.Cell]]()
    for row in frame.to_dict("records"):
        padded = cells[row["case_id"], row["impl"]]
        case = padded.cell.case
        if case.seq_len == 1:
            continue  # a static cache, whose other form is the cache cut to its tokens
        other = cells.get((case.unpadded.case_id, row["impl"]))
        if other is None or other is padded or not (padded.samples and other.samples):
            continue
        axes = [name for name in names[row["workload"]] if name not in (*INNER, "batch", "mask")]
        title = f"{case.mask.text.removeprefix('padding:')} {label(row, axes)}"
        times = (doc.Value(time_us(each), "us") for each in (padded, other))
        value, low, high = table.time_ratio(run, other, padded)
        found = *times, doc.Value(value, "ratio", low, high)
        rows.append([title.strip(), doc.Value(row["impl"], "impl"), *found])
    if rows:
        columns = {"lengths": "lengths", "impl": "impl", "padded": "padded", "packed": "packed"}
        columns["ratio"] = "packed / padded"
        yield doc.Table(columns=columns, rows=rows, cut="impl", grouped=True, intervals=CI)
        yield doc.Text([PACKED], quiet=True)


def _all_results(frame: pd.DataFrame, where: str) -> Iterator[doc.Section]:
    """A table for each part of the run: what differs only in n stands in one."""
    if len(frame) <= SHOWN and (frame["status"] == "ok").all():
        return
    names, shown = label_axes(frame), 0
    parts: list[doc.Part] = []
    for values, of_workload in slices(frame, ["workload"]):
        outer = [name for name in names[values["workload"]] if name not in INNER]
        for _, rows in slices(of_workload, outer):
            if parts and shown + len(rows) > MOST_ROWS:
                continue
            shown += len(rows)
            inner = [name for name in varying(rows) if name in INNER] or ["seq_len"]
            title = heading(rows.iloc[0], outer) or "all cells"
            own = list(results_table(rows, dict.fromkeys(names, inner)))
            parts.append(doc.Section(title, own, folded=True))
    left_out = f"{len(frame) - shown} more cells are not shown here. " * (len(frame) > shown)
    text = f"{left_out}All cells with all columns: attnbench export {where} --format csv"
    yield doc.Section(
        f"All {len(frame)} cells", [doc.Text([text], quiet=True), *parts], folded=True
    )


def failures(run: Run, frame: pd.DataFrame) -> Iterator[doc.Part]:
    """Cells without a result by their reason; of each implementation the first wrong in full.

    Then the implementations that were not asked for and can run nowhere.
    """
    wrong = {r.cell.impl: r for r in reversed(run.records) if r.metrics.get("fault")}
    for _, status, impl, reason, cells, *lengths in table.failures(frame).itertuples():
        at = "–".join(dict.fromkeys(map(str, lengths)))
        yield doc.Finding(
            sign="none" if status in ("unsupported", "skipped") else "bad", verdict=str(status),
            subject=f"{impl} ({units.counted(int(cells), 'cell')}, n={at})",
            reason=f"{status}: {reason}",
        )  # fmt: skip
        if status == "incorrect" and (first := wrong.pop(impl, None)):
            yield doc.Text(check.of_cell(first.cell, json.loads(first.metrics["fault"])))
    if idle := run.info.get("not_here"):
        yield doc.Text([f"Cannot run here: {units.by_reason(idle)}"], quiet=True)


def _suspects(frame: pd.DataFrame) -> Iterator[doc.Part]:
    """Those that cannot be right, marked !, and those whose error has no bound, marked ?.

    The latter share the notes of the first of their kind, so that they are listed together.
    """
    names, doubtful = label_axes(frame), frame["suspect"].notna() | frame["unsteady"].notna()
    kinds: dict[str, str] = {}
    for row in frame[doubtful].to_dict("records"):
        subject = f"{row['impl']} {label(row, names[row['workload']])}"
        verdict, reason = "suspect", row["suspect"]
        if units.is_unknown(reason):
            reason = f"{row['unsteady']}, for example: {row['notes']}"
            verdict, reason = "unsteady", kinds.setdefault(row["unsteady"], reason)
        yield doc.Finding(sign="open", verdict=verdict, subject=subject, reason=reason)


def _spent(run: Run) -> Iterator[doc.Part]:
    """Stages of the run with their share of the wall time, the longest first."""
    stages = sorted(table.spent(run), key=lambda item: -item[1])
    if total := sum(seconds for _, seconds in stages):
        yield doc.Table(
            columns={"stage": "stage", "time": "time", "share": "share"}, sums=True,
            rows=[(name, doc.Value(spent_s, "s"), doc.Value(spent_s / total, "share"))
                  for name, spent_s in (*stages, ("all", total))],
        )  # fmt: skip


def _limits(run: Run) -> Iterator[doc.Part]:
    """The ceilings of each machine, measured and as its datasheet has them."""
    known = run.environments.values()
    rows = {
        (name + f" ({of.get('node') or of.get('device_name')})" * (len(known) > 1)): (seen, sheet)
        for of in known
        for name, seen, sheet in limit_rows(of)
    }
    if rows:
        columns = {"limit": "limit", "measured": "measured", "datasheet": "datasheet"}
        yield doc.Text([LIMITS], quiet=True)
        yield doc.Table(columns=columns, rows=[(name, *pair) for name, pair in rows.items()])


def limit_rows(environment: Mapping[str, Any]) -> list[tuple[str, doc.Value, doc.Value]]:
    """The ceilings in the environment of run.json: name, measured, of the datasheet."""
    counts = [int(name) for name in environment.get("ceilings") or () if name.isdecimal()] or [1]
    known = limits.peaks_of(environment.get("device_name"))
    gbps, cache = (1e3 * known[1].memory_tbps, known[1].cache_bytes) if known else (None, None)
    rows: dict[str, tuple[doc.Value, doc.Value]] = {}
    unknown, sheet_gbps = doc.Value(None), doc.Value(gbps, "gbps")
    for threads in counts:
        found = limits.ceilings_of(environment, threads)
        where = f", {units.counted(threads, 'thread')}" if len(counts) > 1 else ""
        for dtype, rate in found.matmul_tflops.items():
            sheet = limits.peak_tflops(environment, dtype)
            rows[f"matmul, {dtype}{where}"] = doc.Value(rate, "tflops"), doc.Value(sheet, "tflops")
        rows |= {
            f"read{where}": (doc.Value(found.read_gbps, "gbps"), sheet_gbps),
            f"copy, read and written{where}": (doc.Value(found.copy_gbps, "gbps"), sheet_gbps),
            f"cheapest op{where}": (doc.Value(found.launch_us, "us"), unknown),
            f"cheapest op, cold{where}": (doc.Value(found.launch_cold_us, "us"), unknown),
            f"measured{where}": (doc.Value(found.measured or None), unknown),
            "last cache": (doc.Value(found.cache_bytes, "bytes"), doc.Value(cache, "bytes")),
        }
    return [(name, *pair) for name, pair in rows.items() if pair[0].number is not None]


def _figures(
    frame: pd.DataFrame, costs: pd.DataFrame, found: Scaling, crossing: Sequence[Crossover]
) -> Iterator[doc.Section]:
    if (frame["status"] == "ok").any():
        charts = doc.Figure(title="Figures", draw="pages.draw_charts", of=(frame, costs, crossing))
        yield doc.Section("Figures", [doc.Text([PLOTS], quiet=True), charts])
    if found.exponents or found.exact or found.models:
        figure = doc.Figure(title="Growth", draw="pages.draw_growth", of=(found,))
        yield doc.Section("How cost grows", [*laws(found), figure])
    if crossing:
        yield doc.Section("Crossovers", list(_crossovers(crossing)), folded=True)


def _crossovers(found: Sequence[Crossover]) -> Iterator[doc.Part]:
    yield doc.Text([CROSSINGS], quiet=True)
    shown = sorted(found, key=lambda c: ORDER[c.outcome])[:MOST_CROSSOVERS]
    columns = {"same": "on equal cases", "pair": "pair", "crossing": "crossing"}
    rows = [
        (c.same, f"{'' if c.by == 'impl' else f'{c.by} '}{c.first}, {c.second}", c.text
         + f" (too little known at {', '.join(map(str, c.left_out))})" * bool(c.left_out))
        for c in sorted(shown, key=lambda c: c.same)
    ]  # fmt: skip
    yield doc.Table(columns=columns, rows=rows, grouped=True)
    if left_out := len(found) - len(rows):
        yield doc.Text([f"{left_out} more pairs are not shown here."])
