"""Laws: how time, FLOPs or memory should grow, as text that is parsed, printed and checked.

A law is a sum of terms in `n` (sequence length; for decode the context), `d` (head dim; the model
width in a layer) and `w` (window): `n^2 d`, `n d^2 + n^2 d`, `n w d`, `n log n`, `1`. It is exact
unless written `O(…)`. Batch and heads are factors of every term and are not written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

from attnbench.errors import UsageError

VARIABLES = ("n", "d", "w")
MOST_POWER = 9  # beyond it, values at real sizes are no floating point numbers any more
_EXAMPLES = "such as 'n^2 d', 'n d^2 + n^2 d', 'n w d', 'n log n', '1' or 'O(n)'"
_FACTOR = re.compile(r"(?:(1)|(log\s*)?([a-z]+)(?:\^(\d+(?:\.\d+|/[1-9]\d*)?))?)(?=[\s*]|$)[\s*]*")


@dataclass(frozen=True)
class Term:
    """A product of powers: `powers` of the variables, and of their logarithms, none of them 0."""

    powers: tuple[tuple[str, Fraction], ...] = ()
    logs: tuple[tuple[str, Fraction], ...] = ()

    @classmethod
    def of(cls, powers: Mapping[str, Fraction | int], logs: Mapping[str, Fraction | int]) -> Self:
        """The term with these powers, in the order of `VARIABLES`."""
        return cls(_ordered(powers), _ordered(logs))

    def degree(self, variable: str) -> Fraction:
        """The power of the variable; 0 where it does not occur."""
        return dict(self.powers).get(variable, Fraction(0))

    def renamed(self, variable: str, other: str) -> Term:
        """The term with one variable in the place of another."""
        found = dict[str, Fraction](), dict[str, Fraction]()
        for own, factors in zip(found, (self.powers, self.logs), strict=True):
            for name, power in factors:
                name = other if name == variable else name
                own[name] = own.get(name, Fraction(0)) + power
        return Term.of(*found)

    def value(self, sizes: Mapping[str, float]) -> float:
        """The term at these sizes, one for each variable that occurs."""
        factors = [math.pow(sizes[name], float(power)) for name, power in self.powers]
        factors += [math.pow(math.log(sizes[name]), float(power)) for name, power in self.logs]
        return math.prod(factors)

    def __str__(self) -> str:
        factors = [_power(name, power) for name, power in self.powers]
        factors += [_power(f"log {name}", power) for name, power in self.logs]
        return " ".join(factors) or "1"


@dataclass(frozen=True)
class Law:
    """A sum of terms; `bound` says that it was written `O(…)`: an upper bound."""

    terms: tuple[Term, ...]
    bound: bool = False

    def degree(self, variable: str) -> Fraction:
        """The largest power of the variable among the terms: the exponent as it grows alone."""
        return max(term.degree(variable) for term in self.terms)

    @property
    def has_logs(self) -> bool:
        """True where a term holds a logarithm, which no exponent can show."""
        return any(term.logs for term in self.terms)

    def along(self, variable: str) -> Law:
        """What is left where only `variable` varies: `n d^2 + n^2 d` along n is `n + n^2`."""
        kept = [
            Term.of(*({variable: dict(x).get(variable, 0)} for x in (term.powers, term.logs)))
            for term in self.terms
        ]
        return replace(self, terms=tuple(dict.fromkeys(kept)))

    def plus(self, text: str) -> Law:
        """The law with the terms of `text` before its own, each once."""
        return replace(self, terms=tuple(dict.fromkeys((*parse(text).terms, *self.terms))))

    def __str__(self) -> str:
        text = " + ".join(str(term) for term in self.terms)
        return f"O({text})" if self.bound else text


def parse(text: str) -> Law:
    """Read a law.

    Raises:
        UsageError: the text is not a law; the message shows examples.
    """
    stripped = text.strip()
    inside = re.fullmatch(r"O\((.*)\)", stripped)
    body = inside[1] if inside else stripped
    terms = tuple(dict.fromkeys(_term(part.strip(), text) for part in body.split("+")))
    return Law(terms, bound=inside is not None)


def _term(part: str, law: str) -> Term:
    powers: dict[str, Fraction] = {}
    logs: dict[str, Fraction] = {}
    at = 0
    while at < len(part) or not part:
        found = _FACTOR.match(part, at)
        if not found or (found[3] and found[3] not in VARIABLES):
            raise UsageError(
                f"'{law}' is not a law; write a sum of products of {', '.join(VARIABLES)},"
                f" {_EXAMPLES}"
            )
        if found[3]:
            into = logs if found[2] else powers
            into[found[3]] = into.get(found[3], Fraction(0)) + Fraction(found[4] or 1)
            if into[found[3]] > MOST_POWER:
                raise UsageError(f"'{law}' has a power above {MOST_POWER}; write one below")
        at = found.end()
    return Term.of(powers, logs)


def _ordered(powers: Mapping[str, Fraction | int]) -> tuple[tuple[str, Fraction], ...]:
    return tuple((name, Fraction(powers[name])) for name in VARIABLES if powers.get(name))


def _power(name: str, power: Fraction) -> str:
    if power == 1:
        return name
    decimal = f"{float(power):g}"
    return f"{name}^{decimal if Fraction(decimal) == power else power}"
