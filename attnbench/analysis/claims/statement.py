"""A claim as its file states it: what is said where, what is measured, how it should come out."""

from __future__ import annotations

import ast
import math
import operator
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from attnbench.analysis.axes import AXES
from attnbench.analysis.columns import COLUMNS
from attnbench.analysis.scaling.results import Axis
from attnbench.base import files
from attnbench.base.registry import Registry, require
from attnbench.errors import UsageError
from attnbench.schema.case import Case
from attnbench.schema.finding import Verdict

TIME: Literal["time_us"] = "time_us"
EXTREMES = ("largest", "smallest")  # of an axis, among the cells that are left
Grown = Literal["time_us", "flops_counted", "memory_workspace_bytes"]  # has exponents
Comparison = Literal["==", "<", ">", "<=", ">=", "between", "about"]
_ROUNDING = 1e-9  # of a limit: what floating point may leave of an exact equality


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Refuses fields that it does not know."""


class Range(Strict, frozen=True):
    """Numbers from `min` to `max`, both included."""

    min: float = -math.inf
    max: float = math.inf

    def __str__(self) -> str:
        return f"{self.min:g}..{self.max:g}".replace("-inf", "").replace("inf", "")


# A value, several, a range, or one of `EXTREMES`.
Selector = int | float | str | list[int | float | str] | Range
Where = dict[str, Selector]


class Value(Strict, frozen=True, tag_field="kind", tag="value"):
    """`column` of each cell in `where` / the formula `per`: 1 for counts that equal it."""

    column: str
    where: Where
    per: str = "1"


class Ratio(Strict, frozen=True, tag_field="kind", tag="ratio"):
    """`column` of the cell as in `first` / that of the cell as in `second`, both as in `where`.

    The two are equal along all axes that neither `first`, `second` nor `free` names, and in the
    formula `same`. Each side is divided by `per`. Pairs with a side as in `unless` decide nothing.
    """

    first: Where
    second: Where
    where: Where = {}
    unless: Where = {}
    column: str = TIME
    free: list[str] = []
    same: str = "1"
    per: str = "1"


class Exponent(Strict, frozen=True, tag_field="kind", tag="exponent"):
    """The p of column ∝ axis^p along the series that the cells in `where` belong to."""

    where: Where
    column: Grown = TIME
    axis: Axis = "n"


Quantity = Value | Ratio | Exponent


class Relation(Strict, frozen=True):
    """What a quantity should be: `is` a comparison with `limit`, loosened by `tolerance`.

    The tolerance is in the quantity's own unit. `between` takes the limits [low, high].

    Raises ValueError for limits that do not fit it, and for `about` without a tolerance.
    """

    comparison: Comparison = msgspec.field(name="is")
    limit: float | tuple[float, float]
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.limit, tuple) != (self.comparison == "between"):
            raise ValueError("limit is [low, high] for between, one number for all others")
        low, high = self._limits
        if not (-math.inf < low <= high < math.inf and 0 <= self.tolerance < math.inf):
            raise ValueError("limits are finite, the lower first, and a tolerance is not below 0")
        if self.comparison == "about" and not self.tolerance:
            raise ValueError("about needs a tolerance above 0")

    @property
    def _limits(self) -> tuple[float, float]:
        return self.limit if isinstance(self.limit, tuple) else (self.limit, self.limit)

    def verdict(self, low: float | None, high: float | None) -> Verdict:
        """Holds where the relation is true of the whole interval, refuted where of none of it."""
        if low is None or high is None:
            return "inconclusive"
        strict = self.comparison in ("<", ">")  # the limit itself does not satisfy them
        slack = [_ROUNDING * (abs(end) or 1.0) * (-1 if strict else 1) for end in self._limits]
        least = self._limits[0] - self.tolerance - slack[0]
        most = self._limits[1] + self.tolerance + slack[1]
        least = -math.inf if self.comparison in ("<", "<=") else least
        most = math.inf if self.comparison in (">", ">=") else most
        if least <= low and high <= most:
            return "holds"
        return "refuted" if high < least or low > most else "inconclusive"

    @property
    def text(self) -> str:
        """As `> 2`, `between 1 and 5`, `about 2 (± 0.15)`."""
        within = f" (± {self.tolerance:g})" if self.tolerance else ""
        limits = dict.fromkeys(f"{end:g}" for end in self._limits)
        return f"{self.comparison} {' and '.join(limits)}{within}"


class Claim(Strict, frozen=True):
    """One statement of a source, and the relation that a quantity has if it is right.

    `reading` says how it was read where it is ambiguous. One with `right`, which says what is right
    instead, should be refuted; of an `open` one either verdict is expected; all others should hold.
    `note` says what one suggests that is not so. With `cells = "every"` a single cell against it
    refutes it; with `alike`, cells that contradict each other decide nothing.

    Raises ValueError if it is both open and wrong.
    """

    id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9.-]+$")]
    source: str
    place: str
    says: str
    quantity: Quantity
    relation: Relation
    reading: str | None = None
    right: str | None = None
    open: bool = False
    note: str | None = None
    cells: Literal["every", "alike"] = "every"

    def __post_init__(self) -> None:
        if self.open and self.right:
            raise ValueError("what is right instead is known of a wrong claim, not of an open one")

    @property
    def expected(self) -> Verdict | None:
        """The verdict that agrees with theory; None where either does."""
        return None if self.open else "refuted" if self.right else "holds"


# Formulas in the sizes of a case, such as `4*B*H*n*S*D`: parsed once, never executed as code.

# What a formula calls the sizes of a case, `bytes` being those of one element.
SIZES = {axis.symbol: name for name, axis in AXES.items() if axis.kind == "sizes"}
SIZES |= {"E": "model_width", "bytes": "element_bytes"}
_OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


class Formula:
    """A number as a function of a case: names of `SIZES`, numbers, + - * / and parentheses.

    Raises:
        UsageError: the text is something else.
    """

    def __init__(self, text: str) -> None:
        try:
            self._body = ast.parse(text.strip(), mode="eval").body
            nodes = list(ast.walk(self._body))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            nodes = [ast.Pass()]
        for node in nodes:
            if isinstance(node, ast.Name):
                require("size", [node.id], SIZES)
            number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
            if not number and not isinstance(node, (ast.Name, ast.Load, ast.BinOp, *_OPERATORS)):
                raise UsageError(f"{text[:80]!r} is not a formula with + - * / such as 4*B*H*n*S*D")

    def __call__(self, case: Case) -> float:
        """The number; ZeroDivisionError where the formula has none at these sizes."""
        return _value(self._body, case)


def _value(node: Any, case: Case) -> float:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, case), _value(node.right, case))
    if isinstance(node, ast.Name):
        return float(getattr(case, SIZES[node.id]) or 1)  # T is None where nothing is generated
    return float(node.value)


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
    "column": lambda name: require("column of numbers", [name], _NUMBERS),
    "where": _selection,
    "first": _selection,
    "second": _selection,
    "unless": _selection,
    "free": lambda names: require("axis", names, ["impl", *AXES]),
    "per": Formula,
    "same": Formula,
}
