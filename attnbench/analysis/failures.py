"""Failed checks by kind: what they have in common that those which passed have not.

Everything is inferred from values; `report.documents.check` makes sentences of the codes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from attnbench.schema.axes import AXES
from attnbench.schema.case import Case
from attnbench.schema.check import CHANCE, CheckResult, Failure, Item
from attnbench.theory.caches import cache_of
from attnbench.theory.traits import work

# What a check draws otherwise than others, in words, by the field of `Item.draw`.
_DRAWN = {
    "query_amplitude": "with large scores (q × {:g})", "gradient": "with {} gradients of o",
    "without_gradient": "without a gradient of {}", "strided": "with {} strided alone",
    "score_offset": "with scores about {:g}", "expanded": "with {} expanded over heads",
}  # fmt: skip


def features(item: Item) -> dict[str, bool]:
    """In words what a kernel may do wrong alone; of equally telling ones the first is named."""
    case, kind, heads = item.case, item.case.position.encoding.kind, item.case.heads
    queries, keys, dims, share = case.seq_len, case.kv_len, case.head_dim, heads // case.kv_heads
    decoding, tokens = case.workload == "decode", case.total_len
    drawn = {
        _DRAWN.get(name, f"with {name} {{}}").format(value): bool(value)
        for name, value in item.draw.items()
        if name != "property"
    }
    row, sizes = case.to_json(), {"S": keys, "L": queries, "D": dims, "V": case.value_dim}
    return drawn | {
        "with large scores": "query_amplitude" in item.draw,
        "without some gradients": "without_gradient" in item.draw,
        f"with {case.position.name}": kind != "none",
        "with a position bias": kind == "bias",
        "with rotary positions": kind == "rotary",
        "with a scale of its own": case.scale is not None,
        f"with scale {case.scale}": case.scale is not None,
        "with a soft-cap": case.softcap is not None,
        "with sinks": case.sinks is not None,
        f"with {case.layout} inputs": case.layout != "BHLD",
        "where inputs are not contiguous": any(gaps := _gaps(item)),
        **{f"where {name} is not contiguous": gap for name, gap in zip("qkv", gaps, strict=True)},
        "where the cache holds more than one page": decoding
        and tokens > cache_of(case)[1].get("page", tokens),
        f"with cache {case.cache}": case.cache is not None,
        f"with projection {case.projection}": case.projection is not None,
        case.mask.name: not case.unmasked,
        "unmasked": case.unmasked,
        f"in {case.dtype}": case.workload == "attention",  # the others have the first alone
        "in half precision": case.workload == "attention" and case.element_bytes == 2,
        "with gradients": case.needs_grad,
        "forward": not case.needs_grad,
        "grouped heads": share > 1,
        "H not a power of two": heads.bit_count() > 1,
        "H / G not a power of two": share.bit_count() > 1,
        "one key/value head": case.kv_heads == 1 < heads,
        "L > S": queries > keys,
        "L < S": queries < keys,
        "L != S": queries != keys,
        "L = S": queries == keys,
        "V != D": case.value_dim != dims,
        "batch > 1": case.batch > 1,
        **{f"{name} > 1": row[name] > 1 for name, axis in AXES.items() if axis.plain == 1},
        "not in decoding": not decoding,
        "in decoding": decoding,
        f"in workload {case.workload}": True,
        "one query": queries == 1,
        "several queries": queries > 1,
        **{f"S > {least}": keys > least for least in (64, 128, 256, 512, 1024)},
        **{f"{name} not a multiple of {unit}": size % unit > 0
           for unit in (16, 64) for name, size in sizes.items()},
        "D > 64": dims > 64,
        "D > 128": dims > 128,
    }  # fmt: skip


def _gaps(item: Item) -> list[bool]:
    """Which of q, k and v are not contiguous in memory, from their layout and sizes."""
    case, found = item.case, []
    kept = item.draw.get("strided", "") + item.draw.get("expanded", "")
    for name in "qkv" if case.workload == "attention" else "":
        heads, tokens = (case.heads, case.seq_len) if name == "q" else (case.kv_heads, case.kv_len)
        strided = name in kept and case.batch * heads * tokens > 1
        packed = tokens > 1 or case.batch > 1
        gaps = {"BHLD": strided, "BLHD": heads > 1 and tokens > 1, "packed": packed}
        found.append(gaps[case.layout])
    return found or [False] * 3


def _of_rows(feature: str) -> bool:
    """Whether it tells dtypes, passes or gradients of a problem apart."""
    dtypes = "in half", "in float", "in bfloat"
    return "gradient" in feature or feature == "forward" or feature.startswith(dtypes)


# Factors that kernels forget or apply twice.
_FACTORS: dict[str, Callable[[Case], float]] = {
    "sqrt(D)": lambda case: case.head_dim**0.5,
    "1/sqrt(D)": lambda case: case.head_dim**-0.5,
    "H/G": lambda case: case.heads / case.kv_heads,
    "G/H": lambda case: case.kv_heads / case.heads,
    "sqrt(D/V)": lambda case: (case.head_dim / case.value_dim) ** 0.5,
    "S": lambda case: float(case.kv_len),
    "1/S": lambda case: 1 / case.kv_len,
    "log2(e)": lambda case: math.log2(math.e),
    "ln(2)": lambda case: math.log(2),
    "scale": lambda case: case.softmax_scale,
    "1/scale": lambda case: 1 / case.softmax_scale,
}
_RARE = 100  # ways to fail so often, up to which one feature that tells all of them may be chance
_Kind = tuple[str | None, list[CheckResult]]  # what explains the results, and these


def failures(results: Sequence[CheckResult]) -> list[Failure]:
    """Every kind of failure, by implementation; a failed check is in one, at most.

    Where most failures are random nothing else is said: whatever else fails may be chance.
    """
    found = []
    for impl in dict.fromkeys(result.impl for result in results):
        own = [result for result in results if result.impl == impl]
        passed = [result.item for result in own if result.status == "ok"]
        failed = _agreed([result for result in own if result.failed])
        kinds = sorted(_kinds(failed), key=_order)
        chance = [kind for kind in kinds if kind[1][0].code in CHANCE]
        if 2 * sum(len(results) for _, results in chance) > len(failed):
            kinds = chance
        found += [_failure(impl, explained, kind, passed) for explained, kind in kinds]
    return found


def _problem(item: Item) -> tuple[str, str]:
    """What is computed, whatever the dtype, the pass and the gradients."""
    case = replace(item.case, dtype="float32", pass_="forward")
    return case.case_id, str(sorted(x for x in item.draw.items() if "gradient" not in x[0]))


def _named(off: Sequence[tuple[Case, float]]) -> tuple[str, ...]:
    """What factors that were seen may be, in words."""
    return tuple(
        name
        for name, factor in _FACTORS.items()
        if off and all(math.isclose(factor(case), ratio, rel_tol=0.005) for case, ratio in off)
    )


def _agreed(failed: list[CheckResult]) -> list[CheckResult]:
    """The results with the explanations alone on which an implementation's checks agree.

    A factor on the scores is one if it is the same in all, within 2 %, or what has a name. A check
    that only its dtype's rounding explains, or nothing, has what explains it in a wider dtype.
    """
    wide = sorted(failed, key=lambda result: -result.item.case.element_bytes)
    off = [(r.item.case, r.fault["scale-factor"]) for r in wide if "scale-factor" in r.fault]
    off = [x for x in off if x[0].element_bytes > 2] or off
    least, most = (of((x for _, x in off), default=1.0) for of in (min, max))
    one = most - least <= 0.02 * abs(least) or _named(off)
    explained: dict[Any, Any] = {}

    def codes(result: CheckResult) -> list[str] | None:
        fault = result.fault
        own = [x for x in fault.get("explained") or () if one or x != "scale-factor"]
        of = _problem(result.item), result.code, fault.get("tensor")
        wider = explained.setdefault(of, own or (fault.get("explained") and []))
        return wider if own in ([], ["precision"]) else own

    each = {id(result): codes(result) for result in wide}
    return [
        replace(r, metrics=r.metrics | {"fault": r.fault | {"explained": each[id(r)]}})
        if "explained" in r.fault
        else r
        for r in failed
    ]


_ORDER = {"wrote-input": 0, "kept-result": 0, "not-a-tensor": 1, "shape": 1, "skipped": 3}


def _order(kind: _Kind) -> int:
    """What the others may follow from comes first, and last what was not even tried."""
    explained, (first, *_) = kind
    return 0 if (explained or "").startswith("kept-") else _ORDER.get(first.code, 2)


def _kinds(failed: list[CheckResult]) -> list[_Kind]:
    """Results of one kind together: those that the same explains, or else with the same fault.

    Of several explanations the one that serves most results counts. Where none was looked for, as
    in the workloads around a core, it is the most common one.
    """
    counts = Counter(code for result in failed for code in result.fault.get("explained") or ())
    common = max(counts, key=counts.__getitem__, default=None)
    kinds: dict[Any, _Kind] = {}
    for result in failed:
        fault = result.fault
        codes = fault.get("explained", ())
        explained = common if codes is None else max(codes, key=counts.__getitem__, default=None)
        gradient = str(fault.get("tensor", "")).startswith("d")
        key = explained or (result.code, gradient, fault.get("type"), fault.get("line"))
        kinds.setdefault(key, (explained, []))[1].append(result)
    return list(kinds.values())


def _failure(
    impl: str, explained: str | None, results: list[CheckResult], passed: list[Item]
) -> Failure:
    def simplicity(result: CheckResult) -> tuple[Any, ...]:
        case, fault = result.item.case, result.fault
        return (explained is not None and not fault.get("explained"), "keys" not in fault,
                case.workload != "attention", case.needs_grad, case.seq_len == 1,
                case.seq_len != case.kv_len, work(case))  # fmt: skip

    # The sort is stable: of equally simple ones that of the first dtype stays the first.
    ordered = tuple(sorted(results, key=simplicity))
    failed = [result.item for result in results]
    properties = "property" in failed[0].draw  # of which other cases are tried
    passed = [item for item in passed if ("property" in item.draw) == properties]
    # What the later cases have in common says nothing of what an earlier one left.
    named, alike = ((), 0) if explained == "earlier-case" else pattern(failed, passed)
    figure = explained if explained in ("ratio", "scale-factor") else ""
    off = [(r.item.case, r.fault[figure]) for r in results if figure in r.fault]
    ratios = [ratio for _, ratio in off]
    return Failure(
        impl=impl,
        explained=explained,
        results=ordered,
        pattern=named,
        passed_alike=alike,
        ratios=(min(ratios), max(ratios)) if ratios else None,
        factors=_named(off),
    )


def pattern(failed: Sequence[Item], passed: Sequence[Item]) -> tuple[tuple[str, ...], int]:
    """The one or two features of all failed items that fewest passed ones have; how many have them.

    A single feature is joined by another that picks the same items, if they share no word. Nothing
    is named that more than 5 % of the passed items have, nor what may be chance by Fisher's exact
    test, corrected for the number of features; except what just the failed items have. A problem in
    several dtypes and passes is one, unless the feature is one of these. How inputs lie in memory
    is named before all else, however many passed ones lie so.
    """
    items = [*failed, *passed]
    every = [features(item) for item in items]
    tell = [n for n in every[0] if len({bool(has.get(n)) for has in every}) > 1]
    names = [n for n in tell if all(has.get(n) for has in every[: len(failed)])]
    having = {n: sum(1 << i for i, has in enumerate(every) if has.get(n)) for n in names}
    first = {_problem(item): i for i, item in reversed([*enumerate(items)])}
    rows, problems = (1 << len(items)) - 1, sum(1 << i for i in first.values())
    best, alike, of_memory = tuple[str, ...](), len(passed), False
    for rule in (*combinations(having, 1), *combinations(having, 2)):
        those = having[rule[0]] & having[rule[-1]]
        right = those.bit_count() - len(failed)
        counted = rows if any(map(_of_rows, rule)) else problems
        wrong, picked = ((x & counted).bit_count() for x in ((1 << len(failed)) - 1, those))
        tables = math.comb(counted.bit_count(), wrong)
        chance = math.comb(picked, wrong) * len(tell) ** len(rule) / tables
        telling = chance < 0.05 or (len(rule) == 1 and not right and tables >= _RARE)
        memory = any("contiguous" in name or name.endswith(" inputs") for name in rule)
        few = right < len(passed) if memory else right <= 0.05 * len(passed)
        if few and telling and (not memory, right) < (not of_memory, alike):
            best, alike, of_memory = rule, right, memory
    if len(best) == 1:
        own = set(best[0].split()) - {"with"}
        same = [n for n in having if having[n] == having[best[0]] and not own & set(n.split())]
        best = (" or ".join([*best, *same[:1]]),)
    return best, alike
