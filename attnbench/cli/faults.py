"""Failures of checks in sentences, made of their codes and figures."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnbench.base.units import digits
from attnbench.execution.failures import Failure
from attnbench.theory.traits import case_label

_SENTENCES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Explanations of which it is worth saying which keys a query sees.
_OF_KEYS = ("keys", "one-key", "mask", "always", "top-left", "window", "prefix", "doc", "first-l")


def lines(failure: Failure, number: int) -> Iterator[str]:
    """A kind of failure in lines, its first check in full."""
    result, fault, code = failure.first, failure.first.fault, failure.first.code
    figures = fault | _figures(failure, fault)
    what = _SENTENCES["wrong"].get(code, code).format_map(figures)
    count, alike = len(failure.results), failure.passed_alike
    some = "only" if failure.matching == count else f"{failure.matching} of them"
    where = f", {some} {', '.join(failure.pattern)}" if failure.pattern else ""
    passed = f" ({alike}{' such' * bool(failure.pattern)} passed)" if alike else ""
    texts = [f"{number}. {what}: {count} check{'s' * (count != 1)}{where}{passed}"]
    if failure.explained:
        texts.append(_SENTENCES["explained"][failure.explained].format_map(figures))
    texts.append(f"{result.item.name}: {case_label(result.item.case)}")
    if code == "kept-result":
        pass  # what is there is the first result, or what the harness overwrote that by
    elif "at" in fault:
        place = ", ".join(f"{axis} {index}" for axis, index in fault["at"].items())
        expected, got, allowed = (_number(fault[name]) for name in ("expected", "got", "allowed"))
        texts.append(f"{place}: expected {expected}, got {got}; the error may be {allowed}")
        if isinstance(fault["error"], float) and fault["error"] <= fault["allowed"]:
            rms, most = (_number(fault[name]) for name in ("rms", "rms_allowed"))
            texts.append(f"in the root mean square it is off by {rms}, where {most} is allowed")
        if "keys" in fault and (failure.explained or "").startswith(_OF_KEYS):
            texts.append(_keys(**fault["keys"]))
        if touched := [
            _touched(a, *counts) for a, counts in fault["touched"].items() if counts[1] > 1
        ]:
            texts.append(f"wrong in {', '.join(touched)}")
    elif code not in ("wrote-input", "shape", "dtype", "device", "not-a-tensor", what):
        line = f"{Path(fault['file']).name}:{fault['line']}: " if "line" in fault else ""
        texts.append(line + str(result.reason))
    yield from (texts[0], *(f"   {text}" for text in texts[1:]))


def _figures(failure: Failure, fault: dict[str, Any]) -> dict[str, str]:
    """The figures of a kind in words."""
    low, high = failure.ratios or (1.0, 1.0)
    dtype, times = fault.get("precision", ("", None))
    same = abs(high - low) <= 0.01 * abs(high)
    return {
        "ratio": digits(low) if same else f"{digits(low)} to {digits(high)}",
        "factors": f", which is {' or '.join(failure.factors)}" if failure.factors else "",
        "dtype": dtype or fault.get("dtype", ""),
        "times": digits(times, 2),
    }


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _keys(query: int, span: list[int], **which: list[int]) -> str:
    """Which keys the query has lost, or sees without right."""
    ((what, (low, high)),) = which.items()
    keys = f"key {low}" if low == high else f"keys {low} … {high}"
    verb = "sees" if what == "seen" else "misses"
    return f"query {query} {verb} {keys}; it should see {span[0]} … {span[1]}"


def _touched(axis: str, count: int, total: int, first: int, last: int) -> str:
    plural = "queries" if axis == "query" else "batches" if axis == "batch" else f"{axis}s"
    if count == total:
        return f"all {total} {plural}"
    place = f"{first}" if count == 1 else f"{first} … {last}"
    return f"{count} of {total} {plural} ({place})"
