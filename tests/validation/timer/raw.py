"""What a timing tool left behind: raw samples of each cell, and when each of them ended."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Raw:
    """The samples of one cell in one process that count, in their order, in µs per call.

    `ended_s` is when each had been taken: seconds of start-up and of this cell alone, its
    warm-up among them. `own_us` is what the tool itself made of the samples, by name of the
    statistic; `turns_us` are the times of all blocks, turn by turn, where a sample is the fastest
    of several, and the reported time is of the fastest of each `window` of them.
    """

    times_us: tuple[float, ...]
    ended_s: tuple[float, ...]
    own_us: Mapping[str, float] = field(default_factory=dict)
    turns_us: tuple[tuple[float, ...], ...] = ()
    window: int = 1

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read one process's entry in a line of `samples.jsonl`."""
        times = row["times_us"]
        ended = row.get("ended_s") or laid_out(
            [time * row["calls"] / 1e6 for time in times], row["whole_s"], row.get("warm_s")
        )
        dropped = {int(index) for index in row.get("dropped", ())}
        kept = [index for index in range(len(times)) if index not in dropped]
        return cls(
            times_us=tuple(times[index] for index in kept),
            ended_s=tuple(row["startup_s"] + ended[index] for index in kept),
            own_us=row.get("own_us", {}),
            window=row.get("window", 1),
            turns_us=tuple(tuple(row["turns_us"][i]) for i in kept if "turns_us" in row),
        )


def laid_out(
    durations_s: Sequence[float], whole_s: float, warm_s: float | None = None
) -> list[float]:
    """When each sample ended, in seconds, for a tool that gives durations alone.

    They fill the time between `warm_s` and `whole_s` in proportion to their lengths. An unknown
    `warm_s` is what they leave of `whole_s`: they follow each other up to the end.
    """
    total_s = sum(durations_s)
    if total_s <= 0:
        return [whole_s] * len(durations_s)
    begin_s = max(0.0, whole_s - total_s) if warm_s is None else min(warm_s, whole_s)
    scale = (whole_s - begin_s) / total_s
    return [begin_s + scale * reached for reached in itertools.accumulate(durations_s)]


def turns(raw: Raw) -> Sequence[Sequence[float]]:
    """The times of all blocks, turn by turn; a tool without turns has one block in each."""
    return raw.turns_us or [(time_us,) for time_us in raw.times_us]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A tool's result file: when it began and ceased to time (`time.monotonic`), and the cells.

    A cell is a dict of plain JSON with `times_us`, or with `error`. `facts` are about the tool.
    """

    ready_s: float
    end_s: float
    cells: dict[str, dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)


def read_own(path: Path) -> Result:
    """Read what `tests.validation.timer.tools.job` wrote.

    Raises:
        OSError: there is no such file.
        ValueError: it is damaged.
        KeyError: it lacks something.
    """
    row = json.loads(path.read_text())
    return Result(
        ready_s=row.pop("ready_s"), end_s=row.pop("end_s"), cells=row.pop("cells"), facts=row
    )


def read_pytest(path: Path) -> Result:
    """Read pytest-benchmark's JSON; its times are seconds per call, in order of the rounds.

    Raises:
        OSError: there is no such file.
        ValueError: it is damaged, or holds no benchmark.
        KeyError: it lacks something, such as the raw data.
    """
    row = json.loads(path.read_text())
    if not row["benchmarks"]:
        raise ValueError("no benchmark was run")
    extras = [benchmark["extra_info"] for benchmark in row["benchmarks"]]
    return Result(
        ready_s=min(extra["begin_s"] for extra in extras),
        end_s=max(extra["end_s"] for extra in extras),
        cells={
            benchmark["extra_info"]["cell"]: _pytest_cell(benchmark)
            for benchmark in row["benchmarks"]
        },
        facts={"version": row["version"]},
    )


def _pytest_cell(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    stats, extra = benchmark["stats"], benchmark["extra_info"]
    return {
        "times_us": [seconds * 1e6 for seconds in stats["data"]],
        "calls": stats["iterations"],
        "whole_s": extra["end_s"] - extra["begin_s"],
        "own_us": {"min": stats["min"] * 1e6, "median": stats["median"] * 1e6},
    }
