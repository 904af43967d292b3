"""What planning and analysis must know of the workloads, without torch: one row a workload.

What a workload computes is a module in `workloads/`; both go by the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from attnbench.base.registry import Registry
from attnbench.schema.axes import AXES
from attnbench.schema.case import DEFAULTS, Case
from attnbench.theory import projections
from attnbench.theory.caches import cache_of, reason_against_cache
from attnbench.theory.law import Law, Term

Unit = Literal["call", "token"]
LawOf = Callable[[Law, Case], Law]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """One workload as planning and analysis see it.

    Which axes it has, they say (`Axis.of`). `unit` is what a time or a FLOP count is of; `causal`
    says that its nature hides the future, so that mask `full` is written `causal`; `heads` whether
    it has heads at all. `time` and `memory` turn the law of a core into that of the workload;
    `work` is a rough number of multiply-adds of a call, for ordering and for the time still to go.
    `own_reason` is why it makes no sense of what it alone has, or None.
    """

    doc: str
    work: Callable[[Case], float]
    unit: Unit = "call"
    passes: tuple[str, ...] = ("forward", "backward", "both")
    causal: bool = False
    heads: bool = True
    n_name: str = "sequence length n"
    time: LawOf = lambda core, case: core
    memory: LawOf = lambda core, case: core
    own_reason: Callable[[Case], str | None] = lambda case: None

    def reason_against(self, case: Case) -> str | None:
        """Why this workload makes no sense of the case, or None."""
        if case.pass_ not in self.passes:
            reason = f"has no {case.pass_} pass (--passes {','.join(self.passes)})"
        elif own := self.own_reason(case):
            reason = own
        elif not self.heads and case.mask.text not in ("full", "causal"):
            reason = f"is causal; mask {case.mask.text} makes no sense (--masks causal)"
        else:
            return None
        return f"{case.workload} {reason}"


def one_query(core: Law) -> Law:
    """The law of a core that has one query instead of n: n²d becomes n d, n w d becomes w d.

    A term in which n counts the keys alone, such as n or n d², stays.
    """
    terms = []
    for term in core.terms:
        powers = dict(term.powers)
        n = powers.get("n", Fraction(0))
        if n >= 2 or (n == 1 and "w" in powers):
            powers["n"] = n - 1
        terms.append(Term.of(powers, dict(term.logs)))
    return replace(core, terms=tuple(dict.fromkeys(terms)))


def _of_step(core: Law, case: Case) -> Law:
    """The law of a core in one step: of one query, or of all; in a ring n is at most w."""
    kind, _ = cache_of(case)
    law = core if kind.all_queries else one_query(core)
    if kind.keeps_window:
        law = replace(law, terms=tuple(dict.fromkeys(term.renamed("n", "w") for term in law.terms)))
    return law


def _decode_time(core: Law, case: Case) -> Law:
    """The law of a step: the projections of all tokens or of the new one beside the core.

    And the keys and values that a cache writes for the core to read.
    """
    kind, _ = cache_of(case)
    law = _of_step(core, case).plus("n d") if kind.moves else _of_step(core, case)
    return law.plus("n d^2" if kind.all_keys else "d^2")


def _decode_memory(core: Law, case: Case) -> Law:
    """The core's workspace beside the keys and values that a step makes, or the new token's."""
    kind, _ = cache_of(case)
    return _of_step(core, case).plus("n d" if kind.all_keys or kind.grows else "d")


def _pairs_work(case: Case) -> float:
    return float(case.batch * case.heads * case.seq_len * case.kv_len * case.head_dim)


def _layer_work(case: Case) -> float:
    per_token = 2 * case.model_width * case.heads * case.head_dim
    return case.layers * (_pairs_work(case) + float(case.batch * case.seq_len * per_token))


def _decode_work(case: Case) -> float:
    """Of all steps: scores and values of the queries that a step has, its projections."""
    kind, _ = cache_of(case)
    queries, tokens = (
        case.seq_len if every else case.query_tokens for every in (kind.all_queries, kind.all_keys)
    )
    per_token = 4 * case.model_width * case.heads * case.head_dim
    step = _pairs_work(case) * queries / case.seq_len + float(case.batch * tokens * per_token)
    return case.layers * case.units * step


def _reason_against_packing(case: Case) -> str | None:
    if case.layout != "packed" or case.seq_len == case.kv_len:
        return None
    return f"packs q, k and v of as many tokens, not {case.seq_len} and {case.kv_len} (--layouts)"


_TRAITS = {
    "attention": Traits(
        doc="q, k, v given: O(n^2 d)", work=_pairs_work, own_reason=_reason_against_packing
    ),
    "layer": Traits(
        doc="x given: projections, attention, output projection: O(n d^2 + n^2 d)",
        work=_layer_work,
        time=lambda core, case: core.plus("n d^2"),
        memory=lambda core, case: core.plus("n d"),
    ),
    "decode": Traits(
        doc="tokens one at a time after a context of n: O(n) a step with a cache",
        work=_decode_work,
        unit="token",
        passes=("forward",),
        causal=True,
        n_name="context n",
        time=_decode_time,
        memory=_decode_memory,
        own_reason=reason_against_cache,
    ),
    "recurrent": Traits(
        doc="x given: a recurrent network of width E, n steps one after another: O(n d^2)",
        work=lambda case: 6.0 * case.batch * case.seq_len * case.model_width**2,
        causal=True,
        heads=False,
    ),
}
TRAITS: Registry[Traits] = Registry("workload", "--workload", _TRAITS)


def impossible(case: Case) -> str | None:
    """Why no implementation could make sense of this combination, or None."""
    reason = TRAITS.get(case.workload).reason_against(case) or _strange_axis(case)
    if reason is None and case.heads % case.kv_heads:
        return (
            f"{case.kv_heads} key/value heads do not divide {case.heads} heads"
            " (--kv-heads must divide --heads)"
        )
    return reason or projections.reason_against(case)


def _strange_axis(case: Case) -> str | None:
    """Why the case makes no sense where it varies an axis that its workload has not, or None."""
    row = case.to_json()
    for name, axis in AXES.items():
        plain = row[axis.follows] if axis.follows else DEFAULTS[name]
        if row[name] != plain and not axis.applies(case.workload):
            return f"{case.workload} has no {name} of its own, but {row[name]} ({axis.flag})"
    return None


def work(case: Case) -> float:
    """Rough number of multiply-adds of a case: for ordering, and for the seconds it takes.

    A backward pass has five products where the forward one has two (Dao, arXiv 2205.14135).
    """
    passes = {"forward": 1.0, "backward": 2.5, "both": 3.5}
    return passes[case.pass_] * TRAITS.get(case.workload).work(case)


def kind_words(case: Case, *, minor: bool = False) -> list[str]:
    """Mask, position encoding, projection and so on, unless they are the plain ones.

    With `minor` also what else two cases may differ in, beside their sizes.
    """
    row, words = case.to_json(), []
    for name, axis in sorted(AXES.items(), key=lambda item: item[1].minor):
        named = not axis.size and name not in ("pass", "dtype") and axis.minor <= minor
        if named and row[name] not in (None, axis.plain):
            words.append(row[name] if axis.kind == "names" else f"{axis.symbol}={row[name]}")
    return words


def size_words(case: Case, without: Collection[str] = ()) -> list[str]:
    """`n=512 B=1 H=4 D=64`: the sizes but those fields, and but E; followers where they differ."""
    row, heads = case.to_json(), TRAITS.get(case.workload).heads
    names = ["seq_len", "kv_len", "batch"]
    names += ["heads", "kv_heads", "head_dim", "value_dim"] if heads else []
    return list(filter(None, (AXES[name].text(row) for name in names if name not in without)))


def case_label(case: Case) -> str:
    """A short text for people: `attention forward n=512 H=4 D=64 float32 causal`."""
    follows = TRAITS.get(case.workload).heads and case.model_width == case.heads * case.head_dim
    parts = [case.workload, case.pass_, *size_words(case), f"E={case.model_width}" * (not follows)]
    return " ".join(filter(None, [*parts, case.dtype, *kind_words(case)]))
