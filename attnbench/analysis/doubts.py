"""What to doubt in a run, in a sentence: what disturbed it, what that did, and what mends it."""

from __future__ import annotations

import shlex

import pandas as pd

from attnbench.analysis.notes import FULL_SPEED_SHARE
from attnbench.base import units
from attnbench.execution.store import Run

WIDE = 0.1  # half an interval / its time: differences below it are lost in such a time
TAKEN = 0.02  # of the processor time, by other work; less is the system's own
LONG_S, PROCESSES = 3, 3  # seconds a cell and processes from which more of them is no remedy
# Of the options of a sweep, what the next one has of its own, and what is the default anyway.
_OWN = ("name", "command", "min_time", "shard", "max_total_time")
_DEFAULTS = {
    "device": "auto", "precision": 0.02, "timeout": 300.0, "output": "results",
    "memory_limit": "90%", "ceilings": "cached",
}  # fmt: skip


def suspect_sentence(frame: pd.DataFrame) -> str:
    """How many times cannot be right."""
    count = int(frame["suspect"].notna().sum())
    times = "1 time (!) is" if count == 1 else f"{count} times (!) are"
    return f"{times} beyond what the device can do: see the column suspect." if count else ""


def doubt_sentence(run: Run, frame: pd.DataFrame) -> str:
    """How disturbed the machine was, what that did to the times, and the command that mends it.

    Nothing where every time is known to ± 10 % and none is unsteady.
    """
    timed = frame[frame["time_us_median"].notna()]
    half = (timed["time_us_ci_high"] - timed["time_us_ci_low"]) / 2 / timed["time_us_median"]
    wide, unsteady = half > WIDE, timed["unsteady"].notna()
    found = [
        f"{count} of {cells} {'is' if count == 1 else 'are'} {what}"
        for count, cells, what in (
            (wide.sum(), f"{half.count()} intervals", f"wider than ± {units.brief_percent(WIDE)}"),
            (unsteady.sum(), f"{len(timed)} times", "unsteady (?)"),
        )
        if count
    ]
    if not found:
        return ""
    text, causes = ", ".join(found), []
    if (taken := taken_share(timed)) > TAKEN:
        causes.append(f"other work took {100 * taken:.0f} % of the samples' processor time")
    if (full := float(timed["full_speed_share"].mean())) < FULL_SPEED_SHARE:
        causes.append(
            f"cores ran at their full speed only {100 * full:.0f} % of the time (a low clock, or"
            " another tenant's work on the same core; column core_speeds)"
        )
    if causes:
        cause = " and ".join(causes)
        text = f"{cause[0].upper()}{cause[1:]}: {text}"
    return f"{text}; {remedy(run, timed[wide | unsteady])}"


def taken_share(timed: pd.DataFrame) -> float:
    """The processor time that other work took from the samples of one thread / their wall time.

    The mean over cells, 0 where it is not known: several threads wait for each other, too.
    """
    alone = timed[(timed["device"] == "cpu") & (timed["threads"] == 1)]
    kept = 1 - alone["stolen_share"].fillna(0.0) - alone["throttled_share"].fillna(0.0)
    return 1.0 - float((alone["cpu_share"].clip(upper=1.0) * kept).mean()) if len(alone) else 0.0


def remedy(run: Run, rows: pd.DataFrame) -> str:
    """What to do about these rows: the command that measures their sizes again, for longer."""
    options, settings = run.info.get("options") or {}, run.info.get("settings") or {}
    max_time_s = settings.get("max_time_s") or 1.0
    if max_time_s >= LONG_S and (settings.get("processes") or 1) >= PROCESSES:
        return "measure again when the machine is less busy"
    again = {
        name: value
        for name, value in options.items()
        if name not in _OWN and value != _DEFAULTS.get(name)
    }
    again["seq_lens"] = sorted({int(n) for n in rows["seq_len"]})
    again |= {"max_time": f"{LONG_S * max_time_s:g}", "processes": PROCESSES}
    flags = []
    for name, value in again.items():
        flag = "--impl" if name == "files" else f"--{name.replace('_', '-')}"
        if name == "files":
            flags += [part for file in value for part in (flag, file)]
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flags += [flag] if value is True else [flag, text]
    several = "" if (rows["threads"] == 1).all() else " (one thread, --threads 1, repeats best)"
    return (
        f"measure longer, in fresh processes{several}: {shlex.join(['attnbench', 'sweep', *flags])}"
    )
