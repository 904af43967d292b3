"""Which implementations are right, and in sentences how one is wrong, where, and why."""

from __future__ import annotations

import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnbench.base.parameters import base_name
from attnbench.base.units import counted, digits
from attnbench.errors import ExitCode
from attnbench.report import document as doc
from attnbench.schema.check import CheckResult, Failure, Item
from attnbench.schema.record import Cell
from attnbench.theory.traits import case_label

_SENTENCES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Explanations of which it is worth saying which keys a query sees.
_OF_KEYS = ("keys", "one-key", "mask", "always", "top-left", "window", "prefix", "doc", "first-l")
_IN_HEADLINE = ("random", "unwritten", "wrote-input", "shape", "dtype", "device", "not-a-tensor")
_SUMMARY = {
    "impl": "implementation", "verdict": "verdict", "passed": "passed", "failed": "failed",
    "unsupported": "unsupported", "left": "", "error_ratio": "worst error/allowed", "why": "why",
}  # fmt: skip
_EVERY = ("impl", "item", "case_id", "status", "reason", "error_max", "error_rmse", "error_ratio",
          "deterministic", "reuses_output", "hidden_nan")  # fmt: skip


def document(results: Sequence[CheckResult], kinds: Sequence[Failure]) -> doc.Document:
    """All results, and the ways to fail; exits 2 where nothing could be judged."""
    wrong = dict.fromkeys(kind.impl for kind in kinds)
    code = ExitCode.FINDING if kinds else ExitCode.OK
    wrong_definition = any(kind.first.code == "definition" for kind in kinds)
    if wrong_definition or not any(result.failed or result.status == "ok" for result in results):
        code = ExitCode.USAGE
    rows = list(_rows(results, kinds))
    columns = {n: h for n, h in _SUMMARY.items() if n != "why" or any(row[-1] for row in rows)}
    shown = [row[: len(columns)] for row in rows]
    again = [r.impl for r in results if r.metrics.get("reuses_output") == "yes"]
    rounded = [r.impl for r in results if r.metrics.get("deterministic") == "no" and not r.failed]
    each: list[list[doc.Cell]] = [
        [r.impl, r.item.name, r.item.case.case_id, r.status, doc.Value(r.reason),
         *(doc.Value(r.metrics.get(name), "number") for name in _EVERY[5:8]),
         *(doc.Value(r.metrics.get(name)) for name in _EVERY[8:])] for r in results
    ]  # fmt: skip
    right = sum(row[1].sign == "good" for row in rows if isinstance(row[1], doc.Finding))
    return doc.Document(
        kind="check", exit_code=code,
        conclusion=doc.Finding(
            sign="good" if code == ExitCode.OK else "bad" if kinds else "open", subject="check",
            verdict=f"{len(wrong)} wrong, {right} right" if wrong else f"{right} right",
            reason="" if code != ExitCode.USAGE else "a definition is wrong" if wrong_definition
            else "nothing could be judged",
        ),
        sections=[
            *(doc.Section(impl, list(_failures(kinds, impl))) for impl in wrong),
            doc.Section("Implementations", [
                doc.Table(columns=columns, rows=shown, most=999,
                          spare=("unsupported", "error_ratio")),
                doc.Text([f"{impl} returns the same memory at each call; reuses_output=True"
                          " declares that" for impl in dict.fromkeys(again)], quiet=True),
                doc.Text([f"{impl}: two calls on equal inputs differ by rounding (atomic sums?)"
                          for impl in dict.fromkeys(rounded)], quiet=True),
            ]),
            doc.Section("Checks", [doc.Table(columns=dict.fromkeys(_EVERY, ""), rows=each)]),
        ],
    )  # fmt: skip


def _rows(results: Sequence[CheckResult], kinds: Sequence[Failure]) -> Iterator[Sequence[doc.Cell]]:
    """A row for each implementation, with those at other parameters."""
    for impl in dict.fromkeys(base_name(result.impl) for result in results):
        own = [result for result in results if base_name(result.impl) == impl]
        counts = Counter(result.status for result in own)
        failed, passed, left = sum(r.failed for r in own), counts["ok"], counts["left"]
        reasons = Counter(r.reason for r in own if r.reason and not (failed or passed))
        cut = next((r.reason for r in own if r.status == "left"), "")
        why = str(reasons.most_common(1)[0][0]) if reasons else ""
        verdict = doc.Finding(
            sign="bad" if failed else "good" if passed else "none", subject=impl,
            verdict="FAILED" if failed else "not run" if not passed
            else f"right ({passed} of {passed + left}; {cut})" if left else "right",
            reason="; ".join(text for k in kinds if base_name(k.impl) == impl
                             for text in (headline(k), *lines(k))) or why,
            test=("check", impl),
        )  # fmt: skip
        ratios = [r.metrics["error_ratio"] for r in own if r.metrics.get("error_ratio") is not None]
        sums = (doc.Value(x, "count") for x in (passed, failed, counts["unsupported"], left))
        odd = any(k.first.code == "not-finite" for k in kinds if base_name(k.impl) == impl)
        worst = doc.Value("NaN or ∞") if odd else doc.Value(max(ratios, default=None), "number")
        yield doc.Value(impl, "impl"), verdict, *sums, worst, why


def _failures(kinds: Sequence[Failure], impl: str) -> Iterator[doc.Part]:
    for number, kind in enumerate((kind for kind in kinds if kind.impl == impl), start=1):
        low, high = kind.ratios or (None, None)
        fault = kind.first.fault
        known = doc.numbers({
            "explained": kind.explained, "checks": len(kind.results),
            "passed_alike": kind.passed_alike, "pattern": ", ".join(kind.pattern),
            "factors": ", ".join(kind.factors), "ratio_low": low, "ratio_high": high,
            **{name: fault.get(name) for name in ("tensor", "expected", "got", "error", "allowed")},
            **fault.get("at", {}),
        })  # fmt: skip
        yield doc.Finding(
            sign="bad", verdict=kind.first.code, subject=str(number), reason=headline(kind),
            figures={name: of for name, of in known.items() if of.number not in (None, "")},
        )  # fmt: skip
        yield doc.Text(list(lines(kind)))


def of_cell(cell: Cell, fault: Mapping[str, Any]) -> list[str]:
    """The same of an incorrect cell of a sweep: what explains it, and where it is wrong."""
    explained = next(iter(fault.get("explained") or ()), None)
    item = Item(name="", case=cell.case)
    wrong = CheckResult(
        item=item, impl=cell.impl, status="incorrect", reason=None, metrics={"fault": fault}
    )
    factor = fault.get(explained) if explained in ("ratio", "scale-factor") else None
    return list(lines(Failure(
        impl=cell.impl, explained=explained, results=(wrong,), pattern=(), passed_alike=0,
        ratios=(factor, factor) if factor else None,
    )))  # fmt: skip


def headline(failure: Failure) -> str:
    """What is wrong, in how many checks, and what these have in common."""
    figures = failure.first.fault | _figures(failure)
    what = _SENTENCES["wrong"].get(failure.first.code, failure.first.code).format_map(figures)
    count, alike = len(failure.results), failure.passed_alike
    where = f", only {', '.join(failure.pattern)}" if failure.pattern else ""
    passed = f" ({alike}{' such' * bool(failure.pattern)} passed)" if alike else ""
    return f"{what}: {counted(count, 'check')}{where}{passed}"


def lines(failure: Failure) -> Iterator[str]:
    """What explains a kind of failure, and its first check in full."""
    result, fault, code = failure.first, failure.first.fault, failure.first.code
    if failure.explained:
        figures = fault | _figures(failure)
        kind, _, names = failure.explained.partition("-")  # kept-kv: it uses k and v
        if kind not in ("kept", "strides"):
            kind = failure.explained
        figures |= {"names": " and ".join(filter(None, (", ".join(names[:-1]), names[-1:])))}
        yield _SENTENCES["explained"][kind].format_map(figures)
    yield ": ".join(filter(None, (result.item.name, case_label(result.item.case))))
    if code == "kept-result":
        return  # what is there is the first result, or what the harness overwrote that by
    if "at" in fault:
        place = ", ".join(f"{axis} {index}" for axis, index in fault["at"].items())
        shown = _digits(fault["expected"], fault["error"])  # more than 4 where the two are close
        expected, got = (_number(fault[name], shown) for name in ("expected", "got"))
        yield f"{place}: expected {expected}, got {got}; allowed error {_number(fault['allowed'])}"
        if isinstance(fault["error"], float) and fault["error"] <= fault["allowed"]:
            rms, most = (_number(fault[name]) for name in ("rms", "rms_allowed"))
            yield f"in the root mean square it is off by {rms}, where {most} is allowed"
        if "keys" in fault and (failure.explained or "").startswith(_OF_KEYS):
            yield _keys(**fault["keys"])
        if touched := [
            _touched(a, *counts) for a, counts in fault["touched"].items() if counts[1] > 1
        ]:
            yield f"wrong in {', '.join(touched)}"
    elif code in _SENTENCES["wrong"] and code not in _IN_HEADLINE:
        line = f"{Path(fault['file']).name}:{fault['line']}: " if "line" in fault else ""
        yield line + str(result.reason)


def _figures(failure: Failure) -> dict[str, str]:
    """The figures of a kind in words."""
    fault, (low, high) = failure.first.fault, failure.ratios or (1.0, 1.0)
    dtype, times = fault.get("precision", ("", None))
    own = failure.first.item.case.dtype
    numbers = [r.fault[failure.explained] for r in failure.results if failure.explained in r.fault]
    number = "a finite number"
    if numbers and (failure.explained or "").startswith("mask-"):
        middle = round(statistics.median(numbers), 2) + 0.0  # not -0
        number = f"{middle:g}" + " (0 and 1?)" * (abs(middle) == 1)
    same = abs(high - low) <= 0.01 * abs(high)
    return {
        "ratio": digits(low) if same else f"{digits(low)} to {digits(high)}",
        "factors": f", which is {' or '.join(failure.factors)}" if failure.factors else "",
        "remedy": f": if it accumulates in {dtype}, leave {own} out of its dtypes=(…)"
        * (dtype not in ("", own)),
        "dtype": dtype or fault.get("dtype", ""),
        "times": digits(times, 2),
        "number": number,
    }


def _digits(expected: float | str, error: float | str) -> int:
    """How many significant digits show an error."""
    if isinstance(expected, str) or isinstance(error, str) or not expected or not error:
        return 4
    return max(4, 2 + math.ceil(math.log10(abs(expected / error))))


def _number(value: float | str, digits: int = 4) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def _keys(query: int, span: list[int], **which: list[int]) -> str:
    """Which keys the query has lost, or sees without right."""
    ((what, (low, high)),) = which.items()
    keys = f"key {low}" if low == high else f"keys {low} … {high}"
    verb = "also sees" if what == "seen" else "misses"
    return f"query {query} {verb} {keys}; it should see {span[0]} … {span[1]}"


def _touched(axis: str, count: int, total: int, first: int, last: int) -> str:
    plural = "queries" if axis == "query" else "batches" if axis == "batch" else f"{axis}s"
    if count == total:
        return f"all {total} {plural}"
    place = f"{first}" if count == 1 else f"{first} … {last}"
    return f"{count} of {total} {plural} ({place})"
