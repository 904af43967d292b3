"""Failures of checks in sentences, made of their codes and figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnbench.base.units import digits
from attnbench.execution.failures import Failure
from attnbench.theory.traits import case_label

_CODES = {
    "wrote-input": "it changes its input {tensor}; what else fails may follow from this",
    "kept-result": "it kept its result: on other inputs in the same tensors it gave {tensor} again",
    "not-a-tensor": "{tensor} is {got}, not a tensor",
    "shape": "{tensor} has shape {got}, expected {expected}",
    "dtype": "{tensor} is {got}, expected {expected}",
    "device": "{tensor} is on {got}, expected {expected}",
    "not-finite": "{tensor} is not finite",
    "wrong": "{tensor} is wrong",
    "property": "this does not hold: {property}",
    "raised": "it raises {type}",
    "timeout": "it hangs",
    "crashed": "it ends its process",
    "oom": "it runs out of memory",
    "skipped": "not tried any further",
}
_EXPLAINED = {
    "one-key-more": "each query sees one key too many, the one after its last: a mask off by one",
    "one-key-less": "each query misses its last key: a mask off by one",
    "mask-ignored": "the mask is not applied",
    "always-causal": "it is causal where no mask is asked for",
    "top-left": "the mask begins at the top left: query i sees keys 0 … i, not 0 … i + S − L",
    "window-wider": "the window is one key too wide",
    "window-narrower": "the window is one key too narrow",
    "window-ignored": "it is causal without the window",
    "prefix-ignored": "it is causal without the prefix",
    "prefix-longer": "the prefix is one key too long",
    "prefix-shorter": "the prefix is one key too short",
    "documents-ignored": "it is causal across the ends of documents",
    "first-length": "every batch item has the length of the first",
    "heads-tiled": "query head h uses key/value head h mod G, not h // (H / G)",
    "first-head": "every query head uses key/value head 0",
    "scale-missing": "the scores are not scaled",
    "scale-1/D": "the scores are scaled by 1/D, not 1/√D",
    "scale-twice": "the scores are scaled twice",
    "scale-sqrt(D)": "the scores are multiplied by √D, not divided by it",
    "scale-log2(e)": "the scores are log2(e) = 1.44 times too large: exp in place of exp2?",
    "scale-ln(2)": "the scores are ln(2) = 0.69 times what they should be: exp2 in place of exp?",
    "kept-q": "it uses the q of an earlier call: kept by address?",
    "kept-k": "it uses the k of an earlier call: kept by address?",
    "kept-v": "it uses the v of an earlier call: kept by address?",
    "kept-kv": "it uses the k and v of an earlier call: kept by address?",
    "kept-qkv": "it uses the q, k and v of an earlier call: kept by address?",
    "rows-without-keys": "it is so for queries that see no key: their output must be 0",
    "heads-after-rows": "it is laid out as (B, L, H, V): transpose axes 1 and 2",
    "heads-and-rows-mixed": "the numbers are right, but (B, L, H, V) was reshaped: transpose it",
    "keys": "some queries see the wrong keys",
    "zero": "it is 0 throughout",
    "ratio": "all is off by one factor: got / expected = {ratio}{factors}",
    "precision": "its error is {times} times that of plain attention in {dtype}",
}


def lines(failure: Failure, number: int) -> Iterator[str]:
    """A kind of failure in lines, its first check in full."""
    result, fault, code = failure.first, failure.first.fault, failure.first.code
    figures = fault | _figures(failure, fault)
    what = _CODES.get(code, code).format_map(figures)
    count, alike = len(failure.results), failure.passed_alike
    where = f", only {', '.join(failure.pattern)}" if failure.pattern else ""
    passed = f" ({alike}{' such' * bool(failure.pattern)} passed)" if alike else ""
    texts = [f"{number}. {what}: {count} check{'s' * (count != 1)}{where}{passed}"]
    if failure.explained:
        texts.append(_EXPLAINED[failure.explained].format_map(figures))
    texts.append(f"{result.item.name}: {case_label(result.item.case)}")
    if code == "kept-result":
        pass  # what is there is the first result, or what the harness overwrote that by
    elif "at" in fault:
        place = ", ".join(f"{axis} {index}" for axis, index in fault["at"].items())
        expected, got, allowed = (_number(fault[name]) for name in ("expected", "got", "allowed"))
        texts.append(f"{place}: expected {expected}, got {got}; the error may be {allowed}")
        if "keys" in fault:
            texts.append(_keys(**fault["keys"]))
        if touched := [
            _touched(a, *counts) for a, counts in fault["touched"].items() if counts[1] > 1
        ]:
            texts.append(f"wrong in {', '.join(touched)}")
    elif code not in ("wrote-input", "shape", "dtype", "device", "not-a-tensor"):
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
