"""What a comparison shows: the same parts on the terminal, in Markdown, on a page and as JSON."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from attnbench.analysis.compare import Comparison
from attnbench.analysis.compare.elsewhere import Elsewhere
from attnbench.analysis.compare.same import ALPHA, VERDICTS, Compared, Row
from attnbench.analysis.compare.sources import Source
from attnbench.base import units
from attnbench.base.files import write_whole
from attnbench.base.jsontext import encode
from attnbench.base.stats import median
from attnbench.gate.decide.data import Checked
from attnbench.gate.decide.exact import compare as exact_differences
from attnbench.report import tables
from attnbench.report.gate.texts import change, flat, interval, labels
from attnbench.report.tables import value_text
from attnbench.schema.record import Cell
from attnbench.theory.flags import profile_command
from attnbench.version import __version__

PAGE, MARKDOWN, JSON = "compare.html", "compare.md", "compare.json"
KIND, SCHEMA = "attnbench compare", 1
SURE = f"{100 * (1 - ALPHA):g} % interval"
CHANGED = ("slower", "faster")
NOTABLE = math.log(1.1)  # of a group's shift that is worth a sentence
_SHOWN = 20  # rows of a part on the terminal
_LINES = 8  # commands there
_NAMED = 8  # cells of which the same is said


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of what is shown: sentences, a table, commands; `full` has its place on a page.

    Columns after the first `text_columns` hold numbers.
    """

    title: str
    sentences: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    text_columns: int = 1
    commands: tuple[str, ...] = ()
    full: bool = False


def headline(found: Comparison) -> str:
    """`2 slower, 1 faster, 77 no change seen`, or what else there is to say in a few words."""
    if found.same:
        counts = Counter(row.verdict for row in found.same.rows)
        return ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
    assert found.elsewhere is not None, "a comparison is the one or the other"
    count = len(found.elsewhere.reversals)
    return f"measured on different machines: {count or 'no'} order reversal{'s' * (count != 1)}"


def parts(found: Comparison) -> list[Part]:
    """All that is to be shown of a comparison, in order."""
    changes = [
        (name, *(flat(value_text(name, value)) for value in values))
        for name, *values in found.environment
    ]
    environment = Part(
        title="Environment", header=("differs", "before", "after"), rows=tuple(changes),
        text_columns=3,
    )  # fmt: skip
    own = _same(found, found.same) if found.same else _elsewhere(found, found.elsewhere)  # type: ignore[arg-type]
    return [*([environment] if changes else []), *own]


def _same(found: Comparison, same: Compared) -> Iterator[Part]:
    common, names = _names(same.rows)
    changed = sorted(
        (row for row in same.rows if row.verdict in CHANGED), key=lambda row: -(row.ratio or 0)
    )
    header = ("cell", "verdict", "change", SURE, "before", "after")
    seen = [row.high / row.ratio - 1 for row in same.rows if row.ratio and row.high]
    detectable = (
        f"in half of the {len(seen)} cells that could be compared, a change of"
        f" ± {units.brief_percent(median(seen))} would have been one"
    )
    yield Part(
        title="Changed" if changed else "No cell is seen to have changed",
        sentences=(*([f"all cells: {common}"] if common else []), *([detectable] if seen else [])),
        header=header,
        rows=tuple(_line(row, names[row.key]) for row in changed),
        text_columns=2,
        commands=_profiles(changed, found.after),
    )
    yield Part(
        title="Common to all cells", sentences=tuple(_common(same)), commands=(_gate(found, same),)
    )
    against = [(names[r.key], flat(r.reason)) for r in same.rows if r.verdict == "not comparable"]
    if against:
        yield _gathered("Not comparable", ("why", "cells"), against)
    if exact := list(_exact(found, names)):
        yield _gathered("What repeats exactly", ("differs", "cells"), exact)
    yield Part(
        title="All cells", header=header, full=True,
        rows=tuple(_line(row, names[row.key]) for row in same.rows), text_columns=2,
    )  # fmt: skip


def _gathered(title: str, header: tuple[str, str], found: Sequence[tuple[str, str]]) -> Part:
    """What is said of cells, a row for each text with the cells that it is said of."""
    of: dict[str, list[str]] = {}
    for name, text in found:
        of.setdefault(text, []).append(name)
    rows = []
    for text, names in of.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        rows.append((text, ", ".join(names[:_NAMED]) + more))
    return Part(title=title, header=header, rows=tuple(rows), text_columns=2)


def _names(rows: Sequence[Row]) -> tuple[str, dict[Any, str]]:
    """What all cells have in common, and what tells each; other tools' cells by their names."""
    cells = [Cell(case=row.case, impl=row.impl) for row in rows if row.case]
    common, own = labels(cells)
    names = dict(zip((cell.key for cell in cells), own, strict=True))
    return common, {row.key: names.get(row.key, flat(row.label)) for row in rows}


def _line(row: Row, name: str) -> tuple[str, ...]:
    return (
        name, row.verdict, change(row.ratio), interval(row.low, row.high),
        units.time(row.before_us), units.time(row.after_us),
    )  # fmt: skip


def _profiles(changed: Sequence[Row], after: Source) -> tuple[str, ...]:
    auto = "cuda" if after.environment.get("cuda") else "cpu"
    files = _files(after)
    return tuple(profile_command(row.case, row.impl, auto) + files for row in changed if row.case)


def _files(source: Source) -> str:
    """The flags of a run's own files of implementations."""
    return "".join(f" --impl {shlex.quote(file)}" for file in source.settings.get("files") or ())


def _common(same: Compared) -> Iterator[str]:
    """The shift, what is known of such shifts, and what unpaired runs cannot prove."""
    known = "how much is usual between runs of equal code is not known here yet"
    if same.spread.shifts:
        usual = max(map(abs, same.spread.shifts))
        known = f"between earlier runs of equal code up to ± {_percent(usual)}"
    yield f"all times together: {change(math.exp(same.shift.run))} ({known})"
    own = [abs(value) for value in same.shift.groups.values()]
    if own and max(own) > NOTABLE:
        count = sum(value > NOTABLE for value in own)
        yield (
            f"{count} of {len(own)} groups of cells that are measured together moved by more than"
            f" {_percent(NOTABLE)} beside that, up to {_percent(max(own))}"
        )
    if same.ceilings:
        rates = ", ".join(f"{name} {change(ratio)}" for name, ratio in same.ceilings.items())
        yield f"rates of the machine itself meanwhile: {rates}"
    source = (
        f"{same.spread.runs} earlier runs"
        if same.spread.runs
        else "a default: fewer than two earlier runs"
    )
    yield (
        f"beside that the typical cell differs by ± {_percent(same.spread.typical)} from run to run"
        f" of equal code (standard deviation; {source})"
    )
    yield (
        "the changes of cells are beside these shifts. Runs that are not paired cannot tell whether"
        " the machine or a change common to all of the cells moved them, nor see a change within a"
        " cell's interval. What could, where both versions can be run:"
    )


def _percent(log: float) -> str:
    return units.brief_percent(math.exp(log) - 1)


def _gate(found: Comparison, same: Compared) -> str:
    if not any(row.case for row in same.rows):  # tests, of pytest-benchmark's
        return f"pytest --attnbench-gate {found.before.code or 'REF'}"
    rows = [row for row in same.rows if row.case and row.verdict in CHANGED]
    impls = ",".join(dict.fromkeys(row.impl for row in rows))
    sizes = sorted({row.case.seq_len for row in rows if row.case})
    flags = ["--impls", impls, "--seq-lens", ",".join(map(str, sizes))] if rows else []
    command = shlex.join(["attnbench", "gate", "--base", found.before.code or "REF", *flags])
    return command + _files(found.after)


def _exact(found: Comparison, names: dict[Any, str]) -> Iterator[tuple[str, str]]:
    for key, name in names.items():
        records = found.before.cells[key].record, found.after.cells[key].record
        if records[0] and records[1] and records[0].status == records[1].status == "ok":
            old, new = (Checked(status="ok", metrics=r.metrics) for r in records if r)  # type: ignore[arg-type]
            differs = exact_differences(old, new, 0)
            for text in (*differs.failures, *differs.notes):
                yield name, flat(text)


def _elsewhere(found: Comparison, apart: Elsewhere) -> Iterator[Part]:
    def both(values: Sequence[float | None], text: Callable[[float | None], str]) -> str:
        return f"{text(values[0])} → {text(values[1])}"

    yield Part(
        title="Changes of order" if apart.reversals else "No change of order",
        sentences=(
            f"{found.before.name} is of {_machine(found.before)}, {found.after.name} of"
            f" {_machine(found.after)}: times of different machines are not divided",
            *(
                f"{r.ahead} beats {r.behind} in {found.before.name} ({units.ratio(r.ratios[0])}),"
                f" {r.behind} beats {r.ahead} in {found.after.name}"
                f" ({units.ratio(1 / r.ratios[1])}): {r.label}"
                for r in apart.reversals
            ),
        ),
    )
    if apart.slopes:
        yield Part(
            title="Growth with n",
            sentences=("slopes of ln time over ln n, of the sizes that both have",),
            header=("implementation", "case", "n", "slope"),
            rows=tuple(
                (s.impl, s.label, f"{s.sizes[0]}–{s.sizes[-1]}", both(s.exponents, units.digits))
                for s in apart.slopes
            ),
            text_columns=2,
        )
    words = [set(s.label.split()) for s in apart.standings]
    common = set.intersection(*words)
    first = " ".join(word for word in apart.standings[0].label.split() if word in common)
    yield Part(
        title="Standings",
        sentences=(
            f"all cells: {first}",
            f"rank within the case; speed: time of {apart.baseline} / its time; share: of the rate"
            " of a large matmul in that run",
        ),
        header=("cell", "rank", "speed", "share"),
        rows=tuple(
            (
                " ".join([s.impl, *(word for word in s.label.split() if word not in common)]),
                f"{s.ranks[0]} → {s.ranks[1]}", both(s.speeds, units.ratio),
                both(s.shares, units.percent),
            )
            for s in apart.standings
        ),
    )  # fmt: skip


def _machine(source: Source) -> str:
    name = source.environment.get("device_name") or "an unnamed device"
    return f"{name} (published: {source.published})" if source.published else str(name)


def title(source: Source) -> str:
    """`quick-1, 2026-11-23 06:31 UTC, AMD EPYC, torch 2.13.0`."""
    known = source.environment
    facts = [
        source.name,
        units.moment(source.created) if source.created else None,
        _machine(source),
    ]
    facts += [f"torch {known['torch']}"] if known.get("torch") else []
    facts += [f"at {source.code[:10]}"] if source.code else []
    return flat(", ".join(str(fact) for fact in facts if fact))


def terminal(comparisons: Sequence[Comparison]) -> str:
    """All comparisons in short, ready to print."""
    shown: list[Any] = []
    for found in comparisons:
        shown += [Text(f"before: {title(found.before)}"), Text(f"after:  {title(found.after)}")]
        for part in parts(found):
            shown += _on_terminal(part)
        colour = "red" if " slower" in headline(found) else "bold"
        shown.append(Text(headline(found), style=colour))
    return tables.shown(*shown)


def _on_terminal(part: Part) -> Iterator[Any]:
    if part.full:
        return
    yield Text(f"\n{part.title}", style="bold")
    for sentence in part.sentences[: _SHOWN + 1]:
        width = tables.console().width
        lines = textwrap.fill(
            units.glued(sentence), width, initial_indent="- ", subsequent_indent="  ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        yield Text(lines, no_wrap=True)
    if part.rows:
        right = part.header[part.text_columns :]
        yield tables.grid(
            part.header, part.rows[:_SHOWN], right=right[:4], spare=("before", "after")
        )
    if len(part.rows) > _SHOWN:
        yield Text(f"… and {len(part.rows) - _SHOWN} more (--name, --json)")
    for command in part.commands[:_LINES]:
        yield Text(command, no_wrap=True)


def markdown(comparisons: Sequence[Comparison]) -> str:
    """All comparisons as Markdown; long tables folded."""
    blocks = []
    for found in comparisons:
        blocks += [
            f"## attnbench compare: {units.escape(headline(found))}",
            f"- before: {units.escape(title(found.before))}\n"
            f"- after: {units.escape(title(found.after))}",
        ]
        for part in parts(found):
            text = [f"- {units.escape(sentence)}" for sentence in part.sentences]
            table = units.table(part.header, part.rows, part.text_columns) if part.rows else ""
            commands = "\n".join(f"    {command}" for command in part.commands)
            inner = [block for block in ("\n".join(text), table, commands) if block]
            if part.full:
                fold = f"<details><summary>{part.title} ({len(part.rows)})</summary>"
                blocks += [fold, *inner, "</details>"]
            else:
                blocks += [f"### {part.title}", *inner]
    return "\n\n".join(blocks) + "\n"


def as_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Everything as plain JSON; shifts and spreads are natural logarithms."""
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "attnbench": __version__,
        "comparisons": [
            {
                "before": _source(found.before),
                "after": _source(found.after),
                "environment": [
                    {"name": name, "before": a, "after": b} for name, a, b in found.environment
                ],
                "same": _without_records(found.same),
                "elsewhere": found.elsewhere and asdict(found.elsewhere),
            }
            for found in comparisons
        ],
    }


def _source(source: Source) -> dict[str, Any]:
    names = ("name", "created", "code", "published")
    return {name: getattr(source, name) for name in names} | {"path": str(source.path)}


def _without_records(same: Compared | None) -> dict[str, Any] | None:
    if same is None:
        return None
    rows = [
        vars(row) | {"key": list(row.key), "case": row.case and row.case.to_json()}
        for row in same.rows
    ]
    noise = {"typical": same.spread.typical, "runs": same.spread.runs}
    return {
        "shift": same.shift.run, "spread": noise, "earlier_shifts": same.spread.shifts,
        "ceilings": same.ceilings, "rows": rows,
    }  # fmt: skip


def write_all(folder: Path, comparisons: Sequence[Comparison]) -> Path:
    """Write the page, the Markdown and the JSON into a folder; return the page.

    Raises:
        StoreError: the folder cannot be written.
    """
    from attnbench.report.pages import template  # matplotlib

    page = template("compare.html.jinja").render(
        title="; ".join(map(headline, comparisons)),
        comparisons=[
            {
                "before": title(found.before), "after": title(found.after),
                "headline": headline(found), "parts": parts(found),
            }
            for found in comparisons
        ],
        looks={"slower": "refuted", "faster": "holds", "not comparable": "inconclusive"},
    )  # fmt: skip
    write_whole(folder / JSON, encode(as_json(comparisons)).decode() + "\n")
    write_whole(folder / MARKDOWN, markdown(comparisons))
    write_whole(folder / PAGE, page)
    return folder / PAGE
