"""Position encodings: what each is called, where it acts, its parameters and its frequencies.

Numbers alone, so that planning can read them; `worker/positions.py` makes tables of them, and
`api/bias.py` what is added to scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

from attnbench.base.parameters import Parameter, base_name, read_name, shown
from attnbench.base.registry import Registry
from attnbench.errors import UsageError

Values = Mapping[str, Any]
# Of the parameters, a vector's width D and the number of places n: one frequency θ for each pair of
# dimensions. At place m a pair is turned by the angle m·θ.
Frequencies = Callable[[Values, int, int], list[float]]


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """One position encoding.

    `kind` is where it acts: `rotary` turns q and k, `additive` is added to x before the
    projections, `bias` to the scaled scores. `layout` says which dimensions a rotary one pairs, and
    `matrix` that it multiplies by rotation matrices instead of turning pairs. `factor` multiplies
    what was rotated. `wrong` says which parameters do not fit together, or None.
    """

    doc: str
    kind: Literal["none", "rotary", "additive", "bias"]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    frequencies: Frequencies = lambda values, dims, places: []
    layout: Literal["halves", "neighbours"] = "halves"
    matrix: bool = False
    factor: Callable[[Values], float] = lambda values: 1.0
    wrong: Callable[[Values], str | None] = lambda values: None

    @property
    def line(self) -> str:
        """What it is and what it takes, for `attnbench list`."""
        taken = " ".join(f"{key}={shown(p.default or 0)}" for key, p in self.parameters.items())
        return f"{self.doc} ({taken})" if taken else self.doc


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position encoding with its parameters, `values`; `text` is how it is written shortest."""

    text: str = "none"
    values: Values = field(default_factory=dict, compare=False, repr=False)

    @property
    def name(self) -> str:
        """`rope` of `rope:500000`."""
        return base_name(self.text)

    @property
    def encoding(self) -> Encoding:
        """What is called so."""
        return POSITIONS.get(self.name)


NONE = Position()


def for_core(position: Position, heads: int = 0) -> Position:
    """What is left to an implementation that computes the first of `heads`: a bias, or nothing."""
    if position.values.get("heads", heads) < heads:
        values = {**position.values, "heads": heads}.items()
        return parse_position(":".join([position.name, *(f"{key}={x}" for key, x in values)]))
    return position if position.encoding.kind == "bias" else NONE


@lru_cache(1024)
def parse_position(text: str) -> Position:
    """Read `none`, `rope`, `rope:500000`, `rope-yarn:factor=8:length=2048`.

    Raises:
        UsageError: an unknown encoding, or parameters that it does not take.
    """
    short, encoding, values = read_name(text, POSITIONS)
    if why := encoding.wrong(values):
        raise UsageError(f"position '{text}' {why} (--positions)")
    return Position(text=short, values=values)


def _by_base(values: Values, dims: int, places: int, stretch: float = 1.0) -> list[float]:
    """θ_i = base^(−2i/D), the base times `stretch`^(D/(D − 2)); D of the rotated dimensions.

    Where D is odd the last dimension stays as it is.
    """
    pairs = int(values.get("share", 1.0) * dims) // 2
    base = values["base"] * stretch ** (pairs / max(1, pairs - 1))
    return [base ** (-i / pairs) for i in range(pairs)]


def _by_parts(values: Values, dims: int, places: int) -> list[float]:
    """θ of fast pairs, θ/factor of slow ones, and of those in between a share of each.

    Linear in the turns within the trained length, from `slow` to `fast`; or, with `ramp=index`, in
    the pair's index between those of pairs with so many turns, as transformers has it.
    """
    thetas, slow, fast = _by_base(values, dims, places), values["slow"], values["fast"]
    turn, pairs = values["length"] / (2 * math.pi), len(thetas)
    shares = [(turn * theta - slow) / (fast - slow) for theta in thetas]
    if values.get("ramp") == "index":
        low, high = (pairs * math.log(turn / x) / math.log(values["base"]) for x in (fast, slow))
        if values["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        shares = [1 - (i - low) / (high - low or 0.001) for i in range(pairs)]
    kept = [min(1.0, max(0.0, share)) for share in shares]
    return [theta * (x + (1 - x) / values["factor"]) for theta, x in zip(thetas, kept, strict=True)]


def _by_lists(values: Values, dims: int, places: int) -> list[float]:
    """θ over a number a pair, of `long` past the trained length; the last serves all after it."""
    numbers = values["long" if places > values["length"] else "short"]
    thetas = _by_base(values, dims, places)
    return [theta / numbers[min(i, len(numbers) - 1)] for i, theta in enumerate(thetas)]


def _real(default: float, least: float, most: float | None = None) -> Parameter:
    return Parameter(default=default, real=True, least=least, most=most)


_BASE = {"base": _real(10000.0, least=2)}
_ATTENTION = {"attention_factor": _real(0.0, least=0)} | _BASE  # 0: by the formula
_FACTOR = {"factor": _real(4.0, least=1)} | _BASE
_HEADS = {"heads": Parameter(default=0, least=0)}  # of how many the case's are the first
_rotary = partial(Encoding, kind="rotary", parameters=_BASE, frequencies=_by_base)
_by_turns = partial(
    _rotary,
    frequencies=_by_parts,
    wrong=lambda values: None if values["slow"] < values["fast"] else "needs slow below fast",
)

_POSITIONS = {
    "none": Encoding(doc="no position encoding", kind="none"),
    "rope": _rotary(doc="rotary (Su et al. 2021, arXiv:2104.09864), halves paired as in Llama"),
    "rope-interleaved": _rotary(
        doc="rotary, neighbours paired as in RoFormer", layout="neighbours"
    ),
    "rope-partial": _rotary(
        doc="rotary over the first share of the dimensions, as in GPT-NeoX (arXiv:2204.06745)",
        parameters={"share": _real(0.25, least=0.01, most=1)} | _BASE,
    ),
    "rope-matrix": _rotary(
        doc="rotary as a product with a D x D matrix per position, the textbook form",
        layout="neighbours",
        matrix=True,
    ),
    "rope-linear": _rotary(
        doc="rotary, places / factor: position interpolation (Chen et al. 2023, arXiv:2306.15595)",
        parameters=_FACTOR,
        frequencies=lambda values, d, n: [x / values["factor"] for x in _by_base(values, d, n)],
    ),
    "rope-ntk": _rotary(
        doc="rotary, base x factor^(D/(D-2)): NTK-aware (bloc97 2023; arXiv:2309.00071, 3.1)",
        parameters=_FACTOR,
        frequencies=lambda values, d, n: _by_base(values, d, n, stretch=values["factor"]),
    ),
    "rope-dynamic": _rotary(
        doc="rotary, NTK-aware by factor x n/length - (factor-1) past it (arXiv:2309.00071, 3.3)",
        parameters={"length": Parameter(default=2048), "factor": _real(1.0, least=1)} | _BASE,
        frequencies=lambda values, d, n: _by_base(
            values, d, n, stretch=1 + values["factor"] * max(0.0, n / values["length"] - 1)
        ),
    ),
    "rope-yarn": _by_turns(
        doc="rotary, slow pairs interpolated, logits scaled: YaRN (Peng et al., arXiv:2309.00071)",
        parameters={
            "factor": _real(16.0, least=1),
            "length": Parameter(default=4096),
            "slow": _real(1.0, least=0.001),
            "fast": _real(32.0, least=0),
            "ramp": Parameter(default="index", choices=("index", "turns")),
            "truncate": Parameter(default=1, least=0, most=1),
            "mscale": _real(1.0, least=0),
            "mscale_all_dim": _real(0.0, least=0),
        }
        | _ATTENTION,
        # 1/√t, on q and on k, so that the logits are divided by the temperature t.
        factor=lambda values: (
            values["attention_factor"]
            or (0.1 * values["mscale"] * math.log(values["factor"]) + 1)
            / (0.1 * values["mscale_all_dim"] * math.log(values["factor"]) + 1)
        ),
    ),
    "rope-llama3": _by_turns(
        doc="rotary, slow pairs interpolated as in Llama 3.1 (arXiv:2407.21783)",
        parameters={
            "factor": _real(8.0, least=1),
            "length": Parameter(default=8192),
            "slow": _real(1.0, least=0),
            "fast": _real(4.0, least=0),
            "base": _real(500000.0, least=2),
        },
    ),
    "rope-longrope": _rotary(
        doc="rotary, a scale for each pair: LongRoPE (arXiv:2402.13753), as in Phi-3",
        parameters={
            "factor": _real(32.0, least=1),
            "length": Parameter(default=4096, least=2),
            "short": Parameter(default=(1.0,), real=True, many=True, least=0.001, most=99999),
            "long": Parameter(default=(32.0,), real=True, many=True, least=0.001, most=99999),
        }
        | _ATTENTION,
        frequencies=_by_lists,
        factor=lambda x: x["attention_factor"] or math.sqrt(1 + math.log(x["factor"], x["length"])),
    ),
    "sinusoidal": Encoding(
        doc="sines added to x (Vaswani et al. 2017, arXiv:1706.03762, 3.5)",
        kind="additive",
        parameters=_BASE,
        frequencies=_by_base,
    ),
    "learned": Encoding(
        doc="a vector per position added to x, as in GPT-2; length=0: as many as needed",
        kind="additive",
        parameters={"length": Parameter(default=0, least=0)},
    ),
    "shaw": Encoding(
        doc="a vector per distance added to the keys (Shaw et al. 2018, arXiv:1803.02155)",
        kind="bias",
        parameters={"clip": Parameter(default=16)},
    ),
    "t5": Encoding(
        doc="a bias per head and bucket of distances (Raffel et al. 2020, arXiv:1910.10683)",
        kind="bias",
        parameters={"buckets": Parameter(default=32), "distance": Parameter(default=128)} | _HEADS,
        wrong=lambda values: (
            None
            if values["buckets"] % 4 == 0 and values["distance"] > values["buckets"] // 2
            else "needs a multiple of 4 buckets, and a distance above half of them"
        ),
    ),
    "alibi": Encoding(
        doc="a slope per head times the distance (Press et al. 2022, arXiv:2108.12409)",
        kind="bias",
        parameters=_HEADS,
    ),
}
POSITIONS: Registry[Encoding] = Registry("position encoding", "--positions", _POSITIONS)
