"""What the gate must reach in its validation, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnbench.gate.decide.data import DEFAULT_THRESHOLD
from tests.validation.gate.tally import share

Figures = dict[str, Any]
LIVE_ALIKE, LIVE_SLOWED = 40, 12  # live runs that a goal is judged on, at least
MOST_FALSE, LEAST_FOUND, MOST_UNFIT, LEAST_COVERED = 0.01, 0.95, 0.02, 0.93
CLEAN_S, SUSPECTS_S = 120.0, 300.0
# Beside neighbours: live runs, shares of them that end undecided at most, that are found at least.
BESIDE, BESIDE_UNDECIDED, BESIDE_FOUND = 20, 0.10, 0.90


def goals(summary: Figures) -> list[Figures]:
    """Each goal with what was reached: `met` is None where too little was run to say."""
    if summary.get("environment", {}).get("neighbours"):
        return [*_beside(summary["live"])]
    return [*_live(summary["live"]), *_resampled(summary["resampled"]), *_cases(summary)]


def _live(rows: list[Figures]) -> Iterator[Figures]:
    for row in rows:
        if not row["planted"]:
            alarms = row["false_alarms"]
            yield _goal("no false alarm, live", row, alarms, alarms["hits"] == 0, LIVE_ALIKE)
        elif row["planted"] == row["threshold"] and _default(row):
            found = row["found"]
            yield _goal("found every time, live", row, found, found["hits"] == found["of"],
                        LIVE_SLOWED)  # fmt: skip
        for name, most_s in (("seconds_clean", CLEAN_S), ("seconds_suspects", SUSPECTS_S)):
            spent = row[name]
            words = "screen alone" if name == "seconds_clean" else "with suspects"
            if spent["of"]:
                yield {
                    "goal": f"{words} within {most_s:g} s, live",
                    "runs": row["label"],
                    "reached": {"seconds": spent["most"]},
                    "met": spent["most"] <= most_s,
                }


def _beside(rows: list[Figures]) -> Iterator[Figures]:
    for row in rows:
        alarms, found = row["false_alarms"], row["found"]
        yield _goal("no false alarm beside neighbours", row, alarms, alarms["hits"] == 0, BESIDE)
        if found is None:
            undecided = share(row["unfit"]["hits"] + row["inconclusive"]["hits"], row["runs"])
            met = undecided["share"] <= BESIDE_UNDECIDED
            yield _goal("undecided ≤ 10 % beside neighbours", row, undecided, met, BESIDE)
        elif _default(row):
            met = found["share"] >= BESIDE_FOUND
            yield _goal("found ≥ 90 % beside neighbours", row, found, met, BESIDE)


def _resampled(rows: list[Figures]) -> Iterator[Figures]:
    for row in rows:
        alarms, unfit, found = row["false_alarms"], row["unfit"], row["found"]
        yield _goal("false alarms ≤ 1 %", row, alarms, alarms["share"] <= MOST_FALSE)
        if found and _default(row):
            yield _goal("found ≥ 95 %", row, found, found["share"] >= LEAST_FOUND)
        if found is None:
            yield _goal("blind or untrusted ≤ 2 %", row, unfit, unfit["share"] <= MOST_UNFIT)
        for words, ratios in (("planted", row["slowed"]), ("others", row["alike"])):
            if ratios and ratios["covered"]["of"]:
                held = ratios["covered"]
                met = held["share"] >= LEAST_COVERED
                yield _goal(f"intervals hold the truth ≥ 93 %, {words}", row, held, met)


def _cases(summary: Figures) -> Iterator[Figures]:
    for row in summary.get("cases") or []:
        yield {
            "goal": f"{row['title']}: {row['expected']}",
            "runs": "real change",
            "reached": {"exit_code": row["exit_code"]},
            "met": row["met"],
        }


def _default(row: Figures) -> bool:
    """Whether it is the slowdown that the gate promises to find unless told otherwise."""
    return bool(row["planted"] == DEFAULT_THRESHOLD["cpu"])


def _goal(words: str, row: Figures, reached: Figures, met: bool, least: int = 0) -> Figures:
    enough = reached["of"] >= least
    return {
        "goal": words,
        "runs": row["label"],
        "reached": reached,
        "met": met if enough or not met else None,
    }
