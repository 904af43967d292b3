"""What a report says, page or Markdown: computed once from a run, as texts and plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.analysis import table
from attnbench.analysis.axes import fixed, heading, label, label_axes, slices, varying
from attnbench.analysis.crossovers import Crossover, crossovers
from attnbench.analysis.highlights import highlights, measured_on, summary_columns, summary_rows
from attnbench.analysis.scaling import scaling
from attnbench.analysis.scaling.results import Scaling
from attnbench.base import units
from attnbench.machine import limits
from attnbench.report.charts import with_rate_interval
from attnbench.report.figures import Look, looks
from attnbench.store.runs import Run

INNER = ("seq_len", "kv_len")  # what differs between the cases of one table
FAILURE = ("status", "implementation", "cells", "n", "reason")
LIMIT = ("limit", "measured", "datasheet")
MOST_ROWS = 1500  # in a page; a browser stays quick, and the export holds everything


@dataclass(frozen=True)
class Content:
    """All that a report is made from."""

    run: Run
    cells: pd.DataFrame
    costs: pd.DataFrame
    scaling: Scaling
    crossovers: tuple[Crossover, ...]

    @classmethod
    def of(cls, run: Run, baseline: str | None = None) -> Content:
        """Compute the tables of a run; `baseline` as for `table.load`."""
        cells = with_rate_interval(table.load(run, baseline))
        return cls(
            run=run, cells=cells, costs=table.rope_cost(run), scaling=scaling(run),
            crossovers=crossovers(run, baseline),
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, Any]:
        """The machine, as run.json describes it; of several what they share."""
        return self.run.shared(self.run.environments)

    def limits(self) -> list[tuple[str, ...]]:
        """The ceilings of each machine: the columns are `LIMIT`."""
        known = self.run.environments.values()
        several = len(known) > 1
        return [
            (limit + f" ({facts.get('node') or facts.get('device_name')})" * several, *rest)
            for facts in known
            for limit, *rest in limit_rows(facts)
        ]

    def sentences(self) -> list[str]:
        """The run in short."""
        return highlights(self.run, self.cells, self.costs)

    def facts(self) -> list[str]:
        """Device, how it was timed, date and versions, for the head of a report."""
        known = self.environment
        pinned = ", pinned to a CPU" * bool(self.cells["pinned_cpu"].notna().any())
        counts = self.cells["threads"][self.cells["device"] == "cpu"].unique().tolist()
        facts = [
            *measured_on(self.run, self.cells),
            units.moment(self.run.info.get("created")),
            *(units.counted(count, "thread") + (count == 1) * pinned for count in sorted(counts)),
            f"torch {known['torch']}" if known.get("torch") else None,
            f"attnbench {self.run.info['attnbench']}" if self.run.info.get("attnbench") else None,
            fixed(self.cells) or None,
        ]
        return [str(fact) for fact in facts if fact]

    def parts(self) -> tuple[list[dict[str, Any]], int]:
        """The results, and how many cells were left out for length.

        A part has a `title` and the `cases` that differ only in n, each with its `title` and its
        `rows`, best first.
        """
        colours = looks(self.cells["impl"].unique())
        columns = summary_columns(self.cells)
        names = label_axes(self.cells)
        parts: list[dict[str, Any]] = []
        shown = 0
        for values, of_workload in slices(self.cells, ["workload"]):
            outer = [name for name in names[values["workload"]] if name not in INNER]
            for _, rows in slices(of_workload, outer):
                if not parts or shown + len(rows) <= MOST_ROWS:
                    shown += len(rows)
                    inner = [name for name in varying(rows) if name in INNER] or ["seq_len"]
                    cases = [
                        {
                            "title": label(case.iloc[0], inner),
                            "rows": _case_rows(case, colours, columns),
                        }
                        for _, case in slices(rows, ["case_id"])
                    ]
                    parts.append({"title": heading(rows.iloc[0], outer), "cases": cases})
        return parts, len(self.cells) - shown

    def failures(self) -> list[tuple[str, ...]]:
        """Cells without a result, gathered by their reason: the columns are `FAILURE`."""
        return [
            (str(status), str(impl), units.count(cells),
             " … ".join(dict.fromkeys(map(str, lengths))), str(reason))
            for _, status, impl, reason, cells, *lengths in table.failures(self.cells).itertuples()
        ]  # fmt: skip

    def suspects(self) -> list[str]:
        """Each suspect cell with its reason."""
        names = label_axes(self.cells)
        rows = self.cells[self.cells["suspect"].notna()].head(50)
        named = [(row, label(row, names[row["workload"]])) for row in rows.to_dict("records")]
        return [f"{row['impl']} {where}: {row['suspect']}" for row, where in named]

    def spent(self) -> list[dict[str, Any]]:
        """Stages of the run with their share of the wall time."""
        stages = table.spent(self.run)
        total = sum(seconds for _, seconds in stages)
        return [
            {
                "stage": stage,
                "time": units.seconds(seconds),
                "share": units.percent(seconds / total if total else None),
                "width": round(16 * seconds / total, 2) if total else 0,
            }
            for stage, seconds in sorted(stages, key=lambda item: -item[1])
        ]


def limit_rows(environment: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The ceilings in the environment of run.json, as texts: the columns are `LIMIT`.

    None where none was measured.
    """
    counts = [int(name) for name in environment.get("ceilings") or () if name.isdecimal()] or [1]
    known = limits.peaks_of(environment.get("device_name"))
    gbps, cache = (1e3 * known[1].memory_tbps, known[1].cache_bytes) if known else (None, None)
    rows: list[tuple[str, ...]] = []
    for threads in counts:
        found = limits.ceilings_of(environment, threads)
        where = f", {units.counted(threads, 'thread')}" if len(counts) > 1 else ""
        for dtype, rate in found.matmul_tflops.items():
            sheet = limits.peak_tflops(environment, dtype)
            rows.append((f"matmul, {dtype}{where}", *map(units.flop_rate, (rate, sheet))))
        rows += [
            (f"read{where}", *map(units.bandwidth, (found.read_gbps, gbps))),
            (f"copy, read and written{where}", *map(units.bandwidth, (found.copy_gbps, gbps))),
            (f"cheapest op{where}", units.time(found.launch_us), units.UNKNOWN),
            (f"cheapest op, cold{where}", units.time(found.launch_cold_us), units.UNKNOWN),
            (f"measured{where}", found.measured or units.UNKNOWN, units.UNKNOWN),
            ("last cache", units.size(found.cache_bytes), units.size(cache)),
        ]
    return [row for row in dict.fromkeys(rows) if row[1] != units.UNKNOWN]


def _case_rows(
    rows: pd.DataFrame, colours: dict[str, Look], columns: Iterable[str]
) -> list[dict[str, Any]]:
    texts = summary_rows(rows)
    reasons, notes = rows["reason"].fillna(""), rows["suspect"].fillna(rows["notes"]).fillna("")
    # What the fastest is not shown to be faster than is level with it.
    best = rows["behind"].notna() & rows["suspect"].isna() & ~(rows["behind_low"] > 1)
    return [
        {
            "texts": {name: line[name] for name in columns},
            "colour": colours[line["impl"]].colour,
            "best": leads,
            "why": {"status": reason, "time": note},
        }
        for line, leads, reason, note in zip(texts, best, reasons, notes, strict=True)
    ]
