"""What a comparison shows: the same parts on the terminal, in Markdown, on a page and as JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
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
SURE = f"{100 * (1 - ALPHA):g} %"
CHANGED = ("slower", "faster")
_SHOWN = 20  # rows of a part on the terminal
_LINES = 8  # commands there


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of what is shown: sentences, a table, commands; `full` has its place on a page.

    `verdicts` says that the table's last column is one.
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
    header = ("cell", "before", "after", "change", SURE, "verdict")
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
        commands=_profiles(changed, found.after),
    )
    yield Part(title="Common to all cells", sentences=tuple(_common(found, same)))
    against = Counter(row.reason for row in same.rows if row.verdict == "not comparable")
    if against:
        of = {r: [names[row.key] for row in same.rows if row.reason == r] for r in against}
        listed = tuple((", ".join(of[r]), flat(r)) for r, _ in against.most_common())
        yield Part(title="Not comparable", header=("cells", "why"), rows=listed, text_columns=2)
    if exact := tuple(_exact(found, names)):
        yield Part(
            title="What repeats exactly", header=("cell", "differs"), rows=exact, text_columns=2
        )
    yield Part(
        title="All cells", header=header, full=True,
        rows=tuple(_line(row, names[row.key]) for row in same.rows),
    )  # fmt: skip


def _names(rows: Sequence[Row]) -> tuple[str, dict[Any, str]]:
    """What all cells have in common, and what tells each; other tools' cells by their names."""
    cells = [Cell(case=row.case, impl=row.impl) for row in rows if row.case]
    common, own = labels(cells)
    names = dict(zip((cell.key for cell in cells), own, strict=True))
    return common, {row.key: names.get(row.key, flat(row.label)) for row in rows}


def _line(row: Row, name: str) -> tuple[str, ...]:
    return (
        name, units.time(row.before_us), units.time(row.after_us), change(row.ratio),
        interval(row.low, row.high), row.verdict,
    )  # fmt: skip


def _profiles(changed: Sequence[Row], after: Source) -> tuple[str, ...]:
    auto = "cuda" if after.environment.get("cuda") else "cpu"
    return tuple(profile_command(row.case, row.impl, auto) for row in changed if row.case)


def _common(found: Comparison, same: Compared) -> Iterator[str]:
    """The shift, what is known of such shifts, what unpaired runs cannot prove, and what could."""
    moved = change(2.718281828459045**same.shift.run)
    usual = sorted(same.usual)
    if len(usual) > 1:
        known = (
            f"between {len(usual)} pairs of runs of equal code here {interval(usual[0], usual[-1])}"
        )
    else:
        known = "how much that is between runs of equal code here is not known yet"
    yield f"all times together: {moved} ({known}); changes above are beside it"
    if same.ceilings:
        rates = ", ".join(f"{name} {change(ratio)}" for name, ratio in same.ceilings.items())
        yield f"rates of the machine itself meanwhile: {rates}"
    source = f"{same.spread.pairs} pairs of earlier runs" if same.spread.pairs else "a default"
    yield (
        f"times of one code differ from run to run by ± {units.brief_percent(same.spread.pooled)}"
        f" in the typical cell (standard deviation, from {source})"
    )
    yield (
        "the two runs are not paired: whether the machine or a change common to all cells moved"
        " all times together, they cannot tell, nor a change within the interval of a cell; what"
        " could, if both versions can be run here:"
    )
    yield _gate(found, same)


def _gate(found: Comparison, same: Compared) -> str:
    rows = [row for row in same.rows if row.case and row.verdict in CHANGED]
    impls = ",".join(dict.fromkeys(row.impl for row in rows))
    sizes = sorted({row.case.seq_len for row in rows if row.case})
    flags = ["--impls", impls, "--seq-lens", ",".join(map(str, sizes))] if rows else []
    return shlex.join(["attnbench", "gate", "--base", found.before.code or "REF", *flags])


def _exact(found: Comparison, names: dict[Any, str]) -> Iterator[tuple[str, str]]:
    for key, name in names.items():
        records = found.before.cells[key].record, found.after.cells[key].record
        if records[0] and records[1] and records[0].status == records[1].status == "ok":
            old, new = (Checked(status="ok", metrics=r.metrics) for r in records if r)  # type: ignore[arg-type]
            differs = exact_differences(old, new, 0)
            for text in (*differs.failures, *differs.notes):
                yield name, flat(text)


def _elsewhere(found: Comparison, apart: Elsewhere) -> Iterator[Part]:
    def both(values: Sequence[float | None], text: Any) -> tuple[str, str]:
        return text(values[0]), text(values[1])

    yield Part(
        title="Changes of order" if apart.reversals else "No change of order",
        sentences=(
            f"times are not divided across machines: {found.before.name} is of"
            f" {_machine(found.before)}, {found.after.name} of {_machine(found.after)}",
            *(
                f"{r.ahead} beats {r.behind} on {_machine(found.before)}"
                f" ({units.ratio(r.ratios[0])}), not on {_machine(found.after)}"
                f" ({units.ratio(1 / r.ratios[1])} the other way): {r.label}"
                for r in apart.reversals
            ),
        ),
    )
    if apart.slopes:
        yield Part(
            title="Growth with n",
            sentences=("slopes of ln time over ln n, of the sizes that both have",),
            header=("implementation", "case", "n", "before", "after"),
            rows=tuple(
                (s.impl, s.label, f"{s.sizes[0]}–{s.sizes[-1]}", *both(s.exponents, units.digits))
                for s in apart.slopes
            ),
            text_columns=3,
        )
    yield Part(
        title="Standings",
        sentences=(
            f"rank within the case; speed: time of {apart.baseline} / its time; share: of the rate"
            " of a large matmul in that run",
        ),
        header=("cell", "rank", "", "speed", "", "share", ""),
        rows=tuple(
            (
                f"{s.impl} {s.label}", *map(str, s.ranks), *both(s.speeds, units.ratio),
                *both(s.shares, units.percent),
            )
            for s in apart.standings
        ),
        full=True,
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
        yield Text(sentence, no_wrap=sentence.startswith("attnbench "))
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
    noise = {"pooled": same.spread.pooled, "pairs": same.spread.pairs}
    return {
        "shift": same.shift.run, "spread": noise, "usual": same.usual, "ceilings": same.ceilings,
        "rows": rows,
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
