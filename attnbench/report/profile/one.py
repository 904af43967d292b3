"""One profile on the terminal: its table of ops and the sentences around it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from attnbench.base import units
from attnbench.report.render.tables import console, table
from attnbench.schema.profile import Profile
from attnbench.theory.traits import case_label

HEADER = ("op", "self time", "share", "calls", "rate", "bandwidth", "of ceiling", "allocates")
_LONGEST = 28  # letters of an op's name on 80 columns: kernels have hundreds
_SLOWER = 1.1  # a call without the profiler, by as much as noise makes it; else the machine did
_LEAST = 0.001  # of the time of a call
_NOTES = {
    "profiler-cost": "calls took {ratio:.3g} times as long under the profiler, which makes short"
    " ops, and what is between them, longer",
    "compiled": "compiled code runs kernels that are no ops, in one row; FLOPs and bytes are not"
    " known of its ops",
    "no-costs": "FLOPs and bytes of the ops are unknown: {error}",
    "kernels-lost": "the GPU's profiler lost kernels of the calls: no self times; the trace may"
    " have some",
    "few-calls": "the trace has only {calls} of the calls, for its size",
    "disturbed": "beside other work the profiled calls had their core for {share:.0%} of their"
    " time; each op has the least of its times in a few calls",
    "threads": "{threads} threads: self times are those of the thread that calls",
    "memory-differs": "the traced workspace is {traced}, the measured one {measured}",
    "prediction-differs": "the traced workspace is {traced}, {predicted} were predicted",
}


def rows(profile: Profile, most: int, longest: int = _LONGEST) -> list[tuple[str, ...]]:
    """A row for each of the ops with the longest self times, then the others, and the sum.

    Ops that take less than a thousandth of the time are among the others.
    """
    a_call_us = profile.time.median_us
    own = [op for op in profile.ops[:most] if op.self_us >= _LEAST * a_call_us]
    rest = profile.ops[len(own) :]
    found = [
        (
            brief(op.name, longest), units.time(op.self_us), units.percent(op.self_us / a_call_us),
            f"{op.count:.3g}", units.flop_rate(op.tflops), units.bandwidth(op.gbps),
            f"{100 * op.share:.0f} % {op.ceiling}" if op.share is not None else units.UNKNOWN,
            units.size(op.allocated_bytes) if op.allocated_bytes else units.UNKNOWN,
        )
        for op in own
    ]  # fmt: skip
    sums = [("in no op", profile.outside_us), ("a call, unprofiled", a_call_us)]
    if rest:
        sums.insert(0, (f"{len(rest)} more", sum(op.self_us for op in rest)))
    blank = [""] * (len(HEADER) - 3)
    return found + [(name, signed(us), units.percent(us / a_call_us), *blank) for name, us in sums]


def brief(name: str, longest: int = _LONGEST) -> str:
    """A name in at most `longest` letters: what is left out is in its middle."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[: longest - 1 - half]}…{name[-half:]}"


def text(profile: Profile, most: int = 10) -> str:
    """The table, ready to print."""
    spare = ("allocates", "bandwidth", "calls")
    longest = min(_LONGEST + max(0, console().width - 80), 100)
    return table(HEADER, rows(profile, most, longest), right=HEADER[1:], spare=spare)


def head(profile: Profile) -> str:
    """The cell, the machine, torch."""
    facts, threads = profile.environment, profile.cell.case.threads
    parts = (
        f"{profile.label}: {case_label(profile.cell.case)}"
        + f", {threads} threads" * (threads > 1),
        facts.get("device_name"),
        f"torch {facts['torch']}" if facts.get("torch") else None,
    )
    return " · ".join(part for part in parts if part)


def sentences(profile: Profile) -> Iterator[str]:
    """How the times add up, the memory, and what to know."""
    yield _sums(profile)
    yield _memory(profile)
    for sentence in notes(profile):
        yield f"note: {sentence}"


def notes(profile: Profile) -> Iterator[str]:
    """What to know before believing it."""
    for note in profile.notes:
        sizes = {k: units.size(x) for k, x in note.figures.items() if k.endswith("_bytes")}
        texts = {name.removesuffix("_bytes"): text for name, text in sizes.items()}
        yield _NOTES[note.code].format(**note.figures, **texts)


def _sums(profile: Profile) -> str:
    taken, ops = profile.time, "kernels" if profile.launch_us is not None else "ops"
    interval = units.time_interval(taken.low_us, taken.high_us)
    sign, least = ("−", "less") if profile.outside_us < 0 else ("+", "more")
    under = f"{units.time(profile.profiled_us)} under the profiler"
    gaps = f"{units.time(profile.gaps_us)} of them in no op (Python, dispatch)"
    if profile.launch_us is not None:
        gaps = (
            f"{units.time(profile.gaps_us)} of them in {profile.gaps} gaps between kernels, which"
            f" begin {units.time(profile.launch_us)} after their launch"
        )
    share = abs(profile.outside_us) / profile.self_us if profile.self_us else math.nan
    slower = taken.median_us > _SLOWER * profile.profiled_us and profile.launch_us is None
    return (
        f"time: {units.time(profile.self_us)} in {ops} {sign}"
        f" {units.time(abs(profile.outside_us))} = {units.time(taken.median_us)} a call unprofiled"
        f" ({interval}), {units.percent(share)} {least} than the {ops}; {under}, {gaps}"
        + "; calls were slower without the profiler than under it, so that most of what is in no"
        " op is other work: profile again on a quieter machine" * slower
    )


def _memory(profile: Profile) -> str:
    of = profile.memory
    where = f" in {brief(of.peak_op)}" if of.peak_op else ""
    parts = {name: getattr(of, f"{name}_bytes") for name in ("traced", "measured", "predicted")}
    workspace = ", ".join(f"{name} {units.size(value)}" for name, value in parts.items())
    return (
        f"memory: at most {units.size(of.peak_bytes)} at once{where},"
        f" outputs {units.size(of.outputs_bytes)}; workspace {workspace}"
    )


def where(profile: Profile, folder: Path) -> list[str]:
    """The trace and how to open it, and the commands of other profilers: lines to be copied."""
    commands = [f"{name}: {command}" for name, command in profile.commands.items()]
    if profile.trace is None:
        return commands
    return [f"trace: {folder / profile.trace} (open it at https://ui.perfetto.dev)", *commands]


def signed(time_us: float) -> str:
    """A time that may be below 0, as what is in no op may."""
    return units.time(time_us).replace("-", "−")
