"""How the times of two cells compare: ratios of samples that were taken in the same round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from attnbench.analysis.times import Interval, interval_us, time_us
from attnbench.base import stats
from attnbench.base.sample import Sample
from attnbench.schema.record import Record

Round = tuple[str, int, int]  # group, process and number


@dataclass(frozen=True)
class CellTimes:
    """What a ratio needs of one record, computed once where it is compared with many.

    `time_us` and `interval_us` are the reported ones; `rounds_us` has the samples that count.
    """

    time_us: float
    interval_us: Interval | None
    rounds_us: Mapping[Round, float]


def cell_times(record: Record) -> CellTimes:
    """What a ratio needs of a record, which must have samples."""
    reported_us = time_us(record)
    assert reported_us is not None, "what has samples has a time"
    rounds_us = {place: sample.own_us for place, sample in samples_by_round(record).items()}
    return CellTimes(reported_us, interval_us(record), rounds_us)


def samples_by_round(record: Record) -> dict[Round, Sample]:
    """The samples that count.

    Records without a group, of old runs, were interleaved with those of the same case and process.
    """
    processes = sorted({sample.process for sample in record.samples})
    groups = str(record.metrics.get("group") or "").split()  # one for each process
    if len(groups) != len(processes):
        groups = [record.cell.case.case_id] * len(processes)
    of = dict(zip(processes, groups, strict=True))
    return {(of[s.process], s.process, s.round): s for s in record.kept}


def core_times(record: Record) -> CellTimes | None:
    """As `cell_times`, of the attention alone in a layer; None where it was not timed."""
    return _with_times(record, lambda s: s.core_us)


def step_times(record: Record) -> CellTimes | None:
    """As `cell_times`, of a layer with its MLP and its part of the head; None without an MLP."""
    share = record.cell.case.layers / record.metrics.get("model_layers", 1)
    no_head = all(s.head_us is None for s in record.kept)

    def step_us(s: Sample) -> float | None:
        if s.mlp_us is None or (s.head_us is None and not no_head):
            return None
        return float(s.own_us + s.mlp_us + share * (s.head_us or 0.0))

    return _with_times(record, step_us)


def _with_times(record: Record, time_us: Callable[[Sample], float | None]) -> CellTimes | None:
    found = ((s, time_us(s)) for s in record.kept)
    timed = [structs.replace(s, time_us=us, cpu_us=None) for s, us in found if us]
    return cell_times(replace(record, samples=(*timed,))) if timed else None


def ratio(above: Record, below: Record) -> tuple[float, Interval | None]:
    """Time of `above` / that of `below`, with an interval of at least 95 %, or None.

    The median over the rounds in which both have a sample that counts, of the quotient of the two
    (`Sample.own_us`): what slowed the machine for a while slowed both, and what hit one of them
    alone widens the interval, which is one of order statistics.

    Such an interval knows one process. Another one of the same code has other addresses and pages,
    and differs by a few percent: so it is widened by `PROCESS_MARGIN` at either end (docs/method.md
    gives the evidence). Over several processes nothing is added: the ratio is the median of the
    ratios within each, and the interval is one over them (`processes_interval`).

    Two cells are level where the interval holds 1 (`decided`), and nothing is known where there is
    none. With fewer than six rounds in common, as between runs of their own, it is the quotient of
    the reported times, with that of their intervals.
    """
    return ratio_of(cell_times(above), cell_times(below))


def ratio_of(above: CellTimes, below: CellTimes) -> tuple[float, Interval | None]:
    """As `ratio`, of what was computed once for each."""
    return paired(above, below) or unpaired(above, below)


def unpaired(above: CellTimes, below: CellTimes) -> tuple[float, Interval | None]:
    """The quotient of the reported times, with that of their intervals."""
    interval = stats.quotient_interval(above.interval_us, below.interval_us)
    return above.time_us / below.time_us, interval


def paired(above: CellTimes, below: CellTimes) -> tuple[float, Interval | None] | None:
    """As `ratio`, from the rounds in common; None where they are too few."""
    processes: dict[int, list[float]] = {}
    for place, first_us in above.rounds_us.items():
        if (second_us := below.rounds_us.get(place)) is not None:
            processes.setdefault(place[1], []).append(first_us / second_us)
    medians = [stats.median(found) for found in processes.values()]
    if len(medians) > 1:
        return stats.median(medians), stats.processes_interval(medians)
    margin = stats.PROCESS_MARGIN
    for found in processes.values():
        if within := stats.median_interval(found):
            return stats.median(found), (within[0] / margin, within[1] * margin)
    return None


def decided(low: float | None, high: float | None) -> int:
    """1 where an interval lies above 1, -1 below it, 0 where it holds 1 or is not known."""
    if low is None or high is None:
        return 0
    return 1 if low > 1 else -1 if high < 1 else 0
