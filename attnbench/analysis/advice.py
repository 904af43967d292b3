"""Which implementation is best for each call of a run, and what the default costs beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from attnbench.analysis.leads import number_of
from attnbench.analysis.pairs import decided
from attnbench.analysis.table import Ratio, time_ratio
from attnbench.base.stats import CLOSE, median
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.store.runs import Run
from attnbench.theory.choices import DEFAULT, as_transformers

LITTLE = 1.02  # not worth a change
CLEAR = 1.2  # above this one process will do; below it another one has to find the same
Steps = Mapping[str, Mapping[str, int]]  # by step: how often it makes each call, by the case's id
# switch: the best is surely faster; likely: it looks so; keep: the default is best, or level;
# open: not known; failed: the default has no time
Verdict = Literal["switch", "likely", "keep", "open", "failed"]
WORST_FIRST: tuple[Verdict, ...] = ("failed", "switch", "likely", "open", "keep")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Of one call: `best` and the `default` as rows of the table, and time of default / of best.

    Where the verdict is to keep it, the default is the best. `level` are others that the best
    cannot be told apart from. `count` is how often the step makes the call.
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
    call that several steps make is listed under the first.
    """
    cells = {record.cell.key: record for record in run.records}
    cut_off = {part.cell.case.case_id for part, _ in interrupted(run)}
    steps: Steps = asked or run.info.get("steps") or {}
    of = [(case_id, (step, n)) for step, calls in steps.items() for case_id, n in calls.items()]
    if not of:
        counts = frame.groupby("case_id", sort=False)["impl"].nunique()
        of = [(str(case_id), ("", 1)) for case_id in counts.index[counts > 1]]
    found = []
    for case_id, (step, count) in dict(reversed(of)).items():
        rows = frame[frame["case_id"] == case_id]
        uneven = rows["unsteady"].fillna("").str.contains("uneven")  # their mean is another matter
        exact = rows["approx_error"].isna() & rows["suspect"].isna() & ~uneven
        timed = rows[rows["time_us"].notna() & exact]
        if case_id in cut_off:
            continue  # who was ahead has no time yet
        if len(timed) > 1 or (len(timed) and DEFAULT not in set(timed["impl"])):
            case = cells[case_id, rows["impl"].iloc[0]].cell.case
            found.append(_one(run, case, step, count, rows, timed))
    return found[::-1]


def _one(
    run: Run, case: Case, step: str, count: int, rows: pd.DataFrame, timed: pd.DataFrame
) -> Advice:
    processes: dict[int, dict[str, Record]] = {}
    for part in run.parts:
        if part.cell.case == case and part.samples:
            processes.setdefault(part.process, {})[part.cell.impl] = part
    merged = {record.cell.impl: record for record in run.records if record.cell.case == case}

    def against(name: str, other: str) -> tuple[Ratio, bool]:
        """The ratio of two, and whether several processes give it: two to five are its interval."""
        both = [of for of in processes.values() if name in of and other in of]
        each = [time_ratio(run, of[name], of[other]) for of in both]
        values, lows, highs = zip(*each, strict=True) if each else ((), (), ())
        if not 1 < len(both) < 6 or None in lows:
            return time_ratio(run, merged[name], merged[other]), len(both) > 5
        return (median(values), min(lows), max(highs)), True

    names = [str(name) for name in timed["impl"]]
    best = names[0]
    for name in names[1:]:  # pairs of pairs need not agree
        if decided(*against(best, name)[0][1:]) > 0:
            best = name
    level = tuple(n for n in names if n != best and decided(*against(n, best)[0][1:]) <= 0)
    by_name = {str(row["impl"]): row for _, row in timed.iterrows()}
    default = by_name.get(DEFAULT)
    regret: Ratio = (None, None, None)
    verdict: Verdict = "failed"
    if best == DEFAULT:
        ends = [high for n in names if n != best and (high := against(best, n)[0][2])]
        regret, verdict = (1.0, 1.0, max(1.0, *ends)) if ends else (1.0, None, None), "keep"
    elif default is not None:
        regret, again = against(DEFAULT, best)
        value, low, high = regret
        assert value is not None
        if value < LITTLE or (high is not None and high < CLOSE):
            verdict, level = "keep", (*(n for n in (best, *level) if n != DEFAULT),)
            best = DEFAULT
        elif low is not None and low > (1.0 if again else CLEAR):
            verdict = "switch"
        else:
            verdict = "likely" if value > CLOSE and low is not None else "open"
    return Advice(
        case=case, step=step, count=count, rows=rows, best=by_name[best], default=default,
        regret=regret, verdict=verdict, level=level,
    )  # fmt: skip


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
    return sum(spent), (ends[0], ends[1], ends[2])


def transformers_choice(advice: Advice, run: Run) -> tuple[str, Ratio]:
    """How transformers calls SDPA for this, and its time / that of the best."""
    name = as_transformers(advice.case)
    cells = {r.cell.impl: r for r in run.records if r.cell.case == advice.case}
    return name, time_ratio(run, cells.get(name), cells.get(str(advice.best["impl"])))


def changes(run: Run, found: Sequence[Advice]) -> Iterator[Change]:
    """What the way of calling the default costs, of what was measured both ways."""
    cells = {record.cell.key: record for record in run.records}
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
            ways.append(("a padded batch", "documents packed", mine, (case.unpadded, DEFAULT)))
        for other in (x for x in cases if x.unpadded == case != x and case.seq_len == 1):
            whole = f"a cache of {other.kv_len} with a mask"
            ways.append((whole, "the cache sliced", (other, DEFAULT), mine))
        for slower, faster, *both in ways:
            above, below = (cells.get((of.case_id, impl)) for of, impl in both)
            known = time_ratio(run, above, below)
            if above is not below and known[0] is not None:
                yield Change(case=case, slower=slower, faster=faster, ratio=known)


def layer_share(run: Run, frame: pd.DataFrame, advice: Advice) -> float | None:
    """Time of the default's call / that of the layer around it, if the run has that."""
    case = advice.case
    same = (frame["impl"] == DEFAULT) & frame["workload"].isin(("layer", "decode"))
    for name in ("device", "dtype", "pass", "batch", "heads", "kv_heads", "head_dim"):
        same &= frame[name] == case.to_json()[name]
    same &= frame["seq_len"] == (case.kv_len if case.seq_len == 1 else case.seq_len)
    if not same.any() or advice.default is None:
        return None
    share, time_us = (number_of(frame[same].iloc[0], name)[0] for name in ("core_share", "time_us"))
    return share or (time_us and min(1.0, float(advice.default["time_us"]) / time_us))
