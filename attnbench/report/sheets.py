"""Which rows share a figure, and which share a panel of it."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from attnbench.analysis.axes import fixed, label, overhead_size, slices, varying

SHEET_AXES = ["workload", "device", "dtype", "pass"]
PANELS_A_SHEET = 6


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a title that names only what differs from panel to panel."""

    title: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class Sheet:
    """One figure: `slug` for its file name, `title` for what all its panels share."""

    workload: str
    slug: str
    title: str
    panels: tuple[Panel, ...]

    @property
    def rows(self) -> pd.DataFrame:
        """The rows of all panels."""
        return pd.concat([panel.rows for panel in self.panels])


def sheets(
    frame: pd.DataFrame, lines: str, plain_position: bool = True, several: bool = False
) -> list[Sheet]:
    """Split into figures by workload, device, dtype and pass, and these into small multiples.

    A panel holds one combination of the other axes that vary, except n (its x axis) and what its
    lines are: the column `lines`. With `plain_position`, position encodings are left to the plot
    that compares them, unless there is no row without one; with `several`, a panel of one line
    alone is left out.
    """
    found = []
    for values, rows in slices(frame, SHEET_AXES):
        kept, floor = _without_floor(_plain(rows) if plain_position else rows)
        kept, single = _along_n(kept, lines, several)
        axes = _panel_axes(kept, lines)
        panels = [Panel(_title(part, axes), part) for _, part in slices(kept, axes)]
        slug = "-".join(str(value) for value in values.values())
        found += _paged(str(values["workload"]), slug, fixed(kept) + floor + single, panels)
    return found


def _panel_axes(rows: pd.DataFrame, lines: str) -> list[str]:
    axes = [name for name in varying(rows) if name not in ("seq_len", lines)]
    return ["impl", *axes] if lines != "impl" and rows["impl"].nunique() > 1 else axes


def _along_n(rows: pd.DataFrame, lines: str, several: bool) -> tuple[pd.DataFrame, str]:
    """The rows of panels that show something along n, and a text that counts the others.

    Those of a single n are points; they are drawn where there is nothing else.
    """
    parts = [part for _, part in slices(rows, _panel_axes(rows, lines))]
    parts = [part for part in parts if not several or part[lines].nunique() > 1]
    curves = [part for part in parts if part["seq_len"].nunique() > 1] or parts
    points = len(parts) - len(curves)
    text = f" ({points} more with a single n {'is' if points == 1 else 'are'} in the table)"
    return pd.concat(curves) if curves else rows.iloc[:0], text if points else ""


def _plain(rows: pd.DataFrame) -> pd.DataFrame:
    plain = rows[rows["position"] == "none"]
    return rows if plain.empty else plain


def _without_floor(rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows without the one size that was measured for the floor, and a text that says so.

    It would take most of an axis on which nothing else stands; the fits show it.
    """
    floor = overhead_size([int(n) for n in rows["seq_len"].unique()])
    if floor is None:
        return rows, ""
    return rows[rows["seq_len"] > floor], f" (n={floor}, for the floor, is not drawn)"


def _title(rows: pd.DataFrame, axes: list[str]) -> str:
    row = rows.iloc[0]
    named = label(row, [name for name in axes if name != "impl"])
    # A panel among others needs a name even where its values go without saying.
    texts = [str(row["impl"])] if "impl" in axes else []
    return " ".join([*texts, named]).strip() or ("no position encoding" if axes else "")


def _paged(workload: str, slug: str, title: str, panels: list[Panel]) -> list[Sheet]:
    starts = range(0, len(panels), PANELS_A_SHEET)
    pages = [tuple(panels[start : start + PANELS_A_SHEET]) for start in starts]
    if len(pages) == 1:
        return [Sheet(workload, slug, title, pages[0])]
    return [
        Sheet(workload, f"{slug}-{i}", f"{title} ({i} of {len(pages)})", page)
        for i, page in enumerate(pages, start=1)
    ]


def first_of_each(found: list[Sheet], most: int) -> list[Sheet]:
    """At most so many figures of each workload, so that none crowds out another."""
    kept: dict[str, list[Sheet]] = {}
    for sheet in found:
        kept.setdefault(sheet.workload, []).append(sheet)
    return [sheet for group in kept.values() for sheet in group[:most]]
