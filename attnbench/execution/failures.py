"""Failed checks by kind: what they have in common that those which passed have not.

Everything is inferred from values; `cli.faults` makes sentences of the codes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.execution.checks import CheckResult
from attnbench.planning.battery import Item
from attnbench.planning.plan import work
from attnbench.schema.case import Case
from attnbench.schema.mask import MASKS

# What a kernel may do wrong in some cases alone; of equally telling ones the first is named.
FEATURES: dict[str, Callable[[Item], bool]] = {
    **{
        name: lambda item, name=name: item.case.mask.name == name and not item.case.unmasked  # type: ignore[misc]
        for name in MASKS.names()
        if name != "full"
    },
    "unmasked": lambda item: item.case.unmasked,
    **{
        dtype: lambda item, dtype=dtype: item.case.dtype == dtype  # type: ignore[misc]
        for dtype in ("float32", "bfloat16", "float16", "float64")
    },
    "half precision": lambda item: item.case.element_bytes == 2,
    "gradients": lambda item: item.case.needs_grad,
    "forward": lambda item: not item.case.needs_grad,
    "grouped heads": lambda item: item.case.kv_heads < item.case.heads,
    "L > S": lambda item: item.case.seq_len > item.case.kv_len,
    "L < S": lambda item: item.case.seq_len < item.case.kv_len,
    "L != S": lambda item: item.case.seq_len != item.case.kv_len,
    "V != D": lambda item: item.case.value_dim != item.case.head_dim,
    "large logits": lambda item: "query_amplitude" in item.draw,
    "strided inputs": lambda item: bool(item.draw.get("strided")),
    "batch > 1": lambda item: item.case.batch > 1,
    "rotary": lambda item: item.case.position.encoding.kind == "rotary",
    "not in decoding": lambda item: item.case.workload != "decode",
    "decode": lambda item: item.case.workload == "decode",
    "layer": lambda item: item.case.workload == "layer",
    "one query": lambda item: item.case.seq_len == 1,
    "several queries": lambda item: item.case.seq_len > 1,
    "S > 256": lambda item: item.case.kv_len > 256,
    "S > 1024": lambda item: item.case.kv_len > 1024,
    "S not a multiple of 16": lambda item: item.case.kv_len % 16 != 0,
    "L not a multiple of 16": lambda item: item.case.seq_len % 16 != 0,
    "D not a multiple of 16": lambda item: item.case.head_dim % 16 != 0,
    "D > 64": lambda item: item.case.head_dim > 64,
}
# Factors that kernels forget or apply twice.
_FACTORS: dict[str, Callable[[Case], float]] = {
    "sqrt(D)": lambda case: case.head_dim**0.5,
    "1/sqrt(D)": lambda case: case.head_dim**-0.5,
    "H/G": lambda case: case.heads / case.kv_heads,
    "G/H": lambda case: case.kv_heads / case.heads,
    "S": lambda case: float(case.kv_len),
    "1/S": lambda case: 1 / case.kv_len,
    "log2(e)": lambda case: math.log2(math.e),
    "ln(2)": lambda case: math.log(2),
}
_Kind = tuple[str | None, list[CheckResult]]  # what explains the results, and these


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One way in which one implementation fails: the simplest check that shows it comes first.

    `explained` is the code of what explains its fault (see `worker.fault`). All have the `pattern`,
    features that together `passed_alike` of the checks that passed have. Where results are off by
    one factor, `ratios` are its least and its largest value, and `factors` what it may be.
    """

    impl: str
    explained: str | None
    results: tuple[CheckResult, ...]
    pattern: tuple[str, ...]
    passed_alike: int
    ratios: tuple[float, float] | None = None
    factors: tuple[str, ...] = ()

    @property
    def first(self) -> CheckResult:
        """The check to be shown in full."""
        return self.results[0]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; of the results the first in full, and the names of all."""
        names = ("impl", "explained", "pattern", "passed_alike", "ratios", "factors")
        return {name: getattr(self, name) for name in names} | {
            "code": self.first.code,
            "count": len(self.results),
            "first": self.first.to_json(),
            "items": [result.item.name for result in self.results],
        }


def failures(results: Sequence[CheckResult]) -> list[Failure]:
    """Every kind of failure, by implementation; a failed check is in exactly one."""
    found = []
    for impl in dict.fromkeys(result.impl for result in results):
        own = [result for result in results if result.impl == impl]
        passed = [result.item for result in own if result.status == "ok"]
        kinds = _kinds([result for result in own if result.failed])
        kinds.sort(key=_order)
        found += [_failure(impl, explained, kind, passed) for explained, kind in kinds]
    return found


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
    shared, alike = pattern([result.item for result in results], passed)
    off = [(r.item.case, r.fault["ratio"]) for r in results if "ratio" in r.fault]
    ratios = [ratio for _, ratio in off]
    factors = [
        name
        for name, factor in _FACTORS.items()
        if off and all(math.isclose(factor(case), ratio, rel_tol=0.02) for case, ratio in off)
    ]
    return Failure(
        impl=impl,
        explained=explained,
        results=ordered,
        pattern=shared,
        passed_alike=alike,
        ratios=(min(ratios), max(ratios)) if ratios else None,
        factors=tuple(factors),
    )


def pattern(failed: Iterable[Item], passed: Iterable[Item]) -> tuple[tuple[str, ...], int]:
    """Features that all failed items have, and how many that passed have them all, too.

    Of the features the one that fewest passed items share is taken first, until no more helps.
    """
    failed, alike = list(failed), list(passed)
    shared = [name for name, has in FEATURES.items() if all(map(has, failed))]
    chosen: list[str] = []
    while alike and shared:
        best = min(shared, key=lambda name: sum(map(FEATURES[name], alike)))
        left = [item for item in alike if FEATURES[best](item)]
        if len(left) == len(alike):
            break
        chosen.append(best)
        alike = left
    return tuple(name for name in FEATURES if name in chosen), len(alike)
