"""Files of claims: TOML, read strictly; whatever is wrong in one is a line that names the field."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec

from attnbench.analysis.axes import AXES
from attnbench.analysis.claims.statement import (
    Claim,
    Formula,
    Quantity,
    Range,
    Relation,
    Strict,
    Where,
)
from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.scaling.model_terms import TERMS
from attnbench.base.registry import Registry, unknown
from attnbench.errors import UsageError

NOTES = Path(__file__).parent / "notes.toml"
EXTREMES = ("largest", "smallest")
PAIRED = ("impl", *AXES)  # what tells two cells apart
_KINDS: dict[str, type[Strict]] = {kind.__struct_config__.tag: kind for kind in get_args(Quantity)}


def read(file: Path = NOTES) -> Registry[Claim]:
    """Read a file of claims; the notes' without one.

    Raises:
        UsageError: a file that cannot be read, is not TOML, or says what makes no sense.
    """
    raw = _toml(file)
    _known(raw, ["claim"], "field", f"{file}: ")
    rows = raw.get("claim")
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


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise UsageError(f"cannot read {file} (--file): {err.strerror or err}") from err
    except (ValueError, RecursionError) as err:  # of the encoding, or of the syntax
        raise UsageError(f"{file} (--file) is not TOML in UTF-8: {err}") from err


def _claim(row: Any, where: str) -> Claim:
    """One claim; names are checked first, so that a typing error gets the nearest."""
    if isinstance(row, dict):
        _known(row, Claim.__struct_encode_fields__, "field", f"{where}, ")
        quantity, relation = row.get("quantity"), row.get("relation")
        if isinstance(quantity, dict) and isinstance(kind := quantity.get("kind"), str):
            _known([kind], _KINDS, "kind", f"{where}, quantity.kind: ")
            fields = ("kind", *_KINDS[kind].__struct_encode_fields__)
            _known(quantity, fields, "field", f"{where}, quantity: ")
        if isinstance(relation, dict):
            _known(relation, Relation.__struct_encode_fields__, "field", f"{where}, relation: ")
    try:
        claim = msgspec.convert(row, Claim)
    except msgspec.ValidationError as err:
        what, _, path = str(err).partition(" - at ")
        raise UsageError(
            f"{where}{path.strip('`').replace('$', '').replace('.', ', ', 1)}: {what}"
        ) from err
    for name, value in msgspec.structs.asdict(claim.quantity).items():
        if name in _CHECKS and value is not None:
            try:
                _CHECKS[name](value)
            except UsageError as err:
                raise UsageError(f"{where}, quantity.{name}: {err}") from err
    return claim


def _known(names: Iterable[str], valid: Iterable[str], kind: str, where: str = "") -> None:
    """Refuse a name that is not valid, with its place, the nearest, and all that are."""
    choices = list(valid)
    for name in names:
        if name not in choices:
            raise UsageError(f"{where}{unknown(kind, name, choices)}")


def _selection(selection: Where) -> None:
    """Columns that there are, and of each a value that it can have."""
    for name, selector in selection.items():
        text = COLUMNS.get(name).kind == "text"
        values = selector if isinstance(selector, list) else [selector]
        if any(isinstance(v, str) != text or (text and isinstance(v, Range)) for v in values):
            needs = "text" if text else "numbers, { min, max }, or of an axis largest or smallest"
            if text or name not in AXES or selector not in EXTREMES:
                raise UsageError(f"column {name} takes {needs}, not {selector!r}")


_NUMBERS = [name for name, column in COLUMNS.items() if column.kind != "text"]
_TERMS = sorted({candidate.name for terms in TERMS.values() for candidate in terms.candidates})
_CHECKS: dict[str, Callable[[Any], object]] = {
    "column": lambda name: _known([name], _NUMBERS, "column of numbers"),
    "where": _selection,
    "first": _selection,
    "second": _selection,
    "free": lambda names: _known(names, PAIRED, "axis"),
    "term": lambda names: _known(names, _TERMS, "term"),
    "workload": lambda name: _known([name], TERMS, "workload"),
    "per": Formula,
    "same": Formula,
}
