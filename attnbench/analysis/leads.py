"""What a run says first: one's own implementations against the baseline, and who is fastest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from attnbench.analysis.axes import AXES, label, slices, varying
from attnbench.analysis.notes import WIDE
from attnbench.analysis.pairs import decided
from attnbench.analysis.table import Ratio, time_ratio
from attnbench.base import units
from attnbench.schema.record import Record
from attnbench.store.runs import Run

MOST = 6  # sentences
_SAID = ["layout", "scale"]  # where they differ, also their plain values
PART = ["workload", "device", "device_name", "dtype", "pass", "mask", *_SAID]  # has its fastest
_PLURALS = {"pass": "passes", "device_name": "device models"}


@dataclass(frozen=True, kw_only=True)
class Lead:
    """In a case that stands for a part of a run: `first` against `second`.

    They are the user's own and the baseline, or the fastest and the next. `known` is the time of
    `second` / that of `first`, with its interval; without a second there is nothing to compare.
    """

    kind: Literal["own", "fastest"]
    row: pd.Series[Any]
    first: str
    second: str = ""
    known: Ratio = (None, None, None)
    aside: str = ""

    @property
    def sign(self) -> int:
        """1 where `first` is faster, -1 where it is slower, 0 where it is undecided."""
        return decided(*self.known[1:])

    @property
    def finding(self) -> tuple[Any, ...]:
        """What equal findings have in common."""
        if self.kind == "fastest" and self.sign > 0:
            return self.kind, self.first, self.sign
        return self.kind, self.sign, *sorted((self.first, self.second))


def leads(run: Run, frame: pd.DataFrame) -> list[str]:
    """At most `MOST` sentences; equal findings are joined, and what is left out is counted.

    `frame` is that of `table.load`.
    """
    names = tuple(f"{name}:" for name in run.info.get("own") or ())
    mine = {n: frame[frame["impl"] == n] for n in frame["impl"] if f"{n}:".startswith(names)}
    found, own = list(_own_failures(mine)), list(_against_baseline(mine))
    pairs = [(lead.row["case_id"], {lead.first, lead.second}) for lead in own]
    fastest = [
        lead
        for lead in _fastest(run, frame)
        if (lead.row["case_id"], {lead.first, lead.second}) not in pairs  # said already
    ]
    for some in (own, fastest):
        groups: dict[tuple[Any, ...], list[Lead]] = {}
        for lead in some:
            groups.setdefault(lead.finding, []).append(lead)
        for group in sorted(groups.values(), key=len, reverse=True):
            of = [lead for lead in some if lead.kind == "fastest" or lead.first == group[0].first]
            found.append(_one(group[0], frame) if len(group) == 1 else _joined(group, of))
    found = [f"{sentence}." for sentence in found]
    if len(found) > MOST:
        command = f"attnbench export {shlex.quote(str(run.path))} --format markdown"
        left_out = len(found) - MOST + 1
        found[MOST - 1 :] = [f"{left_out} more: {command} --where 'behind == 1'"]
    return found


def hardest_case(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the measured case that stands for a slice.

    The one with the largest n; among those the plainest mask and position, the fewest threads, the
    most work, then (between caches, which do the same work) the one that is done soonest.
    """
    measured = rows[rows["time_us"].notna()]
    if measured.empty:
        return measured
    plain = measured.assign(
        _mask=measured["mask"] != "full",
        _position=measured["position"] != "none",
        _work=measured["batch"] * measured["heads"] * measured["head_dim"],
    )
    by = ["seq_len", "_mask", "_position", "threads", "_work", "time_us"]
    rising = [False, True, True, True, False, True]
    chosen = plain.sort_values(by, ascending=rising, kind="stable").iloc[0]
    there: pd.DataFrame = rows[rows["case_id"] == chosen["case_id"]]
    return there


def place(row: pd.Series[Any], names: list[str], rows: pd.DataFrame | None = None) -> str:
    """The label of a row, with its layout and scale where they are named, or differ in `rows`."""
    said = [n for n in _SAID if n in names or (rows is not None and n in varying(rows))]
    words = [AXES[name].text(row) or AXES[name].unsaid for name in said]
    return " ".join(filter(None, [label(row, [n for n in names if n not in said]), *words]))


def against(name: str, other: str, known: Ratio) -> str:
    """`known`, time of `other` / of `name`, in words: `a is 1.31 times as fast as b [1.2–1.4]`."""
    value, low, high = known
    assert value is not None, "both have a time"
    if low is None or high is None:
        return f"{name} is {units.digits(value)} times as fast as {other} (too few samples to tell)"
    if not decided(low, high):
        level, width = tie(low, high)
        return (
            f"{name} {'is level with' if level else 'cannot be told apart from'} {other} ({width})"
        )
    verb, how = "is", "fast"
    if value < 1:
        value, low, high, verb, how = 1 / value, 1 / high, 1 / low, "takes", "long"
    ends = f"[{units.digits(low)}–{units.digits(high)}]"
    return f"{name} {verb} {units.digits(value)} times as {how} as {other} {ends}"


def tie(low: float, high: float) -> tuple[bool, str]:
    """Whether a ratio whose interval holds 1 is level, and what is known: `± 6 %`, `0.600–1.70×`.

    It is level if it is known to lie within 10 % of 1.
    """
    beyond = max(high, 1 / low) - 1
    if beyond > WIDE:
        return False, units.ratio_interval(low, high)
    return True, f"± {units.brief_percent(beyond)}"


def _own_failures(own: dict[str, pd.DataFrame]) -> Iterator[str]:
    for name, rows in own.items():
        failed = rows[rows["status"] != "ok"]
        if not failed.empty:
            worst = failed.iloc[(failed["status"] != "incorrect").argsort(kind="stable")].iloc[0]
            cells = f"{len(failed)} of {units.counted(len(rows), 'cell')}"
            yield f"{name} has no time in {cells}: {worst['status']}, {worst['reason']}"


def _against_baseline(own: dict[str, pd.DataFrame]) -> Iterator[Lead]:
    for name, rows in own.items():
        usable = rows[rows["speedup"].notna() & rows["suspect"].isna() & (rows["baseline"] != name)]
        for _, part in slices(usable, PART):
            row = hardest_case(part).iloc[0]
            others, aside = part[part["case_id"] != row["case_id"]], ""
            known = number_of(row, "speedup")
            if len(others):  # the same way round
                slower = decided(*known[1:]) < 0
                ratios = 1 / others["speedup"] if slower else others["speedup"]
                ends = dict.fromkeys((others["seq_len"].min(), others["seq_len"].max()))
                how, at = "long" if slower else "fast", "–".join(map(str, ends))
                aside = f"; {_span(ratios)} times as {how} at n = {at}"
            second = str(row["baseline"])
            yield Lead(kind="own", row=row, first=name, second=second, known=known, aside=aside)


def _fastest(run: Run, frame: pd.DataFrame) -> Iterator[Lead]:
    """The fastest and the next of each part, of those that compute exact attention if any does."""
    cells = {record.cell.key: record for record in run.records}
    for _, part in slices(frame, PART):
        case = hardest_case(part)
        case = case[case["behind"].notna() & case["suspect"].isna()]
        exact = case[case["approx_error"].isna()]
        rows = case if exact.empty else exact
        if rows.empty:
            continue
        first, aside = rows.iloc[0], ""
        if exact.empty:
            aside = f" (it is {_off(first)})"
        elif (ahead := case.iloc[0])["impl"] != first["impl"] and first["behind_low"] > 1:
            times = f"{units.digits(first['behind'])} times as fast"
            aside = f"; {ahead['impl']} is {times}, but {_off(ahead)}"
        # Of two names for one kernel, as sdpa and the backend that it takes, the shorter stands.
        kernels = {name: _kernel(cells[first["case_id"], name]) for name in rows["impl"]}
        mine = kernels[first["impl"]]
        alike = rows["impl"].isin([name for name, of in kernels.items() if of == mine != ""])
        twins = rows[alike & ~(rows["behind_low"] > 1)]
        if 1 < len(twins) < len(rows):
            first = twins.iloc[int(twins["impl"].str.len().argmin())]
            rows = pd.concat([first.to_frame().T, rows.drop(twins.index)])
            others = twins["impl"][twins["impl"] != first["impl"]]
            aside += "".join(f"; {name} runs {first['impl']}'s kernel" for name in others)
        lead = Lead(kind="fastest", row=first, first=first["impl"], aside=aside)
        if len(rows) > 1:
            names = [str(name) for name in rows["impl"].iloc[:2]]
            above, below = (cells[first["case_id"], name] for name in reversed(names))
            known = time_ratio(run, above, below)
            if decided(*known[1:]) < 0:  # pairs of pairs need not agree
                names, known = names[::-1], time_ratio(run, below, above)
            lead = replace(lead, first=names[0], second=names[1], known=known)
        yield lead


def _kernel(record: Record) -> str:
    """SDPA's kernel with the shapes that it was called with; of a GPU its name says enough."""
    known = record.metrics
    of = known.get("kernel" if record.cell.case.device == "cuda" else "sdpa_shapes")
    return f"{known['sdpa_backend']} {of}" if of and known.get("sdpa_backend") else ""


def number_of(row: Any, name: str) -> Ratio:
    """A number of a row of the table with its ends, None where they are unknown."""
    ends = (row.get(each) for each in (name, f"{name}_low", f"{name}_high"))
    value, low, high = (None if units.is_unknown(end) else float(end) for end in ends)
    return value, low, high


def approx(row: Any) -> str:
    """How far a method is from exact attention, on normal and on local inputs: `57 %, 12 %`."""
    errors = row["approx_error"], row["approx_error_local"]
    known = [f"{units.digits(100 * e, 2)} %" for e in errors if e is not None and e == e]
    return ", ".join(known)


def _off(row: Any) -> str:
    spread, *local = approx(row).split(", ")
    return f"off exact attention by {spread}" + f" ({''.join(local)} on local inputs)" * len(local)


def _one(lead: Lead, frame: pd.DataFrame) -> str:
    names = ["workload", "pass", "dtype", "mask"]
    more = [name for name in varying(frame) if name not in (*names, "kv_len", "seq_len")]
    where = f"{place(lead.row, [*names, *more])}, n={lead.row['seq_len']}"
    if not lead.second:
        return f"{where}: {lead.first}{lead.aside} takes {units.time(lead.row['time_us'])}"
    return f"{where}: {against(lead.first, lead.second, lead.known)}{lead.aside}"


def _joined(group: list[Lead], every: list[Lead]) -> str:
    """Equal findings: in how many of the parts, and from where to where the ratio goes."""
    rows = pd.DataFrame([lead.row for lead in every])
    among = [name for name in varying(rows) if name in PART] or ["mask"]
    parts = _PLURALS.get(among[0], f"{among[0]}s")
    parts = parts if len(among) == 1 else f"parts by {' and '.join(among)}"
    places = ", ".join(place(lead.row, among) for lead in group)
    where = f"at the largest n in {len(group)} of {len(every)} {parts}"
    where += f" ({places})" * (len(group) <= 3)
    first, second, sign = group[0].first, group[0].second, group[0].sign
    same = len({lead.second for lead in group}) == 1
    ratios = pd.Series([lead.known[0] for lead in group], dtype="float64")
    if not second:
        return f"{first} alone has a time {where}"
    if not sign:
        return f"{first} and {second} cannot be told apart {where}"
    if sign < 0:
        return f"{first} is slower than {second} {where}: {_span(1 / ratios)} times as long"
    verb = "fastest" if group[0].kind == "fastest" else f"faster than {second}"
    than = second if same else "the next"
    return f"{first} is {verb} {where}: {_span(ratios)} times as fast as {than}"


def _span(values: pd.Series[float]) -> str:
    return "–".join(dict.fromkeys(units.digits(end) for end in (values.min(), values.max())))
