"""What to know before believing times: notes on each, and what to doubt in a run, in a sentence."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pandas as pd

from attnbench.analysis import times
from attnbench.base import units
from attnbench.base.sample import SETTLED_CALLS, DiscardCode
from attnbench.base.stats import median
from attnbench.machine.symptoms import STEAL_SHARE
from attnbench.schema.axes import KEYWORDS
from attnbench.schema.record import Record
from attnbench.store.runs import Run
from attnbench.theory.flags import case_text

DISTURBED = 0.25
FULL_SPEED_SHARE = 0.9  # of the time; less shows in the intervals
FALLS = 3.0  # between samples before and after a kernel settles; speeds of a core differ by 2
LEFT_OUT = 0.01  # of the calls; some interruption meets every process

FRESH = 0.1  # of a time; less is within most intervals
WIDE = 0.1  # half an interval / its time: differences below it are lost in such a time
TAKEN = 0.02  # of the processor time, by other work; less is the system's own
LONG_S, PROCESSES = 3, 3  # seconds a cell and processes from which more of them is no remedy
FEW_CASES = 12  # that a command names one by one
# Of the options of a sweep, what the next one has of its own, and what is the default anyway.
_OWN = ("name", "command", "min_time", "shard", "max_total_time", "budget_s", "not_compiled")
_DEFAULTS = {
    "device": "auto", "precision": 0.02, "timeout": 300.0, "output": "results",
    "memory_limit": "90%", "ceilings": "cached",
}  # fmt: skip


def notes(record: Record) -> str | None:
    """All notes on a record, the serious ones first, or None."""
    found = [text for _, text in _serious(record)] + list(_asides(record))
    return "; ".join(found) or None


def unsteady(record: Record) -> str | None:
    """The names of the serious ones, or None: the time may be wrong by more than its interval."""
    return ", ".join(name for name, _ in _serious(record)) or None


def _serious(record: Record) -> Iterator[tuple[str, str]]:
    """Name and text of each note for which the error of a row's time has no bound."""
    metrics, kept = record.metrics, record.kept
    if not record.samples:
        return
    disturbed = metrics.get("kept_disturbed") or 0
    # Of one thread its processor time bounds what others took; of several nothing does. A low end
    # needs few samples that were left alone, a median (in runs of before) most of them.
    low_end = "probe_us" in metrics
    few = len(kept) - disturbed < times.FEWEST if low_end else disturbed > DISTURBED * len(kept)
    if disturbed and few and all(s.cpu_us is None for s in kept):
        yield (
            "busy-machine",
            f"other work interrupted {disturbed} of the {len(kept)} samples that count",
        )
    for code, count in Counter(s.kept_despite for s in kept if s.kept_despite).items():
        name, text = _KEPT[code]
        yield name, f"{text} in {count} of the {len(kept)} samples that count"
    of_each = ([s.own_us for s in own] for _, own in groupby(kept, key=lambda s: s.process))
    falling = (
        (us[:i], us[i:]) for us in of_each for i in range(max(3, len(us) // 2), len(us) - 1)
        if min(us[:i]) > FALLS * max(us[i:])
    )  # fmt: skip
    if settled := next(falling, None):
        before, after = settled
        took = f"{units.time(median(before))} in {len(before)} samples"
        yield "settling", f"it took {took}, then {units.time(median(after))}: it had not settled"
    elif mean := metrics.get("uneven"):
        yield "uneven", f"the mean of its calls is {mean}: some calls do more work"
    if crowded := metrics.get("crowded"):
        yield "crowded", f"{crowded} compute in its process, and wait for each other"
    if new_us := metrics.get("new_inputs_us"):
        size = units.size(metrics["memory_retained_bytes"])
        text = f"keeps {size} after its first call: on new inputs a call takes"
        yield "keeps-results", f"{text} {units.time(new_us)}"
    if metrics.get("compiled") == "no":
        why = "nothing was compiled for it: it ran eagerly, or on another cell's code"
        yield "not-compiled", why
    if changed := metrics.get("meddles"):
        yield "meddles", f"it changes {changed} for the process (restored)"


def _asides(record: Record) -> Iterator[str]:
    """What is good to know, and what the interval contains already."""
    metrics, kept = record.metrics, record.kept
    if not record.samples:
        return
    if disturbed := sum(sample.disturbed for sample in kept):
        taken = 1 - median(s.own_us / s.time_us for s in kept if s.disturbed)
        yield (
            f"{disturbed} of {len(kept)} samples interrupted for {100 * taken:.0f} % of their time:"
            " CPU time is used instead of wall time"
        )
    if note := metrics.get("model_note"):
        yield note
    if (full := metrics.get("full_speed_share", 1.0)) < FULL_SPEED_SHARE:
        yield f"the core ran at its full speed only {100 * full:.0f} % of the time"
    if (stolen := metrics.get("stolen_share") or 0.0) > STEAL_SHARE:
        yield f"the hypervisor gave {stolen:.1%} of its processors' time to others"
    if (withheld := metrics.get("throttled_share") or 0.0) > STEAL_SHARE:
        yield f"a CPU quota held the process back for {withheld:.1%} of the time"
    codes = Counter(s.discard_code for s in record.samples if s.discard_code is not None)
    count = codes.pop("interrupted", 0)  # expected, and taken again
    if share := codes.total() / len(record.samples):
        why = ", ".join(_DISCARDS[code] for code in codes)
        yield f"{100 * share:.0f} % of the samples discarded ({why})"
    if count:
        yield f"{units.counted(count, 'sample')} discarded: other work interrupted every batch"
    left_out, calls = sum(s.left_out for s in kept), sum(s.calls for s in kept)
    if left_out > LEFT_OUT * calls:
        yield f"{left_out} of {calls} calls left out: the host took far longer to issue them"
    timed = Counter[int]()
    for s in record.samples:
        timed[s.process] += s.calls * (len(s.blocks_us) or 1) * record.cell.case.units
    if (fewest := min(timed.values())) < SETTLED_CALLS:
        yield f"timed in only {fewest} calls: a kernel that is still tuned may become faster"
    if times.launch_bound(record):
        hidden_us = metrics.get("hidden_us")
        of_which = f", of which {units.time(hidden_us)} are hidden" if hidden_us else ""
        text = f"the host takes {units.time(metrics['enqueue_us'])} to issue a call{of_which}"
        yield f"launch-bound: {text}"
    if waits := metrics.get("device_waits"):
        text = f"the host waits for the device {'once' if waits == 1 else f'{waits} times'} a call"
        yield f"{text}, and then the device for the host; --timer graph cannot take such a call"
    if checked := metrics.get("checked"):
        yield f"checked on {checked}"
    if before := metrics.get("retried_note"):
        yield f"measured again, alone in a process: beside other cells it was {before}"
    yield from filter(None, (metrics.get("sensor_note"), metrics.get("energy_note")))


_LASTING = ("keeps-results", "not-compiled", "crowded", "meddles")  # longer measuring mends none
# What a sample may count in spite of: the name and the text of the note.
_KEPT: dict[DiscardCode, tuple[str, str]] = {
    "gpu": ("slowed-gpu", "the GPU throttled itself, for heat or power,"),
    "allocator": ("allocator", "torch allocated memory from the GPU's driver"),
}
_DISCARDS: dict[DiscardCode, str] = {
    "stolen": "time taken by the hypervisor",
    "throttled": "time withheld by the CPU quota",
    "gpu": "a throttled GPU",
    "allocator": "memory allocated from the GPU's driver",
    "compiled": "compilation",
    "clock": "a clock that stepped back",
}


def suspect_sentence(frame: pd.DataFrame) -> str:
    """How many times cannot be right."""
    count = int(frame["suspect"].notna().sum())
    times = "1 time (!) is" if count == 1 else f"{count} times (!) are"
    return f"{times} beyond what the device can do: see the column suspect." if count else ""


def doubt(run: Run, frame: pd.DataFrame) -> tuple[str, str]:
    """How disturbed the machine was, what that did to the times, and the command that mends it.

    Nothing where every time is known to ± 10 % and none is unsteady.
    """
    timed = frame[frame["time_us"].notna()]
    half = (timed["time_us_high"] - timed["time_us_low"]) / 2 / timed["time_us"]
    lasting = timed["unsteady"].fillna("").str.contains("|".join(_LASTING))
    wide, unsteady = half > WIDE, timed["unsteady"].notna() & ~lasting
    found = [
        f"{count} of {cells} {'is' if count == 1 else 'are'} {what}"
        for count, cells, what in (
            (wide.sum(), f"{half.count()} intervals", f"wider than ± {units.brief_percent(WIDE)}"),
            (unsteady.sum(), f"{len(timed)} times", "unsteady (?)"),
        )
        if count
    ]
    if not found:
        return "", ""
    text, causes = f"{' and '.join(found)}.", []
    # On several threads the processor time is unknown: they wait for each other, too.
    alone = timed[(timed["device"] == "cpu") & (timed["threads"] == 1)]
    kept = 1 - alone["stolen_share"].fillna(0.0) - alone["throttled_share"].fillna(0.0)
    taken = 1 - float((alone["cpu_share"].clip(upper=1.0) * kept).mean())  # NaN of no cell
    if taken > TAKEN:
        causes.append(f"other processes took {100 * taken:.0f} % of the CPU time")
    if (full := float(timed["full_speed_share"].mean())) < FULL_SPEED_SHARE:
        causes.append(f"cores ran at full speed only {100 * full:.0f} % of the time")
    if causes:
        text = f"The machine was disturbed: {' and '.join(causes)}. So {text}"
    command = remedy(run, timed[wide | unsteady])
    several = "" if (timed["threads"] == 1).all() else "; one thread (--threads 1) repeats best"
    longer = f"The command 'narrow' below measures them longer{several}."
    return f"{text} {longer if command else 'Measure again on a quieter machine.'}", command


def fresh(run: Run, frame: pd.DataFrame) -> tuple[str, str]:
    """Where the pages of fresh memory take much of a time, and so of a ratio, and what shows it."""
    shares = frame["page_faults_us"] / frame["time_us"]
    high = frame.assign(share=shares)[(shares > FRESH) & (frame["threads"] == 1)]
    if high.empty:
        return "", ""
    most = high.sort_values("share").iloc[-1]
    return (
        f"Fresh memory pages take more than {units.brief_percent(FRESH)} of"
        f" {units.counted(len(high), 'time')}, which moves ratios: {units.percent(most['share'])}"
        f" of {most['impl']} at n={most['seq_len']}, {most['page_faults']:,.0f} page faults a call."
        " The command 'keep' below measures without them."
    ), keeping(run, high)


def keeping(run: Run, rows: pd.DataFrame) -> str:
    """The command that measures these rows with an allocator that keeps its pages."""
    return _command(run, rows, allocator="keep")


def remedy(run: Run, rows: pd.DataFrame) -> str:
    """The command that measures the cases of these rows for longer, unless that was done."""
    settings = run.info.get("settings") or {}
    max_time_s = settings.get("max_time_s") or 1.0
    if max_time_s >= LONG_S and (settings.get("processes") or 1) >= PROCESSES:
        return ""
    return _command(run, rows, max_time=f"{LONG_S * max_time_s:g}", processes=PROCESSES)


def _command(run: Run, rows: pd.DataFrame, **changed: Any) -> str:
    """The sweep that measures the cases of these rows again, with other options.

    A preset is several sweeps: what an axis names would hold in each, so its cases are listed, if
    they are few.
    """
    again = {
        name: value
        for name, value in (run.info.get("options") or {}).items()
        if name not in _OWN and value != _DEFAULTS.get(name)
    }
    if "preset" in again and rows["case_id"].nunique() <= FEW_CASES:
        del again["preset"]
        again = {n: x for n, x in again.items() if n not in {"workload", *KEYWORDS}}
        cases = {x.cell.case.case_id: x.cell.case for x in run.records}
        again["case"] = [case_text(cases[name]) for name in rows["case_id"].unique()]
        again["max_time"] = (run.info.get("settings") or {}).get("max_time_s") or 1.0
        reads = rows["kv_len"] > rows["seq_len"]  # cold where a list has it, unless told otherwise
        again |= {"l2": "warm"} if (reads & (rows["l2"] == "warm")).any() else {}
    elif not again.keys() & {"preset", "model", "case", "cases"}:  # which have their lengths
        again["seq_lens"] = []
        for name in again.keys() & KEYWORDS.keys() - {"scales"}:  # of which null is a value
            again[name] = sorted(rows[KEYWORDS[name].field].dropna().unique().tolist())
    again["impls"] = list(dict.fromkeys([*rows["baseline"].dropna(), *rows["impl"]]))
    again |= changed
    flags = []
    for name, flag in (("files", "--impl"), ("case", "--case")):
        flags += [text for value in again.pop(name, ()) for text in (flag, value)]
    for name, value in again.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [text])]
    return shlex.join(["attnbench", "sweep", *flags])
