"""Claims read from a file, each with its finding, and what they come to."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec

from attnbench.analysis.axes import AXES
from attnbench.analysis.claims.quantities import Cells, LackingError, Observed, observe
from attnbench.analysis.claims.statement import (
    EXTREMES,
    Claim,
    Comparison,
    Formula,
    Grown,
    Quantity,
    Range,
    Where,
)
from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.scaling.results import Axis
from attnbench.base import files
from attnbench.base.registry import Registry, unknown
from attnbench.base.units import tally
from attnbench.errors import ExitCode, UsageError
from attnbench.execution.store import Run
from attnbench.schema.finding import VERDICTS, WORST_FIRST, Figure, Finding, Verdict
from attnbench.theory.traits import TRAITS

Judged = tuple[tuple[Claim, Finding], ...]


def judged(claims: Registry[Claim], run: Run, only: Iterable[str] | None = None) -> Judged:
    """Hold every claim, or those whose ids are in `only`, against the run.

    Raises:
        UnknownNameError: a name in `only` is no claim's id; the message gives the nearest.
    """
    chosen = [claims.get(name) for name in (claims.names() if only is None else only)]
    cells = Cells(run)
    return tuple((claim, finding(claim, cells)) for claim in chosen)


def finding(claim: Claim, cells: Cells) -> Finding:
    """Hold one claim against a run's cells; inconclusive where they lack."""
    found: tuple[Verdict, str, dict[str, Figure]]
    try:
        found = _verdict_on(claim, observe(claim.quantity, cells))
    except LackingError as lack:
        found = "inconclusive", str(lack), {}
    verdict, reason, figures = found
    return Finding(
        subject=claim.id, question=claim.says, law=claim.right or claim.says,
        verdict=verdict, reason=reason, figures=figures,
    )  # fmt: skip


def _verdict_on(claim: Claim, seen: Observed) -> tuple[Verdict, str, dict[str, Figure]]:
    """The verdict on all observations, with the sharpest of those that it rests on."""
    assert claim.relation is not None, "only what is unmeasured has none"
    verdicts = [claim.relation.verdict(one.low, one.high) for one in seen.observations]
    verdict = min(verdicts, key=WORST_FIRST.index)  # refuted if one is, else holds if one does
    if claim.cells == "alike" and {"holds", "refuted"} <= set(verdicts):
        verdict = "inconclusive"
    judged = list(zip(seen.observations, verdicts, strict=True))
    telling = [one for one, its in judged if its == verdict or verdict not in verdicts]
    one = min(telling, key=lambda one: one.width)
    ends = {"low": one.low, "high": one.high}
    known = {n: e if e is not None and math.isfinite(e) else None for n, e in ends.items()}
    counts = {str(name): verdicts.count(name) for name in VERDICTS}
    reason = f"{seen.what} {one.text(seen.written)} at {one.at}, claimed {claim.relation.text}"
    if len(verdicts) > 1:
        reason += f" (the sharpest of {len(verdicts)}: {tally(verdicts, VERDICTS)})"
    return verdict, reason, {"value": one.value, **known, "at": one.at, **counts}


def agrees(claim: Claim, found: Finding) -> bool:
    """Whether the finding contradicts nothing: an inconclusive one never does."""
    return found.verdict == "inconclusive" or claim.expected in (None, found.verdict)


def exit_code(found: Iterable[tuple[Claim, Finding]]) -> ExitCode:
    """1 if a verdict is not the expected one, 3 if none was reached, else 0."""
    rows = list(found)
    if not all(agrees(claim, of) for claim, of in rows):
        return ExitCode.FINDING
    undecided = all(of.verdict == "inconclusive" for _, of in rows)
    return ExitCode.INCONCLUSIVE if undecided else ExitCode.OK


# Files of claims: TOML, read strictly; what is wrong in one is a line that names the field.

NOTES = Path(__file__).parent / "notes.toml"


def read(file: Path = NOTES) -> Registry[Claim]:
    """Read a file of claims; the notes' without one.

    Raises:
        UsageError: a file that cannot be read, is not TOML, or says what makes no sense.
    """
    try:
        rows = tomllib.loads(files.read(file).decode()).get("claim")
    except OSError as err:
        raise UsageError(f"cannot read {file} (--file): {err.strerror or err}") from err
    except (ValueError, RecursionError) as err:  # of the encoding, or of the syntax
        raise UsageError(f"{file} (--file) is not TOML in UTF-8: {err}") from err
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{file} holds no claims; write each as [[claim]]")
    claims: Registry[Claim] = Registry("claim", "--only")
    for number, row in enumerate(rows, start=1):
        name = row.get("id") if isinstance(row, dict) else None
        where = f"{file}: claim {name if isinstance(name, str) else f'number {number}'}"
        claim = _claim(row, where)
        if claim.id in claims:
            raise UsageError(f"{where}, id: another claim has it already")
        claims.add(claim.id, claim)
    return claims


def _claim(row: Any, where: str) -> Claim:
    try:
        claim = msgspec.convert(row, Claim)
    except msgspec.ValidationError as err:
        what, _, path = str(err).partition(" - at ")
        field = path.strip("`").removeprefix("$").removeprefix(".")
        valid = f"; known: {', '.join(_VALID[field])}" if field in _VALID else ""
        raise UsageError(f"{where}{field and ', '}{field}: {what}{valid}") from err
    for name, value in msgspec.structs.asdict(claim.quantity).items():
        if name in _CHECKS and value is not None:
            try:
                _CHECKS[name](value)
            except UsageError as err:
                raise UsageError(f"{where}, quantity.{name}: {err}") from err
    return claim


def _known(names: Iterable[str], valid: Iterable[str], kind: str) -> None:
    """Refuse a name that is not valid, with the nearest and all that are."""
    choices = list(valid)
    for name in names:
        if name not in choices:
            raise unknown(kind, name, choices)


def _selection(selection: Where) -> None:
    """Columns that there are, and of each a value that it can have."""
    for name, selector in selection.items():
        text = COLUMNS.get(name).kind == "text"
        values = selector if isinstance(selector, list) else [selector]
        if any(isinstance(v, str) != text or (text and isinstance(v, Range)) for v in values):
            needs = "text" if text else "numbers, { min, max }, or of an axis largest or smallest"
            if text or name not in AXES or selector not in EXTREMES:
                raise UsageError(f"column {name} takes {needs}, not {selector!r}")


# The values of the fields that take one of a few; the decoder's message has only the wrong one.
_VALID: dict[str, tuple[str, ...]] = {
    "relation.is": get_args(Comparison),
    "quantity.axis": get_args(Axis),
    "quantity.column": get_args(Grown),
    "quantity.kind": tuple(str(kind.__struct_config__.tag) for kind in get_args(Quantity)),
}
_NUMBERS = [name for name, column in COLUMNS.items() if column.kind != "text"]
_CHECKS: dict[str, Callable[[Any], object]] = {
    "column": lambda name: _known([name], _NUMBERS, "column of numbers"),
    "where": _selection,
    "first": _selection,
    "second": _selection,
    "free": lambda names: _known(names, ("impl", *AXES), "axis"),
    "workload": TRAITS.get,
    "per": Formula,
    "same": Formula,
}
