"""Formulas in the sizes of a case, such as `4*B*H*n*S*D`: parsed once, never executed as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from attnbench.base.registry import unknown
from attnbench.errors import UsageError
from attnbench.schema.case import Case

# What a formula calls the sizes of a case, `bytes` being those of one element.
SIZES = {
    "B": "batch", "H": "heads", "G": "kv_heads", "n": "seq_len", "S": "kv_len", "D": "head_dim",
    "V": "value_dim", "E": "model_width", "T": "new_tokens", "bytes": "element_bytes",
}  # fmt: skip
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
            if isinstance(node, ast.Name) and node.id not in SIZES:
                raise unknown("size", node.id, list(SIZES))
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
