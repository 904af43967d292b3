"""What advice tries, in which order, and for how long: the budget goes where the step spends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from attnbench.planning.forecast import Forecast
from attnbench.planning.plan import Axes, Job, expand
from attnbench.schema.axes import AXES
from attnbench.schema.case import parse_position
from attnbench.theory.choices import DEFAULT, choices
from attnbench.theory.traits import work

ROUNDS = 8  # of a race, before anything is decided
TIMING = (0.05, 0.5)  # seconds of samples of a cell, as a forecast has them


def kernels_alone(sweeps: Iterable[Axes]) -> tuple[Axes, ...]:
    """The sweeps without positions that turn q and k first: they cost all kernels the same."""
    found = []
    for axes in sweeps:
        own = axes.values.get("positions", ())
        turned = any(parse_position(text).encoding.kind == "rotary" for text in own)
        found.append(axes.having(positions=None) if turned else axes)
    return tuple(found)


def beside(sweeps: Sequence[Axes]) -> Iterator[Axes]:
    """The default called otherwise, to be held against these calls.

    With q, k and v contiguous where they are strided; and what a slice of the cache saves: a static
    one of twice the tokens, with a mask. A padded batch is packed, and all is tried in that, too.
    """
    for axes in sweeps:
        values = {name: own[0] for name, own in axes.values.items() if len(own) == 1}
        plain = axes.having(impls=(DEFAULT,), count=0, step="")
        if axes.workload != "attention":
            continue
        if values.get("layouts", "BHLD") != "BHLD":
            yield plain.having(layouts="BHLD")
        if values.get("seq_lens") == 1 and "kv_lens" in values and "masks" not in values:
            n = values["kv_lens"]
            yield plain.having(kv_lens=2 * n, masks=f"padding:{n}")
        for case in expand(axes, "cpu"):
            if (packed := case.unpadded) != case:
                row = {n: x for n, x in packed.to_json().items() if x != case.to_json()[n]}
                impls = (axes.impls or choices([packed.mask.text])) if packed.mask.documents else ()
                yield plain.having(
                    impls=dict.fromkeys((*impls, DEFAULT)),
                    **{AXES[name].keyword: x for name, x in row.items()},
                )


def by_share(
    jobs: Iterable[Job], forecast: Forecast, left_s: Callable[[], float], counts: Mapping[str, int]
) -> Iterator[tuple[Job, float]]:
    """Groups as jobs of their own, each with the seconds that it may take.

    First what a step spends most in, by how often each case is called (`counts`, by id, of all
    cases alike where it is empty): the first group that a step calls always begins. What a group
    leaves of its time goes to the others. Groups whose default alone would take longer than
    `left_s()`, or all of it in a second process, come last, with minus the seconds that it would
    take.
    """
    queue = [replace(job, groups=(group,)) for job in jobs for group in job.groups]

    def share(job: Job) -> float:
        return sum(
            counts.get(case.case_id, 0 if counts else 1) * work(case) for case, _ in job.cases
        )

    def least(job: Job) -> float:
        return forecast.seconds(c for c in job.cells() if job.process or c.impl == DEFAULT)

    queue.sort(key=share, reverse=True)
    first = [job for job in queue[:1] if share(job) and not job.process]
    while queue:
        left, least_s = left_s(), [0.0 if [job] == first else least(job) for job in queue]
        fit = [i for i, seconds in enumerate(least_s) if seconds <= left]
        if not fit:
            yield from ((job, -seconds) for job, seconds in zip(queue, least_s, strict=True))
            return
        spare_s = max(0.0, left - sum(least_s[i] for i in fit))
        all_shares = sum(share(queue[i]) for i in fit)
        own = share(queue[fit[0]]) / all_shares if all_shares else 1.0 / len(fit)
        yield queue.pop(fit[0]), least_s[fit[0]] + own * spare_s
