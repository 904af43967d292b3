"""Where time and memory of a cell go; of two profiles of one case, what differs, op by op."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnbench.analysis.profiles import TOGETHER, Change, Difference, kernel_name, together
from attnbench.base import units
from attnbench.errors import ExitCode
from attnbench.report import document as doc
from attnbench.schema.profile import Memory, Profile
from attnbench.theory.traits import case_label

COLUMNS = {
    "name": "", "op": "op", "self_us": "self time", "share": "share", "calls": "calls",
    "tflops": "rate", "gbps": "bandwidth", "ceiling": "of ceiling", "allocated": "allocates",
}  # fmt: skip
MOST_CHANGES = 12  # single ops in a table of differences
LEAST = 0.005  # of the longer time: what changed by less is put together
_LEAST_OP = 0.001  # of the time of a call
_COMMON = 0.05  # of the logarithm of a factor that is worth a sentence
_MOST_LABEL = 14  # letters of a label that heads a column
_SLOWER = 1.1  # a call without the profiler, by as much as noise makes it; else the machine did
READING = (
    "The rows add up to the last; bytes are those read and written. An op with the same calls and"
    " bytes counts as changed only beyond noise. One process can be faster than the next: to decide"
    " whether a version is slower, use attnbench gate."
)
TRACE = (
    "Drop the trace on https://ui.perfetto.dev (which sends it nowhere) or load it in"
    " chrome://tracing; a range called attnbench-call marks each call."
)
NOTES = {
    "profiler-cost": "calls took {ratio} times as long under the profiler, which makes short ops,"
    " and what is between them, longer",
    "compiled": "the kernels of compiled code are not ops, and stand in one row; FLOPs and bytes of"
    " its ops are unknown",
    "no-costs": "FLOPs and bytes of the ops are unknown: {error}",
    "kernels-lost": "the GPU's profiler lost kernels of the calls: no self times; the trace may"
    " have some",
    "few-calls": "the trace has only {calls} of the calls, for its size",
    "disturbed": "beside other work the profiled calls had their core for {share} of their time;"
    " each op has the least of its times in a few calls",
    "threads": "{threads} threads: self times are those of the thread that calls",
    "suspect": "suspect: {op} reached {share} of the {ceiling} ceiling, measured twice: its FLOPs,"
    " bytes or time are wrong",
    "memory-differs": "the traced workspace is {traced_bytes}, the measured one {measured_bytes}",
    "prediction-differs": "the traced workspace is {traced_bytes}, {predicted_bytes} were"
    " predicted",
}


def document(
    profiles: Sequence[tuple[Profile, Path]], found: Difference | None = None, top: int = 10
) -> doc.Document:
    """One profile, with the folder it lies in, or the two of `found`; `top` ops of each."""
    both = [profile for profile, _ in profiles]
    sections = []
    if found and found.environment:
        changed = doc.Text(doc.changes(found.environment))
        sections.append(doc.Section("The environments differ", [changed]))
    if found:
        sections.append(doc.Section("What changed", list(_difference(found))))
    for of in both:
        title = "Ops" if not found else of.label
        sections.append(doc.Section(title, list(_one(of, top)), folded=found is not None))
    if not found:
        sections.append(
            doc.Section("Time and memory", [doc.Text([_sums(both[0]), *_memory(both[0])])])
        )
    notes = [
        doc.sentence("{label}: " * bool(found) + NOTES[note.code], label=of.label, **{
            name: value if isinstance(value, str) else doc.Value(value, (
                "bytes" if name.endswith("_bytes") else "share" if name == "share" else "number"
            )) for name, value in note.figures.items()
        }) for of in both for note in of.notes
    ]  # fmt: skip
    return doc.Document(
        kind="profile", conclusion=doc.Finding(
            sign="none", verdict="", subject="the profile", reason=_conclusion(both[0], found)
        ),
        exit_code=ExitCode.OK, about=[_head(both[0], found)],
        sections=[
            *sections, *([doc.Section("Before believing it", [doc.Text(notes)])] if notes else ()),
            doc.Section("Figures", list(_figures(both, found))),
            doc.Section("How it was measured", [doc.Text([TRACE]), *(
                doc.Section(f"Environment of {of.label}", [doc.facts(of.environment)], folded=True)
                for of in (both if found and found.environment else both[:1])
            )], folded=True),
        ],
        commands=[row for of, folder in profiles for row in _commands(of, folder)],
    )  # fmt: skip


def _conclusion(of: Profile, found: Difference | None) -> doc.Words:
    """`chunked takes 0.278 of naive's time …`; of one what a call takes, and what most of it."""
    if found is None:
        time = doc.Value(of.time.median_us, "us", of.time.low_us, of.time.high_us)
        text = "{label} takes {time} ({time.interval}) a call"
        longest = of.ops[0] if of.ops else None
        share = doc.Value(longest.self_us / of.time.median_us if longest else None, "share")
        text += ", {share} of it in {op}" * bool(longest)
        op = brief(longest.name) if longest else ""
        return doc.sentence(text, label=of.label, time=time, share=share, op=op)
    a, b = labels(found)
    low, high = found.ratio_interval or (None, None)
    text = "{b} takes {ratio} " + ("of" if found.ratio < 1 else "times") + " {a}'s time"
    if low is not None and high is not None and low <= 1 <= high:
        text = "{b} and {a} take the same time but for noise: {ratio} of it"
    text += " (its interval is unknown)" if low is None else " ({ratio.interval})"
    return doc.sentence(
        text + ": {after}, not {before}", a=a, b=b,
        ratio=doc.Value(found.ratio, "number", low, high),
        after=doc.Value(found.b.time.median_us, "us"),
        before=doc.Value(found.a.time.median_us, "us"),
    )  # fmt: skip


def labels(found: Difference) -> tuple[str, str]:
    """What to call A and B: by their labels, or where these are alike or long by those letters."""
    a, b = found.a.label, found.b.label
    fit = a != b and max(len(a), len(b)) <= _MOST_LABEL
    return (a, b) if fit else ("A", "B")


def case_words(profile: Profile) -> str:
    """The case in short, with its threads where there are several."""
    threads = profile.cell.case.threads
    return case_label(profile.cell.case) + f", {threads} threads" * (threads > 1)


def _head(of: Profile, found: Difference | None) -> str:
    """What is profiled or compared, in which case, and what all have in common of the machine."""
    pair, known = of.label, [of.environment]
    if found:
        named = zip(labels(found), (found.a.label, found.b.label), strict=True)
        pair = " → ".join(label if name == label else f"{name}: {label}" for name, label in named)
        known.append(found.b.environment)
    same = [(k, v) for k in ("device_name", "torch") if (v := known[0].get(k)) == known[-1].get(k)]
    words = [f"torch {value}" if name == "torch" else str(value) for name, value in same if value]
    return " · ".join([f"{pair}: {case_words(of)}", *words])


def brief(name: str, longest: int = 48) -> str:
    """The name of an op or a kernel: where it is long parameters go first, then its middle."""
    if len(name) > longest:
        name = kernel_name(name).replace("at::native::", "")
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[: longest - 1 - half]}…{name[-half:]}"


def _one(profile: Profile, top: int) -> Iterator[doc.Part]:
    """The ops with the longest self times, then the others, and the sum."""
    a_call_us = profile.time.median_us
    own = [op for op in profile.ops[:top] if op.self_us >= _LEAST_OP * a_call_us]

    def row(name: str, self_us: float, *others: doc.Cell) -> tuple[doc.Cell, ...]:
        blank = ("",) * (len(COLUMNS) - 4 - len(others))
        share = doc.Value(self_us / a_call_us, "share")
        return name, brief(name), doc.Value(self_us, "us"), share, *others, *blank

    rows = [
        row(
            op.name, op.self_us, doc.Value(op.count, "number"), doc.Value(op.tflops, "tflops"),
            doc.Value(op.gbps, "gbps"), doc.Value(op.share, "share", of=op.ceiling or ""),
            doc.Value(op.allocated_bytes or None, "bytes"),
        ) for op in profile.ops
    ]  # fmt: skip
    sums = [row("outside ops", profile.outside_us), row("a call, unprofiled", a_call_us)]
    if rest := profile.ops[len(own) :]:
        sums.insert(0, row(f"{len(rest)} more", sum(op.self_us for op in rest)))
    spare = ("allocated", "gbps", "calls")
    shown = [*rows[: len(own)], *sums]
    yield doc.Table(columns=COLUMNS, rows=shown, spare=spare, cut="op", sums=True, most=len(shown))
    if rest:
        every = doc.Table(columns=COLUMNS, rows=rows, spare=spare, cut="op")
        yield doc.Section(f"All ops ({len(rows)})", [every], folded=True)


def entries(found: Difference, most: int, least: float = 0.0) -> tuple[Change, ...]:
    """At most `most` single ops, then those left over as one, then the two last entries.

    Three or more, up to the last that changes by the share `least` of the longer time.
    """
    single = found.ops
    least_us = least * max(found.a.time.median_us, found.b.time.median_us)
    seen = [n for n, of in enumerate(single, start=1) if abs(of.delta_us) >= least_us]
    count = min(most, max([3, *seen]))
    rest = together(f"{len(single) - count} more", "more", single[count:])
    return (*single[:count], *rest, *found.changes[len(single) :])


def calls(of: Change) -> str:
    """How often the op runs in a call of A and of B: `2 → 32`, or once where that is the same."""
    if of.what in TOGETHER:
        return ""
    a, b = (f"{count:.3g}" for count in (of.a_count, of.b_count))
    return a if a == b else f"{a} → {b}"


def _difference(found: Difference) -> Iterator[doc.Part]:
    """What changed most, the table of it, both peaks of memory."""
    a, b = labels(found)
    columns = {
        "name": "", "op": "op", "a_us": a, "b_us": b, "change": "change", "calls": "calls",
        "what": "what", "bytes": "bytes",
    }  # fmt: skip

    def row(of: Change) -> tuple[doc.Cell, ...]:
        there = (of.a_us, of.what != "appeared"), (of.b_us, of.what != "vanished")
        times = (doc.Value(time_us if known else None, "us") for time_us, known in there)
        what = "" if of.what in TOGETHER else of.what
        size = "" if of.what == "outside" else doc.Value(of.bytes, "delta_bytes")
        change = doc.Value(of.delta_us, "delta_us")
        return of.name, brief(of.name), *times, change, calls(of), what, size

    yield doc.Text(list(_summary(found)))
    ends = (doc.Value(of.time.median_us, "us") for of in (found.a, found.b))
    change = doc.Value(found.delta_us, "delta_us")
    total: tuple[doc.Cell, ...] = ("a call", "a call", *ends, change, "", "", "")
    rows = [row(of) for of in entries(found, MOST_CHANGES, LEAST)]
    spare = ("bytes", "what")
    yield doc.Table(columns=columns, rows=[*rows, total], spare=spare, cut="op", sums=True)
    yield doc.Text([READING], quiet=True)
    if len(found.changes) > len(rows):
        every = doc.Table(columns=columns, rows=[*map(row, found.changes), total], sums=True)
        yield doc.Section(f"All entries ({len(found.changes)})", [every], folded=True)


def _summary(found: Difference) -> Iterator[doc.Words]:
    single = found.ops
    most = [of for of in single if abs(of.delta_us) >= 0.02 * abs(found.delta_us)][:3]
    words = [f"{{op{i}}} {{by{i}}} ({of.what})" for i, of in enumerate(most)]
    figures = {f"op{i}": doc.Value(brief(of.name)) for i, of in enumerate(most)}
    figures |= {f"by{i}": doc.Value(of.delta_us, "delta_us") for i, of in enumerate(most)}
    text = f"{units.counted(len(single), 'op')} changed" + ": " * bool(most) + ", ".join(words)
    yield doc.sentence(text if single else "no op changed beyond noise", **figures)
    if found.common is not None and abs(math.log(found.common or 1.0)) > _COMMON:
        yield doc.sentence(
            "ops that are alike in both take {factor} times as long in {b}: the machine's speed, or"
            " a cause common to all", factor=doc.Value(found.common, "number"), b=labels(found)[1],
        )  # fmt: skip
    for profile, name in zip((found.a, found.b), labels(found), strict=True):
        yield from _memory(profile, name)


def predicted_peak(of: Memory) -> float | None:
    """The workspace predicted from sizes alone, and the outputs: the peak if it is right."""
    if of.predicted_bytes is None or of.outputs_bytes is None:
        return None
    return of.predicted_bytes + of.outputs_bytes


def _memory(profile: Profile, name: str = "") -> Iterator[doc.Sentence]:
    """`memory of naive: at most 8.5 MiB at once in aten::bmm, …`; nothing where it is not known."""
    of = profile.memory
    if of.peak_bytes is None:
        return
    sizes = ("peak", "outputs", "traced", "measured", "predicted")
    known: dict[str, Any] = {of_: doc.Value(getattr(of, f"{of_}_bytes"), "bytes") for of_ in sizes}
    text = "memory" + " of {name}" * bool(name) + ": at most {peak} at once"
    text += " in {op}" * bool(of.peak_op) + ", outputs {outputs}; workspace traced {traced},"
    text += " measured {measured}, predicted {predicted}"
    yield doc.sentence(text, name=name, op=brief(of.peak_op or ""), **known)


def _sums(profile: Profile) -> doc.Sentence:
    """How the times add up."""
    taken, ops = profile.time, "kernels" if profile.launch_us is not None else "ops"
    gaps = "{gaps} of that outside ops (Python, dispatch)"
    if profile.launch_us is not None:
        gaps = "{gaps} of that in {count} gaps between kernels, which begin {launch} after launch"
    slower = taken.median_us > _SLOWER * profile.profiled_us and profile.launch_us is None
    return doc.sentence(
        f"time: a call takes {{time}} ({{time.interval}}) unprofiled, its {ops} add up to {{own}};"
        f" under the profiler {{profiled}}, {gaps}"
        + ". Calls were slower without the profiler than under it, so most of the time outside ops"
        " is other work: profile again on a quieter machine" * slower,
        own=doc.Value(profile.self_us, "us"), profiled=doc.Value(profile.profiled_us, "us"),
        time=doc.Value(taken.median_us, "us", taken.low_us, taken.high_us),
        gaps=doc.Value(profile.gaps_us, "us"), count=doc.Value(profile.gaps),
        launch=doc.Value(profile.launch_us, "us"),
    )  # fmt: skip


def _figures(profiles: Sequence[Profile], found: Difference | None) -> Iterator[doc.Figure]:
    if found:
        title = "From one time to the other"
        yield doc.Figure(title=title, draw="ops.draw_waterfall", of=(found,))
    yield doc.Figure(title="Where the time goes", draw="ops.draw_ops", of=(profiles,))
    if any(profile.memory.timeline for profile in profiles):
        yield doc.Figure(title="Memory over one call", draw="ops.draw_memory", of=(profiles,))


def _commands(profile: Profile, folder: Path) -> Iterator[tuple[str, str]]:
    """The trace and how to open it, and the commands of other profilers."""
    if profile.trace is not None:
        yield "trace", f"{folder / profile.trace} (open it at https://ui.perfetto.dev)"
    yield from profile.commands.items()
