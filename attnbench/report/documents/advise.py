"""Advice: the best attention for each call, what the default costs, and the line to change."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from attnbench.analysis import advice as analysis
from attnbench.analysis import table
from attnbench.analysis.advice import Advice, Verdict
from attnbench.analysis.axes import fixed
from attnbench.analysis.highlights import measured_on
from attnbench.analysis.table import Ratio
from attnbench.base import units
from attnbench.base.parameters import base_name
from attnbench.errors import ExitCode, UsageError
from attnbench.report import document as doc
from attnbench.schema.axes import AXES
from attnbench.schema.case import DEFAULTS, FOLLOWS, Case
from attnbench.store.runs import Run
from attnbench.theory.choices import DEFAULT, TRANSFORMERS, WORDS
from attnbench.theory.traits import case_label

SIGNS: dict[Verdict, doc.Sign] = {
    "failed": "bad", "switch": "better", "likely": "open", "open": "open", "keep": "good",
}  # fmt: skip
COSTS = (
    f"What {DEFAULT} costs: its time / that of the best, from rounds in which both were timed."
    " The rest of the layer is not in it."
)
ELSEWHERE = "This was measured there, not here: on another machine another one may be best."


def document(run: Run, *, here: bool = True) -> doc.Document:
    """Advice from a run, which was measured on this machine or not.

    Raises:
        UsageError: the run lacks the default, or no call has two implementations.
    """
    names = {cell.impl for cell in (*run.cells, *(record.cell for record in run.records))}
    if DEFAULT not in names:
        raise UsageError(f"{run.path} has no {DEFAULT} to compare with; it has {_listed(names)}")
    frame = table.load(run, DEFAULT)
    found = analysis.advices(run, frame)
    if not found and not run.unfinished and not (frame["status"] == "incorrect").any():
        reasons = dict.fromkeys(frame["reason"].dropna())
        raise UsageError(
            f"{run.path}: no call has two implementations with a time"
            + f" ({'; '.join(reasons)[:300]})" * bool(reasons)
        )
    wrong = frame[(frame["impl"] == DEFAULT) & (frame["status"] == "incorrect")]
    verdicts = {each.verdict for each in found}
    code = ExitCode.OK
    if not verdicts - {"open"}:
        code = ExitCode.INCONCLUSIVE
    return doc.Document(
        kind="advise", created=run.info.get("created") or "",
        exit_code=ExitCode.FINDING if len(wrong) else code,
        conclusion=_conclusion(run, found, wrong),
        about=[*[ELSEWHERE] * (not here), *_sentences(run, frame, found),
               " · ".join(_measured(run, frame, found))],
        sections=[
            doc.Section("Which attention", list(_table(found))),
            doc.Section("What to change", list(_words(found))),
            doc.Section("Without another kernel", list(_changes(run, found))),
            doc.Section("Why", list(_why(run, found))),
            doc.Section("Everything tried", list(_tried(run, found)), folded=len(found) > 3),
            doc.Section("Not measured", list(_declined(run))),
        ],
        commands=[("records", str(run.path / "records.jsonl")),
                  ("report", f"attnbench report {shlex.quote(str(run.path))}")],
    )  # fmt: skip


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _ratio(known: Ratio) -> doc.Value:
    return doc.Value(known[0], "ratio", *known[1:])


def _number(row: Any, name: str, unit: doc.Unit) -> doc.Value:
    value = row[name]
    return doc.Value(None if units.is_unknown(value) else value, unit)


def _sure(each: Advice) -> str:
    if each.verdict == "failed":
        return f"{DEFAULT} has no time"
    return "sure" if each.sure else "undecided" if each.verdict == "open" else "likely"


def _name(advice: Advice, found: Sequence[Advice]) -> str:
    """The call: its step, and by what it differs from the others of the step."""
    rows = [each.case.to_json() for each in found if each.step == advice.step]
    own = advice.case.to_json()
    texts = (x.text(own) for n, x in AXES.items() if any(row[n] != own[n] for row in rows))
    step = "" if advice.step == "call" else advice.step
    count = f"{advice.count} ×" * (advice.count > 1)
    return " ".join(filter(None, (count, step, *texts))) or "this call"


def _conclusion(run: Run, found: Sequence[Advice], wrong: pd.DataFrame) -> doc.Finding:
    if len(wrong):
        why = str(wrong["reason"].iloc[0])
        return doc.Finding(
            sign="bad", verdict=f"{DEFAULT} is wrong", subject=run.run_id, reason=why
        )
    for verdict in analysis.WORST_FIRST:
        if own := [each for each in found if each.verdict == verdict]:
            total = f" in {len(own)} of {units.counted(len(found), 'call')}" * (len(found) > 1)
            impls = ", ".join(dict.fromkeys(str(each.best["impl"]) for each in own))
            words = {
                "failed": f"{DEFAULT} has no time", "switch": f"use {impls}",
                "likely": f"{impls} looks faster", "open": "undecided",
                "keep": f"nothing to gain: keep {DEFAULT}",
            }[verdict]  # fmt: skip
            return doc.Finding(sign=SIGNS[verdict], verdict=words + total, subject=run.run_id)
    return doc.Finding(sign="open", verdict="no call was judged", subject=run.run_id)


def _sentences(run: Run, frame: pd.DataFrame, found: Sequence[Advice]) -> Iterator[doc.Words]:
    """For each call the advice, then what it saves of the step and of the layer."""
    for each in sorted(found, key=lambda a: analysis.WORST_FIRST.index(a.verdict))[:4]:
        yield _sentence(each, found)
        share = analysis.layer_share(run, frame, each)
        if share is not None and each.verdict == "switch":
            low, high = (None if x is None else share * (1 - 1 / x) for x in each.regret[1:])
            yield doc.sentence(
                f"With {DEFAULT} the call is {{share}} of its layer's time: the change saves"
                " {saved} of the layer's time ({low} to {high}).",
                share=doc.Value(share, "share"),
                saved=doc.Value(share * (1 - 1 / (each.regret[0] or 1)), "share"),
                low=doc.Value(low, "share"), high=doc.Value(high, "share"),
            )  # fmt: skip
        name, known = analysis.transformers_choice(each, run)
        if name != DEFAULT and known[0] is not None:
            yield doc.sentence(
                f"{TRANSFORMERS} makes this call as {name} does: {{ratio}} the time of the best.",
                ratio=_ratio(known),
            )
    yield from _totals(found)


def _sentence(each: Advice, found: Sequence[Advice]) -> doc.Words:
    best, where = str(each.best["impl"]), _name(each, found)
    value, low, high = each.regret
    level = f" (level: {', '.join(each.level)})" if each.level else ""
    if each.default is None:
        row = each.rows[each.rows["impl"] == DEFAULT]
        why = "not measured" if row.empty else f"{row['status'].iloc[0]}: {row['reason'].iloc[0]}"
        return f"{where}: {DEFAULT} has no time ({why}); {best} is the fastest{level}."
    if each.verdict == "keep":
        if not each.sure:
            return f"{where}: no gain was seen, and {DEFAULT} is among the fastest{level}."
        most = units.percent(max(0.0, (high or 1) - 1))
        return (
            f"{where}: nothing to gain, {DEFAULT} takes at most {most} more than the best{level}."
        )
    if value is None:
        return f"{where}: {best} is the fastest{level}."
    times = {
        "mine": _number(each.best, "time_us", "us"),
        "default": _number(each.default, "time_us", "us"),
    }  # fmt: skip
    ends = f" [{units.digits(low)}–{units.digits(high)}]" if low and high else ""
    words = "is" if each.verdict == "switch" else "looks"
    more = "" if each.verdict == "switch" else ", which is not decided: give it more --budget"
    return doc.sentence(
        f"{{where}}: {best} {words} {units.digits(value)} times as fast as {DEFAULT}{ends}:"
        f" {{mine}} in place of {{default}} a call{level}{more}.", where=where, **times,
    )  # fmt: skip


def _totals(found: Sequence[Advice]) -> Iterator[doc.Words]:
    """What a step spends in attention with the default, and with the pick of each call."""
    for step in dict.fromkeys(each.step for each in found if each.step):
        own = [each for each in found if each.step == step]
        if any(each.default is None or each.regret[0] is None for each in own):
            continue
        spent_us = [each.count * float(each.default["time_us"]) for each in own]  # type: ignore[index]
        total_us = sum(spent_us)
        saved = [0.0, 0.0, 0.0]
        for us, each in zip(spent_us, own, strict=True):
            change = each.verdict in ("switch", "likely")
            ends = each.regret if change else (1.0, 1.0, 1.0)
            known = [end or each.regret[0] or 1.0 for end in ends]
            part = us / total_us
            saved = [s + part * (1 - 1 / ratio) for s, ratio in zip(saved, known, strict=True)]
        calls = sum(each.count for each in own)
        if saved[0] > 0 and calls > 1:
            yield doc.sentence(
                f"{step}: its {calls} calls spend {{total}} in attention with {DEFAULT}; the best"
                " of each saves {saved} of that ({low} to {high}).",
                total=doc.Value(total_us, "us"), saved=doc.Value(saved[0], "share"),
                low=doc.Value(saved[1], "share"), high=doc.Value(saved[2], "share"),
            )  # fmt: skip


def _measured(run: Run, frame: pd.DataFrame, found: Sequence[Advice]) -> Iterator[str]:
    """Machine, date, versions, and the axes that all calls share."""
    known = run.shared(run.environments)
    words = [
        *measured_on(run, frame), units.moment(run.info.get("created")),
        f"torch {known['torch']}" if known.get("torch") else None,
        fixed(frame[frame["case_id"].isin([each.case.case_id for each in found])]) or None,
    ]  # fmt: skip
    yield from (str(word) for word in words if word)


def _table(found: Sequence[Advice]) -> Iterator[doc.Part]:
    columns = {
        "call": "call", "best": "best", "time": "time", "memory": "workspace",
        "costs": f"{DEFAULT} costs", "default_memory": f"{DEFAULT}'s", "sure": "how sure",
        "level": "", "case_id": "",
    }  # fmt: skip
    rows: list[Sequence[doc.Cell]] = [
        [
            _name(each, found), doc.Value(str(each.best["impl"]), "impl"),
            _number(each.best, "time_us", "us"),
            _number(each.best, "memory_workspace_bytes", "bytes"),
            _ratio(each.regret),
            doc.Value(None, "bytes") if each.default is None
            else _number(each.default, "memory_workspace_bytes", "bytes"),
            doc.Finding(sign=SIGNS[each.verdict], verdict=_sure(each), subject=_name(each, found)),
            doc.Value(", ".join(each.level)), doc.Value(each.case.case_id),
        ]
        for each in found
    ]  # fmt: skip
    if rows:
        intervals = {"costs": "95 % CI"}
        spare = ("default_memory", "memory")
        yield doc.Table(columns=columns, rows=rows, intervals=intervals, spare=spare)
        yield doc.Text([COSTS], quiet=True)


def _words(found: Sequence[Advice]) -> Iterator[doc.Part]:
    """For what is better than the default, the change in a program."""
    better = [each for each in found if each.verdict in ("switch", "likely", "failed")]
    for impl in dict.fromkeys(str(each.best["impl"]) for each in better):
        words = WORDS.get(base_name(impl))
        where = ", ".join(_name(each, found) for each in better if each.best["impl"] == impl)
        reason = f"in torch {words['torch']}" if words else "call it in place of SDPA"
        shared = any(x.case.kv_heads < x.case.heads for x in better if x.best["impl"] == impl)
        if words and "transformers" in words and not (shared and words.get("unshared")):
            reason += f"; in transformers {words['transformers']}"
        subject = f"{impl} ({where})" if len(found) > 1 else impl
        yield doc.Finding(sign="better", verdict="change", subject=subject, reason=reason)


def _changes(run: Run, found: list[Advice]) -> Iterator[doc.Part]:
    rows: list[Sequence[doc.Cell]] = [
        [_name_of(change.case, found), change.slower, change.faster, _ratio(change.ratio)]
        for change in analysis.changes(run, found)
    ]
    if rows:
        columns = {"call": "call", "slower": "instead of", "faster": f"call {DEFAULT} with",
                   "ratio": "speedup"}  # fmt: skip
        yield doc.Table(columns=columns, rows=rows, grouped=True, intervals={"ratio": "95 % CI"})


def _name_of(case: Case, found: Sequence[Advice]) -> str:
    return next(_name(each, found) for each in found if each.case == case)


def _why(run: Run, found: Sequence[Advice]) -> Iterator[doc.Part]:
    """The backend that SDPA took by itself, with torch's reason, and what refused the call."""
    lines: list[str] = []
    backends = _here(run, [name for name, words in WORDS.items() if words.get("backend")])
    for each in found:
        row = each.default
        if row is not None and not units.is_unknown(row["sdpa_backend"]):
            why = "" if units.is_unknown(row["sdpa_reason"]) else f": {row['sdpa_reason']}"
            lines.append(f"{_name(each, found)}: {DEFAULT} takes {row['sdpa_backend']}{why}")
        none = each.rows[(each.rows["status"] != "ok") & each.rows["impl"].isin(backends)]
        for (impl, reason), _ in none.groupby(["impl", "reason"], sort=False):
            lines.append(f"{_name(each, found)}: {impl}: {reason}")
    yield doc.Text(list(dict.fromkeys(lines))[:20])


def _here(run: Run, names: Iterable[str]) -> list[str]:
    """What has a kernel for the run's device, as far as the run says."""
    device = run.shared(run.environments).get("device")
    infos = run.info.get("implementations") or ()
    known = {each["name"]: each.get("devices") or [device] for each in infos}
    return [name for name in names if device in known.get(name, [device])]


def _tried(run: Run, found: Sequence[Advice]) -> Iterator[doc.Part]:
    columns = {"call": "call", "impl": "impl", "time": "time", "behind": "vs fastest",
               "memory": "workspace", "backend": "backend"}  # fmt: skip
    rows: list[Sequence[doc.Cell]] = [
        [_name(each, found), doc.Value(str(row["impl"]), "impl"),
         doc.Value(row["time_us"], "us", row["time_us_low"], row["time_us_high"]),
         doc.Value(row["behind"], "ratio", row["behind_low"], row["behind_high"]),
         _number(row, "memory_workspace_bytes", "bytes"),
         "" if units.is_unknown(row["sdpa_backend"]) else str(row["sdpa_backend"])]
        for each in found for row in each.rows.to_dict("records")
        if not units.is_unknown(row["time_us"])
    ]  # fmt: skip
    if rows:
        intervals = {"time": "95 % interval", "behind": "95 % CI"}
        yield doc.Table(columns=columns, rows=rows, grouped=True, intervals=intervals,
                        spare=("backend", "memory"), cut="impl")  # fmt: skip
    failed = [
        f"{_name(each, found)}: {row['impl']}: {row['status']}: {row['reason']}"
        for each in found for row in each.rows.to_dict("records")
        if row["status"] != "ok" and row["impl"] in _here(run, [row["impl"]])
    ]  # fmt: skip
    yield doc.Text(failed[:20], quiet=True)


def _declined(run: Run) -> Iterator[doc.Part]:
    """What did not fit into the budget, with the command and the time that it takes."""
    known: dict[str, float] = run.info.get("declined") or {}
    cases = {cell.case.case_id: cell.case for cell in run.cells}
    lines: list[doc.Words] = [
        f"{case_label(cases[case_id])}: {units.seconds(seconds)};"
        f" attnbench {_command(cases[case_id], seconds)}"
        for case_id, seconds in known.items()
        if case_id in cases
    ]
    options = run.info.get("options") or {}
    if names := options.get("not_compiled"):
        lines.append(
            f"{', '.join(names)}: compiling takes some 20 s each; give --budget 3m or more, fewer"
            " --tokens, or name them in --impls"
        )
    if lines:
        yield doc.Text(lines)


def _command(case: Case, seconds: float) -> str:
    """What measures a case alone: `--case` with what differs from the defaults, and a budget."""
    row = case.to_json()
    default = DEFAULTS | {name: row[source] for name, source in FOLLOWS.items()}
    parts = [
        f"{AXES[name].symbol or name}={value:g}" if isinstance(value, float) else
        f"{AXES[name].symbol or name}={value}"
        for name, value in row.items()
        if name in AXES and value != default[name]
    ]  # fmt: skip
    own = [f"workload={case.workload}"] * (case.workload != "attention")
    text = shlex.quote(",".join([*own, *parts]) or f"n={case.seq_len}")
    return f"advise --case {text} --budget {max(10, round(1.5 * seconds))}s"
