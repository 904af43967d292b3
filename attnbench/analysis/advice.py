"""Which implementation is best for each call of a run, and what the default costs beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pandas as pd

from attnbench.analysis.pairs import cell_times, core_times, decided, ratio_of, step_times
from attnbench.analysis.table import Ratio, load, time_ratio
from attnbench.analysis.times import time_us
from attnbench.base.stats import CLOSE, median
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.store.runs import Run
from attnbench.theory.choices import DEFAULT, as_transformers

LITTLE = 1.02  # not worth a change
CLEAR = 1.2  # a gain that is worth a longer look, where it cannot be excluded
Steps = Mapping[str, Mapping[str, int]]  # by step: how often it makes each call, by the case's id
# switch: a process in which nothing was picked found the best faster; likely: so did the one that
# picked it; keep: nothing gains much; open: something may; failed: the default has no time
Verdict = Literal["switch", "likely", "keep", "open", "failed"]
WORST_FIRST: tuple[Verdict, ...] = ("failed", "switch", "likely", "open", "keep")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Of one call: `best` and the `default` as rows of the table, and time of default / of best.

    Where the verdict is to keep it, the default is the best. `level` are others that the best
    cannot be told apart from, `uneven` those with a shorter time that is not advised, `untried` is
    how many there was no time for. `count` is how often the step makes the call. `ratios` are the
    default's time / that of each other: there is one for each, whatever shows it.
    """

    case: Case
    step: str
    count: int
    rows: pd.DataFrame
    best: pd.Series[Any]
    default: pd.Series[Any] | None
    regret: Ratio
    verdict: Verdict
    level: tuple[str, ...] = ()
    uneven: tuple[str, ...] = ()
    untried: int = 0
    ratios: Mapping[str, Ratio] = field(default_factory=dict)

    @property
    def sure(self) -> bool:
        """Whether the verdict rests on an interval."""
        high = self.regret[2]
        return self.verdict == "switch" or (
            self.verdict == "keep" and high is not None and high < CLOSE
        )

    @property
    def pick(self) -> pd.Series[Any]:
        """The row of what to use."""
        keep = self.verdict in ("keep", "open") and self.default is not None
        return self.default if keep else self.best  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A call of the default made otherwise: time of the `slower` / of the `faster`."""

    case: Case
    slower: str
    faster: str
    ratio: Ratio


def advices(run: Run, frame: pd.DataFrame, asked: Steps | None = None) -> list[Advice]:
    """One for each call that a step makes, else for each case of a core with two implementations.

    `frame` is that of `table.load` with the default as the baseline; `asked` are steps in place of
    the run's. Only what computes exact attention is advised, and nothing whose time is suspect. A
    call that several steps make is listed once, by the first word of the first.
    """
    cells = {record.cell.key: record for record in run.records}
    cut_off = {part.cell.case.case_id for part, _ in interrupted(run)}
    steps: Steps = asked or run.info.get("steps") or {}
    of = [(case_id, (step, n)) for step, calls in steps.items() for case_id, n in calls.items()]
    if not of:
        counts = frame.groupby("case_id", sort=False)["impl"].nunique()
        of = [(str(case_id), ("", 1)) for case_id in counts.index[counts > 1]]
    found, making = list[Advice](), Counter(case_id for case_id, _ in of)
    for case_id, (step, count) in dict(reversed(of)).items():
        step = step if making[case_id] == 1 else step.partition(" ")[0]
        rows = frame[frame["case_id"] == case_id]
        # What a program's calls take on average is another matter.
        uneven = rows["unsteady"].fillna("").str.contains("uneven|keeps-results")
        exact = rows["approx_error"].isna() & rows["suspect"].isna() & ~uneven
        timed = rows[rows["time_us"].notna() & exact]
        if case_id in cut_off:
            continue  # who was ahead has no time yet
        dropped = [cells[case_id, impl].metrics.get("dropped") for impl in rows["impl"]]
        if len(timed) > 1 or (len(timed) and (any(dropped) or DEFAULT not in set(timed["impl"]))):
            case = cells[case_id, rows["impl"].iloc[0]].cell.case
            advice = _one(run, case, step, count, rows, timed)
            if advice.verdict == "keep" and len(timed) == 1 and "budget" in dropped:
                advice = replace(advice, verdict="open", regret=(1.0, None, None))
            faster = rows[uneven & (rows["time_us"] < float(advice.pick["time_us"]))]["impl"]
            more: Any = {"uneven": tuple(map(str, faster)), "untried": dropped.count("budget")}
            found.append(replace(advice, **more))
    return found[::-1]


def picks(run: Run) -> list[tuple[Case, str]]:
    """Each case of a run with the name of what is advised for it."""
    found = advices(run, load(run, DEFAULT))
    return [(advice.case, str(advice.pick["impl"])) for advice in found]


def _one(
    run: Run, case: Case, step: str, count: int, rows: pd.DataFrame, timed: pd.DataFrame
) -> Advice:
    """The best by the first process, and its ratio by the later ones, in which nothing was picked.

    A ratio of the process that picked the best of many is too high.
    """
    processes: dict[int, dict[str, Record]] = {}
    for part in run.parts:
        if part.samples and part.cell.case == case:
            processes.setdefault(part.process, {})[part.cell.impl] = part
    first, *later = (processes[number] for number in sorted(processes))
    ratios = {
        name: time_ratio(run, first.get(DEFAULT), first.get(name)) for name in {*first} - {DEFAULT}
    }

    def slower(name: str, other: str) -> bool:
        return decided(*time_ratio(run, first.get(name), first.get(other))[1:]) > 0

    candidates = {*first} & set(timed["impl"])
    names = sorted(candidates, key=lambda name: time_us(first[name]) or math.inf)
    best = names[0]
    for name in names[1:]:  # pairs of pairs need not agree
        if slower(best, name):
            best = name
    level = tuple(name for name in names if name != best and not slower(name, best))
    by_name = {str(row["impl"]): row for _, row in timed.iterrows()}
    regret: Ratio = (None, None, None)
    verdict: Verdict = "failed"
    if DEFAULT in names:
        other = next((name for name in (best, *names) if name != DEFAULT), None)
        again = [each for each in later if {DEFAULT, other} <= each.keys()]
        regret, verdict = _judged(run, other, again or [first], confirmed=bool(again))
        ratios |= {other: regret} if other else {}
        if verdict == "keep":
            level = tuple(name for name in (best, *level) if name != DEFAULT)
            best, regret = DEFAULT, (1.0, 1.0, max(1.0, regret[2] or 1.0))
        elif best == DEFAULT and other:  # which may be faster
            best, level = other, tuple(name for name in level if name != other)
    return Advice(
        case=case, step=step, count=count, rows=rows, best=by_name[best],
        default=by_name.get(DEFAULT), regret=regret, verdict=verdict, level=level, ratios=ratios,
    )  # fmt: skip


def _judged(
    run: Run, other: str | None, processes: Sequence[Mapping[str, Record]], *, confirmed: bool
) -> tuple[Ratio, Verdict]:
    """The default's time / that of the best other, over these processes; and what follows."""
    if other is None:
        return (1.0, 1.0, 1.0), "keep"
    ratios = [time_ratio(run, of[DEFAULT], of[other]) for of in processes]
    value, low, high = envelope(ratios)
    assert value is not None
    if low is None or high is None:  # few slow calls; all of them may agree
        mine, theirs = (cell_times(processes[0][name]).rounds_us for name in (DEFAULT, other))
        least = min(
            [us / theirs[place] for place, us in mine.items() if place in theirs], default=0
        )
        return (value, None, None), "likely" if least > CLEAR else "open"
    if low > 1 and value > LITTLE:
        return (value, low, high), "switch" if confirmed else "likely"
    return (value, low, high), "keep" if high <= CLEAR else "open"


def interrupted(run: Run) -> Iterator[tuple[Record, str]]:
    """Of races that were cut off: who lost, in one process, and who was ahead without a record."""
    cells = {record.cell.key for record in run.records}
    for part in run.parts:
        ahead = part.metrics.get("lost_to")
        if ahead and (part.cell.case.case_id, ahead) not in cells:
            yield part, ahead


def of_step(found: Sequence[Advice], calls: Mapping[str, int]) -> tuple[float, Ratio]:
    """What a step spends with the default in µs, and that / what it spends with each pick.

    `calls` are how often it makes each call, by the case's id.
    """
    own = [each for each in found if each.case.case_id in calls]
    if len(own) < len(calls) or any(each.default is None or not each.regret[0] for each in own):
        return 0.0, (None, None, None)
    spent = [calls[x.case.case_id] * float(x.default["time_us"]) for x in own]  # type: ignore[index]
    change = [each.verdict in ("switch", "likely") for each in own]
    ends = []
    for end in range(3):
        ratios = [
            (each.regret[end] or each.regret[0] or 1.0) if changes else 1.0
            for each, changes in zip(own, change, strict=True)
        ]
        ends.append(sum(spent) / sum(us / x for us, x in zip(spent, ratios, strict=True)))
    known = all(each.regret[1] for each, changes in zip(own, change, strict=True) if changes)
    return sum(spent), (ends[0], ends[1] if known else None, ends[2] if known else None)


def transformers_choice(advice: Advice, run: Run) -> tuple[str, Ratio]:
    """How transformers calls SDPA for this, and its time / that of the best."""
    name = as_transformers(advice.case)
    cells = {r.cell.impl: r for r in run.records if r.cell.case == advice.case}
    called = cells[name].metrics.get("same_as", name) if name in cells else name
    if advice.best["impl"] == DEFAULT and called in advice.ratios:
        return name, inverse(advice.ratios[called])
    return name, time_ratio(run, cells.get(str(called)), cells.get(str(advice.best["impl"])))


def inverse(ratio: Ratio) -> Ratio:
    """The ratio the other way round."""
    value, low, high = (end and 1 / end for end in ratio)
    return value, high, low


def changes(run: Run, found: Sequence[Advice]) -> Iterator[Change]:
    """What the way of calling the default costs, of what was measured both ways."""
    cells = {record.cell.key: record for record in run.records}
    of_call = {(x.case, name): ratio for x in found for name, ratio in x.ratios.items()}
    cases = dict.fromkeys(record.cell.case for record in run.records)
    for case in (advice.case for advice in found):
        mine = case, DEFAULT
        ways = [("keys expanded to every head", "enable_gqa=True", (case, "sdpa-expanded"), mine)]
        if case.unmasked or (case.mask.text == "causal" and case.seq_len == case.kv_len):
            plain = "no mask" if case.unmasked else "is_causal=True"
            ways.append(("a dense attn_mask", plain, (case, "sdpa-mask"), mine))
        if case.layout != "BHLD":
            contiguous = replace(case, layout="BHLD"), DEFAULT
            strided = f"q, k, v in {case.layout}"
            ways.append((strided, "q, k, v contiguous in BHLD", mine, contiguous))
        if case.seq_len > 1:
            dense = "packed, behind a dense mask"
            ways.append(("a padded batch", dense, mine, (case.unpadded, DEFAULT)))
        for other in (x for x in cases if x.unpadded == case != x and case.seq_len == 1):
            whole = f"a cache of {other.kv_len} with a mask"
            ways.append((whole, "the cache sliced", (other, DEFAULT), mine))
        for slower, faster, *both in ways:
            above, below = (cells.get((of.case_id, impl)) for of, impl in both)
            known = time_ratio(run, above, below)
            if both[1] == mine and both[0] in of_call:
                known = inverse(of_call[both[0]])
            if above is not below and known[0] is not None:
                yield Change(case=case, slower=slower, faster=faster, ratio=known)


def packed(run: Run, frame: pd.DataFrame, padded: Advice) -> Iterator[Change]:
    """A padded batch with what is advised for it, its tokens packed with what is for these."""
    cells, case = {record.cell.key: record for record in run.records}, padded.case.unpadded
    if case != padded.case and case.mask.documents:
        for other in advices(run, frame, {"": {case.case_id: 1}}):
            keys = [(each.case.case_id, str(each.pick["impl"])) for each in (padded, other)]
            ratio = time_ratio(run, *map(cells.get, keys))
            if ratio[0] is not None:
                yield Change(case=case, slower=keys[0][1], faster=keys[1][1], ratio=ratio)


def shares(run: Run, call: Case) -> tuple[Ratio, dict[str, float], str] | None:
    """What the default's call takes of the step, in every process; µs of parts; what is left out.

    None if the run has no layer around it, or no MLP of it.
    """
    found, parts_us, note = list[Ratio](), dict[str, float](), ""
    for part in (p for p in run.parts if p.samples and p.cell.impl == DEFAULT):
        core, step, metrics = core_times(part), step_times(part), part.metrics
        if around(part.cell.case, call) and core and step:
            value, interval = ratio_of(core, step)
            found.append((value, *(interval or (None, None))))
            head_us = metrics.get("head_us", 0.0) * part.cell.case.layers / metrics["model_layers"]
            rest_us = max(0.0, cell_times(part).time_us - core.time_us)
            parts_us = {"attention": core.time_us, "projections": rest_us}
            parts_us |= {"MLP": metrics["mlp_us"], "head": head_us}
            note = metrics.get("model_note") or ""
    return (envelope(found), parts_us, note) if found else None


def envelope(ratios: Sequence[Ratio]) -> Ratio:
    """The median, and an interval that holds all of theirs; without one where they lack one."""
    value, ends = median([ratio[0] or 0.0 for ratio in ratios]), [x for r in ratios for x in r[1:]]
    known = [end for end in ends if end is not None]
    return (value, min(known), max(known)) if len(known) == len(ends) else (value, None, None)


def around(layer: Case, call: Case) -> bool:
    """Whether the attention of the layer, or of the decode step, is this call."""
    names = ("device", "dtype", "pass_", "batch", "heads", "kv_heads", "head_dim")
    keys = call.kv_len if call.seq_len == 1 else call.seq_len
    return (
        layer.workload in ("layer", "decode")
        and all(getattr(layer, name) == getattr(call, name) for name in names)
        and (layer.seq_len == keys or layer.mask.text == f"window:{keys}")
        and (call.seq_len == 1 or layer.mask == call.mask)
    )
