"""Advice: the best attention for each call, what the default costs, and the line to change."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

import pandas as pd

from attnbench.analysis import advice as analysis
from attnbench.analysis import table
from attnbench.analysis.advice import Advice, Verdict
from attnbench.analysis.axes import label_axes
from attnbench.analysis.highlights import built_sentences
from attnbench.analysis.leads import against, number_of
from attnbench.analysis.notes import fresh
from attnbench.analysis.pairs import decided
from attnbench.analysis.table import Ratio
from attnbench.base import units
from attnbench.base.parameters import base_name
from attnbench.errors import ExitCode, UsageError
from attnbench.report import document as doc
from attnbench.report.documents import program, sweep
from attnbench.schema.axes import AXES
from attnbench.schema.case import Case
from attnbench.store.runs import Run
from attnbench.theory.choices import DEFAULT, TRANSFORMERS, WORDS
from attnbench.theory.flags import case_text
from attnbench.theory.traits import case_label

SIGNS: dict[Verdict, doc.Sign] = {
    "failed": "bad", "switch": "good", "likely": "open", "open": "open", "keep": "good",
}  # fmt: skip
COSTS = (
    f"“{DEFAULT} costs 2×” means that it takes twice as long as the best, in rounds where both were"
    " timed: only the call, without projections and the rest of its layer."
)
PACKING = "Cut keys leave the queries of padding: packing is what cuts these."
ELSEWHERE = "This was measured there, not here: the best choice on this machine may differ."
SMALL = 0.1  # of a step: what attention takes is said first
SAID = 4  # calls in sentences; all are in the table


def document(
    run: Run, asked: analysis.Steps | None = None, *, here: bool = True, interrupted: bool = False
) -> doc.Document:
    """Advice from a run, which was measured on this machine or not, on the steps asked for.

    Raises:
        UsageError: the run lacks the default, or no call has two implementations.
    """
    names = {cell.impl for cell in (*run.cells, *(record.cell for record in run.records))}
    if DEFAULT not in names:
        raise UsageError(
            f"{run.path} has no {DEFAULT} to compare with, only {', '.join(sorted(names))}"
        )
    frame = table.load(run, DEFAULT)
    found = analysis.advices(run, frame, asked)
    mine = frame["impl"].isin([DEFAULT, *(run.info.get("own") or ())])
    raised = (frame["impl"] != DEFAULT) & frame["status"].isin(["error", "crashed"])
    wrong = frame[mine & ((frame["status"] == "incorrect") | raised)]
    if not found and wrong.empty and not run.unfinished:
        reasons = "; ".join(dict.fromkeys(frame["reason"].dropna()))[:300]
        raise UsageError(
            f"{run.path}: no call has two implementations of exact attention with a time"
            + f" ({reasons})" * bool(reasons)
        )
    code = ExitCode.OK if {each.verdict for each in found} - {"open"} else ExitCode.INCONCLUSIVE
    code = code if wrong.empty else ExitCode.FINDING
    own = frame[frame["case_id"].isin([each.case.case_id for each in found])]
    ids = {each.case.case_id: each.best["impl"] for each in found}
    in_use = (own["impl"] == DEFAULT) | (own["impl"] == own["case_id"].map(ids))
    pages, keep = fresh(run, own[in_use])
    calls = program.spent(run, found)
    return doc.Document(
        kind="advise", created=run.info.get("created") or "",
        exit_code=ExitCode.INTERRUPTED if interrupted else code,
        conclusion=_conclusion(run, found, wrong),
        about=[*[ELSEWHERE] * (not here), *program.sentences(run, calls),
               *_sentences(run, frame, found, asked),
               *[pages] * bool(pages), " · ".join(sweep.head(run, own))],
        sections=[
            program.section(run, calls),
            doc.Section("Which attention", [*_table(found), *_figure(run, found)]),
            doc.Section("What to change", list(_words(found))),
            doc.Section("Without another kernel", list(_changes(run, found))),
            doc.Section("Padded or packed", list(sweep.packed(run, own))),
            doc.Section(f"What {DEFAULT} runs on", list(_backends(found))),
            doc.Section("Everything tried", list(_tried(run, own, found)),
                        folded=len(found) > SAID),
            doc.Section("Not measured", list(_declined(run))),
        ],
        commands=[*[("keep", keep)] * bool(keep), ("records", str(run.path / "records.jsonl")),
                  ("report", f"attnbench report {shlex.quote(str(run.path))}")],
    )  # fmt: skip


def _conclusion(run: Run, found: Sequence[Advice], wrong: pd.DataFrame) -> doc.Finding:
    if len(wrong):
        first = wrong.sort_values("status", key=lambda of: of != "incorrect").iloc[0]
        verdict = f"{first['impl']} " + ("is wrong" if first["status"] == "incorrect" else "fails")
        why = str(first["reason"])
        return doc.Finding(sign="bad", verdict=verdict, subject=run.run_id, reason=why)
    there = {each.verdict for each in found} or {"open"}
    worst = next(verdict for verdict in analysis.WORST_FIRST if verdict in there)
    own = [each for each in found if each.verdict == worst]
    impls = ", ".join(dict.fromkeys(str(each.best["impl"]) for each in own))
    words = {
        "failed": f"{DEFAULT} has no time", "switch": f"use {impls}",
        "likely": f"{impls} looks faster", "open": "undecided",
        "keep": f"keep {DEFAULT}",
    }[worst]  # fmt: skip
    total = f" in {len(own)} of {len(found)} calls" if len(found) > 1 else ""
    return doc.Finding(sign=SIGNS[worst], verdict=words + total, subject=run.run_id)


def _ratio(known: Ratio) -> doc.Value:
    return doc.Value(known[0], "ratio", *known[1:])


def _name(advice: Advice, found: Sequence[Advice]) -> str:
    """The call: its step, and by what it differs from the others of the step."""
    rows = [each.case.to_json() for each in found if each.step == advice.step]
    own = advice.case.to_json()
    texts = (x.text(own) for n, x in AXES.items() if any(row[n] != own[n] for row in rows))
    step = "" if advice.step == "call" else advice.step
    count = f"{advice.count} ×" * (advice.count > 1)
    named = " ".join(filter(None, (step, *texts))) or "this call"
    return f"{count} {named}".strip()


def _sentences(
    run: Run, frame: pd.DataFrame, found: Sequence[Advice], asked: analysis.Steps | None
) -> Iterator[doc.Words]:
    """For each call the advice, then what it saves of the layer; then of each step."""
    if left_out := run.info.get("left_out"):
        yield f"Not in these calls, but your choice must support it: {left_out}."
    mine = frame["impl"].isin(run.info.get("own") or ())
    for _, row in frame[mine & frame["status"].isin(["error", "crashed", "timeout"])].iterrows():
        yield f"{row['impl']} has no time: {row['status']}: {row['reason']}."
    for part, ahead in analysis.interrupted(run):
        long = f"{units.digits(part.metrics['lost_by'])} times as long"
        yield f"Until it was interrupted, {part.cell.impl} took {long} as {ahead}."
    for each in sorted(found, key=lambda a: analysis.WORST_FIRST.index(a.verdict))[:SAID]:
        small, shares = _shares(run, each)
        if small:
            yield from shares
        yield f"{_name(each, found)}: {_sentence(each)}."
        for other in each.rows[each.rows["impl"].isin(each.uneven)].to_dict("records"):
            yield f"Not advised: {other['impl']}: {str(other['notes']).partition(';')[0]}."
        yield from built_sentences(each.rows[each.rows["impl"] == each.best["impl"]])
        for change in analysis.packed(run, frame, each):
            text = against(change.faster, f"{change.slower} padded", change.ratio)
            yield f"{_name(each, found)}, packed as {change.case.mask.text}: {text}. {PACKING}"
        if not small:
            yield from shares
        rows = [of for of in (each.best, each.default) if of is not None]
        warm = {str(of["impl"]): of.get("warm_us") for of in rows}
        complete = not any(map(units.is_unknown, warm.values()))
        if complete and any(of["warm_us"] < 0.9 * of["time_us"] for of in rows):
            times = ", ".join(f"{units.time(us)} with {impl}" for impl, us in warm.items())
            yield f"With its keys still in the caches (warm) the call takes {times}."
        name, known = analysis.transformers_choice(each, run)
        if name != DEFAULT and known[1] is not None:
            yield doc.sentence(
                f"{TRANSFORMERS} makes this call as {name} does: {{ratio}} the time of the best,"
                " {ratio.interval}.",
                ratio=_ratio(known),
            )
    for step, calls in (asked or run.info.get("steps") or {}).items():
        total_us, ratio = analysis.of_step(found, calls)
        if ratio[0] is not None and ratio[0] > 1 and sum(calls.values()) > 1:
            saved = _saved((1.0, 1.0, 1.0), ratio)
            name = "All calls" if step == "call" else f"{step}: all calls"
            yield doc.sentence(
                f"{name} spend {{total}} in attention with {DEFAULT}; the best of each saves"
                " {saved} of that" + (" ({low} to {high})." if ratio[1] else "."),
                total=doc.Value(total_us, "us"), saved=saved,
                low=doc.Value(saved.low, "share"), high=doc.Value(saved.high, "share"),
            )  # fmt: skip


def _shares(run: Run, each: Advice) -> tuple[bool, list[doc.Words]]:
    """Whether attention is small in the step; and what it takes, or why nothing says so."""
    if (found := analysis.shares(run, each.case)) is None:
        model = (run.info.get("settings") or {}).get("model") or {}
        around = (r for r in run.records if r.reason and analysis.around(r.cell.case, each.case))
        why = next((str(r.reason) for r in around), "no time for its layer; give a longer --budget")
        why = why if model.get("inner") else "; ".join(model.get("notes", ()))
        return False, [f"What attention takes of the step is unknown: {why}."] * bool(model)
    share, parts_us, note = found
    values = {n: doc.Value(us / sum(parts_us.values()), "share") for n, us in parts_us.items()}
    values |= {"attention": doc.Value(share[0], "share", *share[1:])}
    whole = "what was timed of the step" if "not timed" in note else "the step"
    within = " [{attention.interval}]" * (share[1] is not None)
    text = f"With {DEFAULT} attention is {{attention}}{within} of {whole} ("
    text += ", ".join(f"{name} {{{name}}}" for name, us in [*parts_us.items()][1:] if us) + ")"
    if each.verdict in ("switch", "likely"):
        saved = values["saved"] = _saved(share, each.regret)
        text += "; the change saves {saved}" + " [{saved.interval}]" * (saved.low is not None)
        text += " of it"
    text += f". Norms and residuals are left out{f'; {note}' * bool(note)}."
    small = (share[0] or 1.0) < SMALL
    lead = "Attention is {attention} of this step: nothing you choose here saves more than that."
    return small, [doc.sentence(each, **values) for each in [lead] * small + [text]]


def _saved(share: Ratio, ratio: Ratio) -> doc.Value:
    """What a part that becomes so much faster saves of the whole: Amdahl's law."""
    value, low, high = (
        None if a is None or b is None else a * (1 - 1 / b)
        for a, b in zip(share, ratio, strict=True)
    )
    return doc.Value(value, "share", low, high)


def _sentence(each: Advice) -> str:
    best, high = str(each.best["impl"]), each.regret[2]
    tried = int(each.rows["time_us"].notna().sum())
    level = f" (level: {', '.join(each.level)})" if each.level else ""
    if each.default is None:
        row = each.rows[each.rows["impl"] == DEFAULT]
        why = "not measured" if row.empty else f"{row['status'].iloc[0]}: {row['reason'].iloc[0]}"
        return f"{DEFAULT} has no time ({why}); {best} is the fastest{level}"
    if each.verdict == "open" and tried == 1:
        return f"{DEFAULT} alone was timed; give a longer --budget"
    if each.verdict == "keep":
        if tried == 1:
            return f"keep {DEFAULT}: each other took more than 3 times as long, or is the same call"
        of = f" of the {tried} tried" * bool(each.untried)
        if high is not None and high > 1:
            return f"keep {DEFAULT}: no choice{of} gains more than {units.percent(high - 1)}{level}"
        return f"keep {DEFAULT}: it is the fastest of {tried}" + " tried" * bool(each.untried)
    if each.regret[1] is None and each.regret[0]:
        rounds = units.counted(int(each.best["n_samples"]), "round")
        times = units.digits(each.regret[0])
        text = f"{best} is {times} times as fast as {DEFAULT} in {rounds}, too few for an interval"
        return f"{text}; a longer --budget may decide it"
    text = against(best, DEFAULT, each.regret)
    mine, others = (float(row["time_us"]) for row in (each.best, each.default))
    if (each.regret[1] or 0) <= others / mine <= (high or 0):  # else the two would contradict it
        text += f": {units.time(mine)} in place of {units.time(others)} a call"
    return text + ("" if each.verdict == "switch" else "; a longer --budget may decide it")


def _table(found: Sequence[Advice]) -> Iterator[doc.Part]:
    columns = {
        "call": "call", "best": "best", "time": "time", "memory": "workspace",
        "costs": f"{DEFAULT} costs", "default_memory": f"{DEFAULT} workspace", "sure": "how sure",
        "level": "", "case_id": "",
    }  # fmt: skip
    rows: list[Sequence[doc.Cell]] = []
    for each in found:
        sizes = [
            number_of({} if row is None else row, "memory_workspace_bytes")[0]
            for row in (each.best, each.default)
        ]
        sure = {"switch": "sure", "keep": "sure"}.get(each.verdict, each.verdict)
        if each.untried and each.verdict == "keep":
            sure = f"of {int(each.rows['time_us'].notna().sum())} tried"
        name, best = _name(each, found), doc.Value(str(each.best["impl"]), "impl")
        if each.verdict == "open" and each.default is not None and best.number != DEFAULT:
            best = doc.Value(f"{DEFAULT} or {best.number}")
        rows.append([
            name, best, doc.Value(number_of(each.best, "time_us")[0], "us"),
            doc.Value(sizes[0], "bytes"), _ratio(each.regret), doc.Value(sizes[1], "bytes"),
            doc.Finding(
                sign=SIGNS[each.verdict], verdict=sure, subject=name, test=("advise", name)
            ),
            doc.Value(", ".join(each.level)), doc.Value(each.case.case_id),
        ])  # fmt: skip
    if rows:
        spare = ("default_memory", "memory")
        yield doc.Table(columns=columns, rows=rows, intervals={"costs": "95 % CI"}, spare=spare)
        yield doc.Text([COSTS], quiet=True)


def _figure(run: Run, found: Sequence[Advice]) -> Iterator[doc.Part]:
    """The candidates of each call, by the default's time / theirs; and the parts of its step."""
    shares = [(_name(each, found), analysis.shares(run, each.case)) for each in found]
    if parts := [(name, of[1]) for name, of in shares if of]:
        yield doc.Figure(title="Parts of a step", draw="pages.draw_parts", of=(parts[:SAID],))
    calls = [
        (_name(each, found), {str(name): ratio for name, ratio in each.ratios.items() if ratio[0]})
        for each in found
        if each.default is not None
    ]
    if calls := [call for call in calls if call[1]]:
        yield doc.Figure(title="Candidates", draw="pages.draw_candidates", of=(DEFAULT, calls))


def _words(found: Sequence[Advice]) -> Iterator[doc.Part]:
    """For what is better than the default, the change in a program."""
    better = [each for each in found if each.verdict in ("switch", "likely", "failed")]
    for impl in dict.fromkeys(str(each.best["impl"]) for each in better):
        line, mine = WORDS.get(base_name(impl), {}), [x for x in better if x.best["impl"] == impl]
        reason = f"in torch {line['torch']}" if line else f"call it in place of {DEFAULT}"
        shared = any(each.case.kv_heads < each.case.heads for each in mine)
        if "transformers" in line and not (shared and line.get("unshared")):
            reason += f"; in transformers {line['transformers']}"
        if scales := {each.case.scale for each in mine} - {None}:
            reason += f"; scale={', '.join(map('{:.4g}'.format, scales))} goes into the call"
        where = f" ({', '.join(_name(each, found) for each in mine)})" * (len(found) > 1)
        verdict = next(each.verdict for each in mine)
        words = "try" if verdict == "likely" else "change"
        yield doc.Finding(sign=SIGNS[verdict], verdict=words, subject=impl + where, reason=reason)


def _changes(run: Run, found: list[Advice]) -> Iterator[doc.Part]:
    """Where an interval excludes 1 a row, else in a line that no difference was seen."""
    names = {each.case: _name(each, found) for each in found}
    every = {(each.case, each.slower): each for each in analysis.changes(run, found)}.values()
    helps = [each for each in every if decided(*each.ratio[1:]) > 0]
    rows: list[Sequence[doc.Cell]] = [
        [names[each.case], each.slower, each.faster, _ratio(each.ratio)] for each in helps
    ]
    if rows:
        heads = ("call", f"{DEFAULT} with", "is slower than with", "by")
        columns = dict(zip(("call", "slower", "faster", "ratio"), heads, strict=True))
        yield doc.Table(columns=columns, rows=rows, grouped=True, intervals={"ratio": "95 % CI"})
    others = dict.fromkeys(
        f"{each.slower} and {each.faster}"
        for each in every
        if each not in helps and each.ratio[1] is not None
    )
    if others:
        yield doc.Text([f"No difference was seen between {'; '.join(others)}."], quiet=True)


def _backends(found: Sequence[Advice]) -> Iterator[doc.Part]:
    """The backend that SDPA took by itself, and torch's reason where that is its math path."""
    calls: dict[str, list[str]] = {}
    for each in found:
        if each.default is not None and not units.is_unknown(each.default["sdpa_backend"]):
            why = each.default["sdpa_reason"]
            taken = str(each.default["sdpa_backend"]) + (
                "" if units.is_unknown(why) else f" ({why})"
            )
            calls.setdefault(taken, []).append(_name(each, found))
    for taken, of in calls.items():
        where = ", ".join(of) if len(of) <= SAID else f"{len(of)} calls"
        yield doc.Text([f"the {taken} backend" + f": {where}" * (len(found) > 1)])


def _tried(run: Run, own: pd.DataFrame, found: Sequence[Advice]) -> Iterator[doc.Part]:
    """All rows of the calls, and what has no time, but for what another device has.

    Ratios are those of the advice; bold is what to use.
    """
    own = own.assign(behind=float("nan"), speedup_reason=None)
    for each in found:
        rows = own["case_id"] == each.case.case_id
        own.loc[rows & (own["impl"] == each.pick["impl"]), "behind"] = 1.0
        for name, ratio in each.ratios.items():
            ends = ["speedup", "speedup_low", "speedup_high"]
            own.loc[rows & (own["impl"] == name), ends] = [
                math.nan if x is None else x for x in ratio
            ]
    if (own["status"] == "ok").any():
        shown = own[own["status"] == "ok"]
        calls = {each.case.case_id: _name(each, found) for each in found}
        yield from sweep.results_table(shown, label_axes(own), calls, without=("behind",))
    infos = run.info.get("implementations") or ()
    device = run.shared(run.environments).get("device")
    elsewhere = [each["name"] for each in infos if device not in each.get("devices", [device])]
    yield from sweep.failures(run, own[~own["impl"].isin(elsewhere)])


def _declined(run: Run) -> Iterator[doc.Part]:
    """What did not fit into the budget, with the command and the time that it takes."""
    known: dict[str, float] = run.info.get("declined") or {}
    begun = {record.cell.case for record in run.records}
    compared = Counter(cell.case for cell in run.cells)
    lines: list[doc.Words] = []
    for case, count in compared.items():
        seconds = known.get(case.case_id)
        if seconds or (count > 1 and case not in begun):
            took = f"{units.seconds(seconds)}; " if seconds else ""
            lines.append(f"{case_label(case)}: {took}attnbench {_command(case, seconds or 120)}")
    late = [r.cell.impl for r in run.records if r.metrics.get("dropped") == "budget"]
    if names := dict.fromkeys(name for name in late if name != DEFAULT):
        lines.append(f"{', '.join(names)}: no time in --budget; name them in --impls")
    if lines:
        yield doc.Text(lines)


def _command(case: Case, seconds: float) -> str:
    """What measures a case alone: `--case` with what differs from the defaults, and a budget."""
    return f"advise --case {shlex.quote(case_text(case))} --budget {max(10, round(1.5 * seconds))}s"
