"""What a comparison of stored runs found, and what runs that are not paired cannot show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnbench.analysis.apart import ALPHA, EITHER, RatioChange
from attnbench.analysis.compare import Comparison
from attnbench.analysis.compare.elsewhere import Elsewhere
from attnbench.analysis.compare.same import VERDICTS, Compared, Row
from attnbench.analysis.compare.sources import Source
from attnbench.base import units
from attnbench.base.stats import median
from attnbench.errors import ExitCode
from attnbench.gate.decide.data import Checked, Rules
from attnbench.gate.decide.exact import compare as exact_differences
from attnbench.report import document as doc
from attnbench.report.labels import labels, shortened
from attnbench.schema.record import Cell as MeasuredCell
from attnbench.theory.flags import profile_command

SIGNS: dict[str | None, doc.Sign] = {
    "slower": "bad", "faster": "better", "no change seen": "good", "not comparable": "none",
    EITHER: "open",
}  # fmt: skip
COLUMNS = {
    "impl": "", "case_id": "", "cell": "cell", "verdict": "verdict", "change": "change",
    "shift": "shift", "before": "before", "after": "after",
}  # fmt: skip
_WORST: tuple[doc.Sign, ...] = ("bad", "open", "better", "good", "none")


def document(
    found: Sequence[Comparison], *, fail_slower: bool = False, fail_removed: bool = False
) -> doc.Document:
    """Each run held against the first; the exit code is that of a finding only where asked for."""
    same = [one.same for one in found if one.same]
    verdicts = {one.verdict for of in same for some in (of.rows, of.ratios) for one in some}
    moved = any(of.all_moved and of.shift.run > 0 for of in same)
    unclear = moved or any(not any(row.ratio for row in of.rows) for of in same)
    slower = verdicts & {"slower", EITHER}
    code = ExitCode.FINDING if slower else ExitCode.INCONCLUSIVE if unclear else ExitCode.OK
    ends = [_conclusion(one, fail_removed) for one in found]
    sections = [list(_sections(one, "bad" if fail_removed else "none")) for one in found]
    if len(found) > 1:
        sections = [[
            doc.Section(f"{one.after.name}: {words}", [doc.Text(_sources(one)), *parts])
            for one, (_, words), parts in zip(found, ends, sections, strict=True)
        ]]  # fmt: skip
    every = dict.fromkeys(command for one in found for command in _commands(one))
    paired = [command for command in every if command[0] == "paired"]
    return doc.Document(
        kind="compare",
        exit_code=ExitCode.FINDING if fail_removed and any(map(_removed, found))
        else code if fail_slower else ExitCode.OK,
        conclusion=doc.Finding(
            sign=min((sign for sign, _ in ends), key=_WORST.index),
            verdict="; ".join(words for _, words in ends), subject="the comparison",
        ),
        about=_sources(found[0]) if len(found) == 1 else (),
        sections=sections[0],
        commands=[command for command in every if command[0] != "paired"] + paired[:1],
    )  # fmt: skip


def _conclusion(found: Comparison, fail_removed: bool) -> tuple[doc.Sign, str]:
    if fail_removed and (count := len(_removed(found))):
        return "bad", f"{count} removed; {_conclusion(found, fail_removed=False)[1]}"
    if found.same:
        verdicts = [row.verdict for row in found.same.rows]
        ratios = [one for one in found.same.ratios if one.verdict != "no change seen"]
        sign = min(
            (SIGNS[of] for of in (*verdicts, *(one.verdict for one in ratios))), key=_WORST.index
        )
        said = [f"{one.impl} {one.verdict} against {one.against}" for one in ratios[:4]]
        words = "; ".join([*said, units.tally(verdicts, VERDICTS)])
        if found.same.all_moved:
            way = "slower" if found.same.shift.run > 0 else "faster"
            return "open" if sign == "good" else sign, f"all cells {way} together; {words}"
        return sign, words
    assert found.elsewhere is not None, "a comparison is the one or the other"
    count = len(found.elsewhere.reversals)
    what = "order reversal" + "s" * (count != 1)
    return "none", f"measured on different machines: {count or 'no'} {what}"


def _removed(found: Comparison) -> list[str]:
    """What the first has and the other has not: a test that was renamed passes no gate."""
    gone = (cell for key, cell in found.before.cells.items() if key not in found.after.cells)
    return [f"{cell.impl} {cell.label}".strip() for cell in gone]


def _sources(found: Comparison) -> list[str]:
    return [f"before: {_title(found.before)}", f"after: {_title(found.after)}"]


def _title(source: Source) -> str:
    """`quick-1, 2026-11-23 06:31 UTC, AMD EPYC, torch 2.13.0`."""
    words = [source.name, units.moment(source.created) if source.created else None]
    words += [_machine(source), *(f"torch {x}" for x in [source.environment.get("torch")] if x)]
    words += [f"at {source.code[:10]}"] if source.code else []
    return ", ".join(word for word in words if word)


def _machine(source: Source) -> str:
    return str(source.environment.get("device_name") or "an unnamed device")


def _sections(found: Comparison, gone: doc.Sign) -> Iterator[doc.Section]:
    if found.environment:
        yield doc.Section("The environments differ", [doc.Text(doc.changes(found.environment))])
    if removed := _removed(found):
        yield doc.Section(f"Only in {found.before.name}", [
            doc.Finding(sign=gone, verdict="removed", subject=name, test=("removed", name),
                    reason="removed") for name in removed
        ])  # fmt: skip
    if found.same:
        yield from _same(found, found.same)
    elif found.elsewhere:
        yield from _elsewhere(found, found.elsewhere)


def _same(found: Comparison, same: Compared) -> Iterator[doc.Section]:
    cells = [MeasuredCell(case=row.case, impl=row.impl) for row in same.rows if row.case]
    shared, own = labels(cells)
    names = {row.key: row.label for row in same.rows}  # other tools' cells have names of their own
    names |= dict(zip((cell.key for cell in cells), own, strict=True))
    changed = _changed(same)
    found_of = {row.key: doc.Finding(
        sign=SIGNS[row.verdict], verdict=row.verdict, subject=names[row.key], reason=row.reason,
        test=(row.impl, row.label),
        figures={"ratio": doc.Value(row.ratio, "change", row.low, row.high)} if row.ratio else {},
    ) for row in same.rows}  # fmt: skip

    def table(rows: Sequence[Row]) -> doc.Table:
        return doc.Table(
            columns=COLUMNS, spare=("before", "after"), most=20,
            intervals={"change": f"{100 * (1 - ALPHA):g} % interval"},
            rows=[(
                row.impl, row.case.case_id if row.case else "", names[row.key], found_of[row.key],
                doc.Value(row.ratio, "change", row.low, row.high), doc.Value(row.shift, "change"),
                doc.Value(row.before_us, "us"), doc.Value(row.after_us, "us"),
            ) for row in rows],
        )  # fmt: skip

    sentences: list[doc.Words] = [f"all cells: {shared}"] if shared else []
    title = "Changed" if changed else "No cell is seen to have changed"
    title += " beyond that" * same.all_moved
    if seen := [row.high / row.ratio - 1 for row in same.rows if row.ratio and row.high]:
        sentences.append(doc.sentence(
            "in half of the {count} cells only a change above {least} would have been detected",
            count=doc.Value(len(seen)), least=doc.Value(median(seen), "share"),
        ))  # fmt: skip
    name = "All cells moved together" if same.all_moved else "Common to all cells"
    common = doc.Section(name, [doc.Text(list(_common(same)))])
    if same.all_moved:
        yield common
    if same.ratios:
        ratios = sorted(same.ratios, key=lambda one: abs(one.value) / one.half)
        clearest = {frozenset((one.impl, one.against)): _against(one) for one in ratios}
        yield doc.Section("Implementations against each other", [*reversed(clearest.values())])
    yield doc.Section(title, [doc.Text(sentences), table(changed)])
    if seen and not same.all_moved:
        yield common
    if unfit := [of for of in found_of.values() if of.sign == "none"]:
        yield doc.Section("Not comparable", unfit)
    if exact := list(_exact(found, names)):
        yield doc.Section("What repeats exactly", exact)
    yield doc.Section(f"All cells ({len(same.rows)})", [table(same.rows)], folded=True)


def _against(one: RatioChange) -> doc.Finding:
    """What became of the ratio of an implementation to another, and of their times."""
    ratio, low, high = (math.exp(one.value + off) for off in (0.0, -one.half, one.half))
    its, other = (doc.Value(math.exp(moved), "change") for moved in one.moved)
    return doc.Finding(
        sign=SIGNS[one.verdict], verdict=str(one.verdict),
        subject=f"{one.impl} against {one.against}", test=(one.impl, "against the others"),
        reason=doc.sentence(
            "{verdict}: {ratio} [{ratio.interval}]; its time {its}, the other {other}", its=its,
            verdict=one.verdict, ratio=doc.Value(ratio, "change", low, high), other=other,
        ),
    )  # fmt: skip


def _changed(same: Compared) -> list[Row]:
    rows = [row for row in same.rows if row.verdict in ("slower", "faster")]
    return sorted(rows, key=lambda row: -(row.ratio or 0))


def _common(same: Compared) -> Iterator[doc.Words]:
    """The shift, how far such shifts go by themselves, and what unpaired runs cannot prove."""
    usual, text = same.spread.shift_bound, "all times together: {shift} (99 % are within ± {usual})"
    if usual is None:
        text = "all times together: {shift}; four earlier runs would show whether that is unusual"
    shift = doc.Value(math.exp(same.shift.run), "change")
    yield doc.sentence(text, shift=shift, usual=doc.Value(math.expm1(usual or 0.0), "share"))
    runs, typical = same.spread.runs, doc.Value(math.expm1(same.spread.typical), "share")
    yield doc.sentence(
        "beyond that the typical cell differs by ± {typical} from run to run of equal code"
        " (standard deviation; {source})", typical=typical,
        source=f"{runs} earlier runs" if runs else "a default: fewer than two earlier runs",
    )  # fmt: skip
    yield (
        "stored runs are not paired: a change common to all cells may be the machine's, and one"
        " within an interval is not seen. attnbench gate sees both, where both versions can be run"
    )


def _commands(found: Comparison) -> Iterator[tuple[str, str]]:
    """What shows which op makes the difference, and what decides in paired rounds."""
    if not found.same:
        return
    named = {row.impl for row in found.same.ratios if row.verdict != "no change seen"}
    changed = _changed(found.same) or [row for row in found.same.rows if row.impl in named]
    files = "".join(f" --impl {shlex.quote(x)}" for x in found.after.settings.get("files") or ())
    auto = "cuda" if found.after.environment.get("cuda") else "cpu"
    for row in [row for row in changed if row.case][:8]:
        assert row.case is not None
        yield "why", profile_command(row.case, row.impl, auto) + files
    base = found.before.code or "REF"
    if not any(row.case for row in found.same.rows):  # tests, of pytest-benchmark's
        yield "paired", f"pytest --attnbench-gate {base}"
        return
    torch = next(([a, b] for name, a, b in found.environment if name == "torch" and a and b), [])
    versions = [text for of in torch for text in ("--python", f"torch-{of}/bin/python")]
    if base != found.after.code and not (torch and base == "REF"):
        versions += ["--base", base]
    if not versions:
        return  # there is no other version to hold it against
    sizes = sorted({row.case.seq_len for row in changed if row.case})
    flags = ["--impls", ",".join(dict.fromkeys(row.impl for row in changed))] if changed else []
    flags += ["--seq-lens", ",".join(map(str, sizes))] if changed else []
    yield "paired", shlex.join(["attnbench", "gate", *versions, *flags]) + files


def _exact(found: Comparison, names: Mapping[Any, str]) -> Iterator[doc.Finding]:
    for key, name in names.items():
        records = found.before.cells[key].record, found.after.cells[key].record
        if records[0] and records[1] and records[0].status == records[1].status == "ok":
            old, new = (Checked(status="ok", metrics=r.metrics) for r in records if r)
            differs = exact_differences(old, new, Rules(growth=0.0))
            for text in (*differs.failures, *differs.notes):
                yield doc.Finding(sign="none", verdict="differs", subject=name, reason=text)


def _elsewhere(found: Comparison, apart: Elsewhere) -> Iterator[doc.Section]:
    before, after = found.before, found.after
    yield doc.Section("Changes of order" if apart.reversals else "No change of order", [doc.Text([
        f"{before.name} is of {_machine(before)}, {after.name} of {_machine(after)}: times of"
        " different machines are not divided",
        *(doc.sentence(
            "{ahead} beats {behind} in {before} ({first}), {behind} beats {ahead} in {after}"
            " ({second}): {label}",
            ahead=r.ahead, behind=r.behind, before=before.name, after=after.name, label=r.label,
            first=doc.Value(r.ratios[0], "ratio"), second=doc.Value(1 / r.ratios[1], "ratio"),
        ) for r in apart.reversals),
    ])])  # fmt: skip
    if apart.slopes:
        columns = {"impl": "implementation", "case": "case", "n": "n", "n_last": ""}
        yield doc.Section("Growth with n", [
            doc.Text(["slopes of ln time over ln n, of the sizes that both have"]),
            doc.Table(columns=columns | _both("slope"), rows=[
                (s.impl, s.label,
                 doc.Value(s.sizes[0], mark=f"–{s.sizes[-1]}"), doc.Value(s.sizes[-1]),
                 *(doc.Value(x, "number") for x in s.exponents)) for s in apart.slopes
            ]),
        ])  # fmt: skip
    common, names = shortened([f"{s.impl} {s.label}" for s in apart.standings])
    parts: list[doc.Part] = [doc.Text([
        f"all cells: {common}",
        f"rank within the case; speed: time of {apart.baseline} / its time; share: of the rate of"
        " a large matmul there",
    ])]  # fmt: skip
    columns = {"cell": "cell"} | _both("rank") | _both("speed") | _both("share")
    rows: list[Sequence[doc.Cell]] = [
        (name, *(doc.Value(x, "count") for x in s.ranks),
         *(doc.Value(x, "ratio") for x in s.speeds), *(doc.Value(x, "share") for x in s.shares))
        for name, s in zip(names, apart.standings, strict=True)
    ]  # fmt: skip
    spare = ("share_before", "share_after")
    yield doc.Section("Standings", [*parts, doc.Table(columns=columns, rows=rows, spare=spare)])


def _both(name: str) -> dict[str, str]:
    return {f"{name}_before": f"{name} before", f"{name}_after": f"{name} after"}
