"""The charts of a report, the rows of `charts.toml`: what is drawn, in which figures and panels.

A page is one figure of a chart: rows that share workload, device, dtype and pass.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from attnbench.analysis.axes import fixed, heading, label, overhead_size, slices, varying
from attnbench.analysis.highlights import SLICE
from attnbench.analysis.ratios import PREFERRED
from attnbench.base.parameters import base_name
from attnbench.base.registry import Registry
from attnbench.report import axes
from attnbench.report.figures import FigureKind, slug_of

Scale = Literal["log10", "log2", "linear"]
Tables = Mapping[str, pd.DataFrame]

PANELS_A_PAGE = 6
MOST_LINES = 11  # in a panel
MOST_PAGES = 4  # of a chart and a workload; more make a page of tens of megabytes
LEAST_DOTS = 3  # rows that are worth a panel beside those along n


@dataclass(frozen=True, kw_only=True)
class Chart(FigureKind):
    """One quantity. `value`, `low`, `high` and `predicted` are columns.

    `axis` names it: `{unit}` in it is that of a rate, `{baseline}` what speed-ups are over.
    `source` says which table the rows come from: `cells`, `costs` (of RoPE), or `steps` (layers
    and recurrent networks of one width). `guides` are the
    powers of n to hold slopes against, `reference` a value that is drawn as a line across, and the
    column that has its name. `along` is the column of x.
    `marks` says what markers and lines are where there is `predicted`, or a `least` below it.
    """

    value: str
    axis: str
    text: Callable[[float], str]
    scale: Scale
    low: str | None = None
    high: str | None = None
    predicted: str | None = None
    least: str | None = None
    marks: str = "● measured, — predicted"
    along: str = "seq_len"
    source: Literal["cells", "costs", "steps"] = "cells"
    workloads: tuple[str, ...] = ("attention", "layer", "recurrent")
    along_n: bool = True
    crossings: bool = False  # mark where the lead changes
    guides: tuple[int, ...] = ()
    reference: tuple[float, str] | None = None
    rate: bool = False  # the unit of `axis` is that of the upper end, and more is better

    def rows(self, tables: Tables) -> pd.DataFrame:
        """The rows this chart is about, the failed ones included."""
        rows = tables[self.source]
        rows = rows[rows["workload"].isin(self.workloads)]
        if self.reference and self.reference[1]:
            rows = rows[rows["impl"] != rows[self.reference[1]]]
        return rows.assign(x=rows[self.along])


CHARTS: Registry[Chart] = Registry("figure", "--figure")
_ROWS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_SHARED = _ROWS.pop("shared")
for _name, _row in _ROWS.items():
    _fields = _SHARED.get(_row.pop("shared", ""), {}) | _row
    _fields = {k: tuple(v) if isinstance(v, list) else v for k, v in _fields.items()}
    CHARTS.add(_name, Chart(name=_name, **_fields | {"text": getattr(axes, _fields["text"])}))


def with_variants(frame: pd.DataFrame) -> pd.DataFrame:
    """Add `variant`: the cache or projection that an implementation was measured with.

    Else its parameters, or ''.
    """
    parameters = frame["impl"].map(lambda name: name.removeprefix(base_name(name)).lstrip(":"))
    return frame.assign(variant=frame["cache"].fillna(frame["projection"]).fillna(parameters))


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a title that names only what differs from panel to panel."""

    title: str
    rows: pd.DataFrame


@dataclass(frozen=True, eq=False, kw_only=True)
class ChartPage:
    """One figure: `slug` for its file name, `caption` for what all its panels share.

    Along n, or a row for each line in panels of one n each. The column `line` of the rows names
    implementations, with their cache or projection where that differs, too.
    """

    slug: str
    caption: str
    panels: tuple[Panel, ...]
    along_n: bool
    first: bool = False  # of its workload
    left_out: int = 0

    @property
    def rows(self) -> pd.DataFrame:
        """The rows of all panels."""
        return pd.concat([panel.rows for panel in self.panels])


def pages(frame: pd.DataFrame, chart: Chart) -> list[ChartPage]:
    """Split into figures by workload, device, dtype and pass, and these into small multiples.

    A panel holds one combination of the other axes that vary, except n and what tells its lines
    apart. Position encodings are left to the plot of their costs, unless there is no row without
    one. Of each workload there are at most `MOST_PAGES`.
    """
    found: list[ChartPage] = []
    for _, group in groupby(slices(frame, SLICE), key=lambda item: str(item[0]["workload"])):
        own = [page for values, rows in group for page in _pages(values, rows, chart)]
        most = MOST_PAGES if chart.along_n else 1
        more = sum(len(page.panels) for page in own[most:])
        found += [replace(own[0], first=True, left_out=more), *own[1:most]] if own else []
    return found


def _pages(values: Mapping[str, Any], rows: pd.DataFrame, chart: Chart) -> Iterator[ChartPage]:
    plain = rows[rows["position"] == "none"]
    rows = _with_lines(plain if chart.source == "cells" and not plain.empty else rows)
    # A size for the overhead would take most of an axis on which nothing else stands.
    least = overhead_size([int(n) for n in rows["seq_len"].unique()])
    rows = rows[rows["seq_len"] > (least or 0)]
    notes = [fixed(rows), f"n={least}, for the overhead, is not drawn" if least else ""]
    worked = set(rows[rows["status"] == "ok"]["line"]) if "status" in rows else set(rows["line"])
    failed = rows[~rows["line"].isin(worked)].drop_duplicates("line")
    if len(failed):
        names = (f"{row['line']} ({row['status']})" for row in failed.to_dict("records"))
        notes.append(f"without a result: {', '.join(names)}")
    curves, dots = _panels(rows[rows["line"].isin(worked)], chart)
    groups = _line_groups(pd.concat([panel.rows for panel in curves])) if curves else []
    cut = [
        [Panel(p.title, own) for p in curves if (own := p.rows[p.rows["line"].isin(names)]).size]
        for names in groups
    ]
    kinds = [*((panels, True) for panels in cut[:1]), (dots, False), *((c, True) for c in cut[1:])]
    number = 0
    for panels, along_n in kinds:
        for start in range(0, len(panels), PANELS_A_PAGE):
            number += 1
            slug = slug_of("-".join([*map(str, values.values()), str(number) * (number > 1)]))
            yield ChartPage(
                slug=slug, caption="; ".join(filter(None, notes)), along_n=along_n,
                panels=tuple(panels[start : start + PANELS_A_PAGE]),
            )  # fmt: skip
            notes = notes[:1]


def _with_lines(rows: pd.DataFrame) -> pd.DataFrame:
    rows = with_variants(rows)
    names = rows["impl"].astype(str)
    variants = rows["cache"].fillna(rows["projection"])
    if variants.nunique() > 1:
        alone = rows["impl"].nunique() == 1
        names = variants if alone else names + (" " + variants).fillna("")
    if "steps" in rows:
        names += ": " + rows["steps"]
    return rows.assign(line=names)


def _panels(rows: pd.DataFrame, chart: Chart) -> tuple[list[Panel], list[Panel]]:
    """Panels of lines with several sizes; and of one n, where lines have no other.

    The n of the latter is the largest that most of these lines share.
    """
    along = {chart.along, "cache", "projection"}
    if chart.along == "d":  # the heads of a layer follow its width, or its head dim does
        of_layer = bool(rows["width"].notna().any()) and rows["head_dim"].nunique() == 1
        along |= {"head_dim", "width", *["heads"] * of_layer}
    names = [name for name in varying(rows) if name not in along]
    curves, dots = [], []
    for _, part in slices(rows, names):
        known = part[part[chart.value].notna()]
        sizes = known.groupby("line")["x"].nunique()
        if len(several := sizes[sizes > chart.along_n]):
            own = part[part["line"].isin(several.index)]
            curves.append(Panel(heading(part.iloc[0], names), own))
        single = known[known["line"].isin(sizes[sizes == 1].index)]
        if chart.along_n and len(single) and chart.along == "seq_len":
            counts = single.groupby("seq_len")["line"].nunique()
            n = max(counts.index, key=lambda size: (counts[size], size))
            title = f"{label(part.iloc[0], names)} n={n}".strip()
            dots.append(Panel(title, known[known["seq_len"] == n]))
    return curves, [of for of in dots if len(of.rows) >= LEAST_DOTS or not curves]


def _line_groups(rows: pd.DataFrame) -> list[list[str]]:
    """Names of lines, a figure each: first what all is compared with and the fastest at large n.

    What all is compared with stands in each, the others are together by family.
    """
    rows = rows.assign(rank=rows["time_us"] if "time_us" in rows else rows["cost"])
    last = rows[rows["rank"].notna()].sort_values(["x", "rank"], ascending=[False, True])
    last = last.drop_duplicates("line")
    if len(last) <= MOST_LINES:
        return [list(last["line"])]
    always = list(last[last["impl"].isin(PREFERRED)]["line"])[:4]
    others, size = last[~last["line"].isin(always)], MOST_LINES - len(always)
    further = others.iloc[size:].sort_values("family", kind="stable")["line"].tolist()
    groups = [others["line"].tolist()[:size]]
    groups += [further[i : i + size] for i in range(0, len(further), size)]
    return [[*always, *group] for group in groups]
