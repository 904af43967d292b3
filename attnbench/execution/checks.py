"""The battery run over implementations: which results are right, wrong or unsupported."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from attnbench.base.parameters import base_name
from attnbench.execution.events import Events, Total, Working
from attnbench.execution.policy import Death
from attnbench.execution.process import Settings
from attnbench.execution.runner import LocalRunner
from attnbench.planning.battery import battery, by_coverage, small
from attnbench.planning.plan import Axes, chosen, expand, named
from attnbench.schema.case import Case
from attnbench.schema.check import CHANCE, CheckResult, Failure, Item
from attnbench.schema.messages import CheckItem, ItemChecked
from attnbench.schema.record import Cell

_COMPILED = 24  # checks of what compiles, unless all are asked for


def run_checks(
    *,
    names: tuple[str, ...] | None,
    files: tuple[str, ...],
    device: str,
    dtypes: tuple[str, ...],
    seed: int = 0,
    full: bool = False,
    threads: int | None = None,
    timeout_s: float = 60.0,
    compiling_s: float = 120.0,
    budget_s: float | None = None,
    sweeps: Sequence[Axes] = (),
    failures: Callable[[Sequence[CheckResult]], Sequence[Failure]],
) -> Events[list[CheckResult]]:
    """Check the named implementations; those of the user's files if any, else all, by default.

    Small tensors gain nothing from several threads, which beside other work wait for each other.
    Those that compile, which takes many seconds a case, take the brief items unless `full`, then
    others, the most telling first, until they are 24 or `compiling_s` seconds are over; the rest is
    `left`. With `budget_s` all are checked in that order, and what does not begin within it is
    `left`. Those with parameters are checked with smaller ones, too, in the first dtype. With
    `sweeps` their cases are checked in place of the battery. `failures` sorts what failed by kind:
    the simplest check of each runs once more in a fresh process. Yields the number of checks, then
    what the worker is at, and each result as it comes.

    Raises:
        UsageError: an unknown name or dtype, a file that does not load, a device not there.
    """
    settings = Settings(
        device=device, threads=threads or 1, files=files, seed=seed, timeout_s=timeout_s
    )  # fmt: skip
    with LocalRunner(settings) as runner:
        catalogue = runner.catalogue()
        rows = {info.name: info for info in catalogue.implementations}
        wanted_names = named(chosen(names or (), runner.own), catalogue) or list(rows)
        shrunk = (small(rows[name]) for name in wanted_names if name in rows and not sweeps)
        smaller = named(filter(None, shrunk), catalogue)
        wanted_names = list(dict.fromkeys([*wanted_names, *smaller]))
        rows |= {name: rows[base_name(name)] for name in wanted_names}
        cases: dict[Case, None] = {}  # each once, as often as a list may have it
        for axes in sweeps:
            passes = ("forward",) if axes.workload == "decode" else ("both", "forward")
            axes = axes.having(**{"passes": passes, "dtypes": dtypes} | dict(axes.values))
            cases |= dict.fromkeys(expand(axes, catalogue.device))
        items = [Item(name="as asked", case=case) for case in cases]
        items = items or battery(catalogue.device, dtypes)  # type: ignore[arg-type]
        compiles = [name for name in wanted_names if rows[name].compiles and not full]
        pairs = [
            (item, name)
            for item in items  # in a row: one reference serves them all
            for name in wanted_names
            if item.case.workload in rows[name].workloads
            and (name not in smaller or item.case.dtype == dtypes[0])
        ]
        reasons = runner.reasons(Cell(case=item.case, impl=name) for item, name in pairs)
        yield Total(len(pairs))
        results: dict[int, CheckResult] = {}

        def result(index: int, status: str, reason: str | None, metrics: Any) -> CheckResult:
            item, name = pairs[index]
            results[index] = CheckResult(
                item=item, impl=name, status=status, reason=reason, metrics=metrics
            )
            return results[index]

        def ask(wanted: list[int]) -> Iterator[Working | CheckResult]:
            asked = [CheckItem(pairs[i][0].case, pairs[i][1], pairs[i][0].draw) for i in wanted]
            for event in runner.check(asked):
                if isinstance(event, Working):
                    yield event
                    continue
                (place, _), found = event
                assert isinstance(found, (ItemChecked, Death))
                metrics = {} if isinstance(found, Death) else found.metrics
                yield result(wanted[place], found.status, found.reason, metrics)

        for index, (item, name) in enumerate(pairs):
            if reason := reasons[item.case.case_id, name]:
                yield result(index, "unsupported", reason, {})
        wanted = [index for index in range(len(pairs)) if index not in results]
        end = time.monotonic() + (math.inf if budget_s is None else budget_s)
        alike: dict[int, list[int]] = {}  # of an item where time is short: then it goes by coverage
        for index in wanted:
            if pairs[index][1] not in compiles:
                alike.setdefault(0 if budget_s is None else id(pairs[index][0]), []).append(index)
        groups = list(alike.values())
        for place in by_coverage([pairs[group[0]][0] for group in groups]):
            if time.monotonic() < end:
                yield from ask(groups[place])
            else:
                yield from (result(index, "left", "--budget", {}) for index in groups[place])
        for compiled in compiles:
            own = [index for index in wanted if pairs[index][1] == compiled]
            begin = time.monotonic()
            for turn, place in enumerate(by_coverage([pairs[index][0] for index in own])):
                more = turn < _COMPILED and time.monotonic() - begin < compiling_s
                if time.monotonic() >= end:
                    yield result(own[place], "left", "--budget", {})
                elif pairs[own[place]][0].brief or more:
                    yield from ask([own[place]])
                else:
                    yield result(own[place], "left", "--full", {})
        ordered = [results[index] for index in sorted(results)]
        return _marked(runner, ordered, failures(ordered))


def _marked(
    runner: LocalRunner, results: list[CheckResult], kinds: Sequence[Failure]
) -> list[CheckResult]:
    """The results; those of a kind whose simplest check is right alone say so as `explained`."""
    late: dict[tuple[str, int], CheckResult] = {}
    for kind in kinds:
        first = kind.first
        if first.status not in ("incorrect", "error") or first.code in CHANCE:
            continue
        runner.close()  # the next worker is a fresh process
        asked = CheckItem(first.item.case, first.impl, first.item.draw)
        ends = [event[1] for event in runner.check([asked]) if not isinstance(event, Working)]
        if all(isinstance(end, ItemChecked) and end.status == "ok" for end in ends):
            for result in kind.results:
                fault = result.fault | {"explained": ["earlier-case"]}
                marked = replace(result, metrics=result.metrics | {"fault": fault})
                late[result.impl, id(result.item)] = marked
    return [late.get((result.impl, id(result.item)), result) for result in results]
