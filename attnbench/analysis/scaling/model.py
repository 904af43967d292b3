"""Models of several terms: what a call's time is made of, and the verdict on the declared law.

time = overhead + Σ coefficient · term over the terms of the law, by non-negative least squares on
the relative error: 5 % counts the same at 10 µs and at 1 s. Intervals are those of a bootstrap over
the cells (Efron, "Bootstrap methods: another look at the jackknife", 1979).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attnbench.analysis.scaling.decide import Decision
from attnbench.analysis.scaling.exact import least_squares
from attnbench.analysis.scaling.results import (
    Measured,
    Missing,
    ModelFit,
    Uncertain,
    as_figures,
    lacking,
)
from attnbench.analysis.scaling.series import Laws
from attnbench.analysis.scaling.slopes import Floats, drawn_medians, known_time
from attnbench.base import units
from attnbench.schema.axes import AXES
from attnbench.schema.case import Case
from attnbench.schema.finding import Figure, LawFinding, Verdict
from attnbench.theory.law import Law, Term
from attnbench.theory.traits import kind_words

OVERHEAD = "floor"  # the name under which runs know the overhead of a call
DRAWS = 400
VISIBLE = 0.1  # from this part of the law's terms on, theory expects a term to show
ABSENT = 0.02  # a term that should show and certainly takes less is not there
PRESENT = 0.5  # of what the law gives it: the end of a cache may look like less than that
TOLD_APART = 0.02  # of the largest singular value, whose columns are of length 1; noise is as large
MISSED = 0.2  # a model that misses the held-out n by more describes nothing
KNOWN_WELL = 0.1  # a time may be off by so much beyond its scatter
_MOST_OVERHEAD = 0.5  # where the overhead takes more, no other term need show
_ORDER: tuple[Verdict, ...] = ("refuted", "inconclusive", "holds")
Sizes = dict[str, float]  # n, d, w, heads and batch of one cell


def models(cells: list[Measured], laws: Laws) -> tuple[ModelFit, ...]:
    """A model for each implementation and for all cells alike but for n, d, heads and batch.

    Left out are cells without a time, or with one that may be anything; those whose key/value
    length is not their sequence length, which is another problem; and n = 1, where a call reads all
    weights for one row. A model needs a law of two terms, six cells, three n and two d at least.
    """
    found: dict[tuple[Any, ...], list[Measured]] = {}
    for cell in cells:
        case = cell.record.cell.case
        keys_follow = case.kv_len == case.seq_len
        if cell.is_known and keys_follow and case.seq_len > 1:
            # Followers by their ratio to what they follow: the cells of one model share them.
            width = case.width / (case.heads * case.head_dim) if case.width else 1.0
            ratios = case.heads / case.kv_heads, case.value_dim / case.head_dim, width
            found.setdefault((cell.kind, *ratios), []).append(cell)
    made = []
    for alike in found.values():
        first, points = alike[0].record.cell, [_sizes(cell.record.cell.case) for cell in alike]
        law = laws.of(first.impl, "time", first.case)
        distinct = {name: len({point[name] for point in points}) for name in ("n", "d")}
        enough = len({tuple(point.values()) for point in points}) >= 6
        if law and len(law.terms) > 1 and enough and distinct["n"] >= 3 and distinct["d"] >= 2:
            made.append(_model(alike, points, law))
    return tuple(made)


def _sizes(case: Case) -> Sizes:
    """At n below the window w is n; d is the head dim in attention, else the model width."""
    n, before = float(case.seq_len), case.mask.before
    d = case.model_width if AXES["width"].applies(case.workload) else case.head_dim
    w = n if before is None else min(n, before + 1.0)
    return {"n": n, "d": float(d), "w": w, "heads": float(case.heads), "batch": float(case.batch)}


def _model(alike: list[Measured], points: list[Sizes], law: Law) -> ModelFit:
    case, times = alike[0].record.cell.case, [cell.times_us for cell in alike]
    known = [known_time(cell.times_us, cell.allowed_us) for cell in alike]
    middle = np.array([time.value for time in known])
    factors = [[time.shorter for time in known], [time.longer for time in known]]
    off = np.log(np.minimum(factors, 1e6))  # a time may be nothing
    terms = Term(), *(term for term in law.terms if term != Term())
    names, rows = [OVERHEAD, *map(str, terms[1:])], _design(terms, points, case)
    fitted = least_squares(rows, middle)
    many, n = _shares(rows, _draws(rows, times, off)), np.array([point["n"] for point in points])
    held = n == n.max()
    missed = rows[held] @ least_squares(rows[~held], middle[~held]) / middle[held] - 1
    # Shares are reported at the largest n, where most n were measured with all else the same.
    series = [(point["batch"], point["heads"], point["d"]) for point in points]
    at = max(np.flatnonzero(held).tolist(), key=lambda i: (series.count(series[i]), series[i]))
    along = [points[at] | {"n": n, "w": w} for n, w in sorted({(p["n"], p["w"]) for p in points})]
    parts = _shares(_design(terms, along, case), fitted[None])[:, 0]
    at_largest = zip(names, parts[-1].tolist(), *_ends(many[at]).tolist(), strict=True)
    shares = {
        name: Uncertain(value=part, low=min(low, part), high=max(high, part))
        for name, part, low, high in at_largest
    }
    words = [case.workload, case.pass_, case.dtype, *kind_words(case)]
    words += [f"H/G={case.heads / case.kv_heads:g}"] * (case.kv_heads != case.heads)
    words += [f"V/D={case.value_dim / case.head_dim:g}"] * (case.value_dim != case.head_dim)
    held_out = float(np.sqrt((missed**2).mean()))
    found = [*_obstacles(law, held_out, rows / middle[:, None])] or [*_presences(law, points, many)]
    verdict, reason, missing = _judged(found, points, off.sum(axis=0) / 2)
    figures: dict[str, Figure] = {"held_out": held_out}
    for name, share in shares.items():  # as share_n2_d
        figures |= as_figures("share_" + name.replace("^", "").replace(" ", "_"), share)
    impl, same = alike[0].record.cell.impl, " ".join(words)
    return ModelFit(
        impl=impl, workload=case.workload, same=same, points=tuple(points),
        time_us=tuple(known), predicted_us=tuple((rows @ fitted).tolist()),
        at_largest=at, shares=shares, along_n=tuple(point["n"] for point in along),
        shares_along=tuple(dict(zip(names, row, strict=True)) for row in parts.tolist()),
        held_out=held_out, cells=tuple(cell.record.cell for cell in alike), missing=missing,
        crossing=_crossing(terms, points[at]["n"], np.vstack([parts[-1], many[at]])),
        finding=LawFinding(
            subject=f"{impl}, {same}", impl=impl, workload=case.workload, quantity="time",
            question="terms of time", law=str(law), verdict=verdict, reason=reason,
            figures=figures,
        ),
    )  # fmt: skip


def _crossing(terms: Sequence[Term], n: float, shares: Floats) -> Uncertain | None:
    """Where a term of n² overtakes one of n: from the shares at `n`, the fitted ones first."""
    by_power = [
        [
            i
            for i, t in enumerate(terms)
            if not t.logs and t.degree("n") == power and not t.degree("w")
        ]
        for power in (1, 2)
    ]
    if [len(found) for found in by_power] != [1, 1]:
        return None
    linear, square = (shares[:, found[0]] for found in by_power)
    at = np.divide(n * linear, square, out=np.full(len(shares), np.inf), where=square > 0)
    low, high = _ends(at[1:]).tolist()
    return Uncertain(value=float(at[0]), low=min(low, at[0]), high=max(high, at[0]))


def _design(terms: Sequence[Term], points: Sequence[Sizes], case: Case) -> Floats:
    """Each term at each point, m × p: of each batch item, and each head where d is not of all."""
    wide = AXES["width"].applies(case.workload)

    def value(term: Term, point: Sizes) -> float:
        heads = 1.0 if wide and term.degree("d") else point["heads"]
        return point["batch"] * heads * term.value(point) if term != Term() else 1.0

    return np.array([[value(term, point) for term in terms] for point in points])


def _draws(rows: Floats, times: Sequence[tuple[float, ...]], off: Floats) -> Floats:
    """Coefficients, draws × p, of cells drawn again with times that may be off by `off`, 2 × m."""
    count = len(times)
    rng = np.random.default_rng(count)  # the same each time: models differ by their times alone
    shift = rng.random((count, DRAWS)) * off.sum(axis=0)[:, None] - off[0][:, None]
    drawn_us = (drawn_medians(times, DRAWS) * np.exp(shift)).T
    draws = zip(rng.integers(count, size=(DRAWS, count)), drawn_us, strict=True)
    return np.array([least_squares(rows[chosen], us[chosen]) for chosen, us in draws])


def _shares(rows: Floats, coefficients: Floats) -> Floats:
    """Each term's part of the modelled time: m × draws × p, of coefficients draws × p."""
    parts = rows[:, None, :] * coefficients
    return np.asarray(parts / parts.sum(axis=2, keepdims=True))


def _ends(draws: Floats) -> Floats:
    """The ends of the 95 % intervals over the first axis: 2 × the others."""
    return np.asarray(np.quantile(draws, (0.025, 0.975), axis=0, method="nearest"))


def _judged(
    found: list[Decision], points: Sequence[Sizes], known: Floats
) -> tuple[Verdict, str, tuple[Missing, ...]]:
    """The verdict on all that was found, with its reasons and the times that keep it open.

    `known` is by how much each time may be off, as a logarithm.
    """
    verdict = min((verdict for verdict, _ in found), key=_ORDER.index)
    reasons, missing = [reason for own, reason in found if own == verdict], []
    if verdict == "inconclusive":
        badly = np.flatnonzero(known > KNOWN_WELL).tolist()
        missing = [Missing(index=i, known=float(known[i]), needed=KNOWN_WELL) for i in badly]
        reasons += filter(None, [lacking((_place(points[m.index]), m) for m in missing)])
    return verdict, "; ".join(reasons), tuple(missing)


def _obstacles(law: Law, held_out: float, relative: Floats) -> Iterator[Decision]:
    values = np.linalg.svd(relative / np.linalg.norm(relative, axis=0), compute_uv=False)
    if values[-1] < TOLD_APART * values[0]:
        yield "inconclusive", "the sizes measured cannot tell the terms apart"
    if held_out > MISSED:
        missed = f"the model is {units.percent(held_out)} off"
        yield "inconclusive", f"fitted without the largest n, {missed}"
    if law.has_logs:
        yield "inconclusive", "the model has no logarithms"


def _presences(law: Law, points: list[Sizes], shares: Floats) -> Iterator[Decision]:
    terms = [term for term in law.terms if term != Term()]
    by_law = np.array([[term.value(point) for term in terms] for point in points])
    by_law /= by_law.sum(axis=1, keepdims=True)
    small = np.median(shares[:, :, 0], axis=1) <= _MOST_OVERHEAD
    for index, term in enumerate(terms):
        where = np.flatnonzero((by_law[:, index] >= VISIBLE) & small).tolist()
        seen = [points[i] for i in where]
        yield presence(law, term, seen, by_law[where, index], shares[where, :, index + 1])


def presence(law: Law, term: Term, points: list[Sizes], by_law: Floats, draws: Floats) -> Decision:
    """Whether a term is there, by its share in the model (m × draws) where it must show.

    `by_law` is what it has (m) where all coefficients are the same. It holds if it certainly takes
    half of that somewhere; if it certainly takes nothing, an exact law is refuted.
    """
    if not points:
        return "inconclusive", f"at no size measured would {term} show beside the rest"
    low, high = _ends(draws.T)
    at = int(low.argmax()) if low.max() > 0 else int(high.argmax())
    part = f"{units.percent(float(low[at]))} to {units.percent(float(high[at]))}"
    found = f"{term} takes {part} of the time at {_place(points[at])}"
    if high.max() < ABSENT:
        if law.bound:
            return "holds", f"{term} does not show, which O(…) allows"
        return "refuted", f"{found}, where the law makes it {units.percent(float(by_law[at]))}"
    there = bool((low >= PRESENT * by_law).any())
    return ("holds", found) if there else ("inconclusive", f"{found}: it may not be there")


def _place(point: Mapping[str, float]) -> str:
    return f"n = {point['n']:g}, d = {point['d']:g}"
